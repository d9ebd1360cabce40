"""Request fields that the servers of vLLM and llama.cpp document and this one does not read. This module is only data.

A field that a body declares is read, even if it is listed here. Other fields that would change the answer are refused,
so a client is told when it can't get the answer that it wants. Fields that change nothing are accepted. Fields that no
server documents are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer.

    advice: what to do instead. off: values that change nothing; None is always one. of_prompt: the field changes a
    prompt's tokens, so /tokenize refuses it too.
    """

    advice: str
    off: tuple[Any, ...] = (False, "", [], {})
    of_prompt: bool = False

    def is_set(self, value: Any) -> bool:
        """Whether a value would change the answer."""
        return value is not None and value not in self.off


_SAMPLER = "use temperature, top_k, top_p or min_p"
_STORED = "use previous_response_id"
_GRAMMAR = 'use structured_outputs={"grammar": ...}'
_SCHEMA = 'use response_format={"type": "json_schema", ...}'
_TEXT_ONLY = "this server reads and makes only text; leave it out"
_ONE_MODEL = "this server runs one model on one machine; leave it out"
_CHAT = "use /v1/chat/completions"
_PAIR = 'use prompt={"encoder_prompt": ..., "decoder_prompt": ...} on /v1/completions'

REFUSED: Mapping[str, Refused] = MappingProxyType(
    {
        # forms of the output
        "guided_json": Refused('use structured_outputs={"json": ...}', (False,)),
        "guided_regex": Refused('use structured_outputs={"regex": ...}'),
        "guided_choice": Refused('use structured_outputs={"choice": ...}'),
        "guided_grammar": Refused(_GRAMMAR),
        "grammar": Refused(_GRAMMAR),
        "json_schema": Refused(_SCHEMA, (False,)),
        "n_indent": Refused('use structured_outputs={"regex": ...}'),
        # sampling
        "logits_processors": Refused("no request can bring code; use logit_bias"),
        "use_beam_search": Refused("set beam_width"),
        "typical_p": Refused(_SAMPLER, (1.0,)),
        "mirostat": Refused(_SAMPLER),
        "dry_multiplier": Refused("use repetition_penalty or frequency_penalty"),
        "xtc_probability": Refused(_SAMPLER),
        "dynatemp_range": Refused("set only temperature"),
        "top_n_sigma": Refused("use min_p", (0, -1)),
        "min_keep": Refused("use top_k"),
        "samplers": Refused("the order of samplers is fixed; leave it out"),
        "repeat_penalty": Refused("use repetition_penalty", (1.0,)),
        "repeat_last_n": Refused("penalties see all tokens; leave it out", (64, 0, -1)),
        "watermarking": Refused("leave it out"),
        "repetition_detection": Refused("use repetition_penalty and max_tokens"),
        "lora": Refused(_ONE_MODEL),
        "vllm_xargs": Refused("no request can bring extensions; leave it out"),
        "speculative.n_max": Refused('use speculation={"num_speculative_tokens": ...}'),
        "speculative.n_min": Refused("use speculation"),
        "speculative.p_min": Refused("use speculation"),
        # end conditions
        "n_predict": Refused("use max_tokens", (-1,)),
        "n_cmpl": Refused("use n", (1,)),
        "t_max_predict_ms": Refused("use max_tokens"),
        "thinking_token_budget": Refused("use max_tokens", (-1,)),
        "reasoning_control": Refused("use max_tokens"),
        # prompts
        "chat_template": Refused("templates come only from the model's folder; leave it out", of_prompt=True),
        "encoder_prompt": Refused(_PAIR, of_prompt=True),
        "decoder_prompt": Refused(_PAIR, of_prompt=True),
        "prompt_embeds": Refused("send text or token ids", of_prompt=True),
        "mm_processor_kwargs": Refused(_TEXT_ONLY, of_prompt=True),
        "media_io_kwargs": Refused(_TEXT_ONLY, of_prompt=True),
        "add_generation_prompt": Refused(_CHAT, (True,)),
        "content": Refused("use prompt", of_prompt=True),
        "add_special": Refused("use add_special_tokens", of_prompt=True),
        "parse_special": Refused("special tokens in a text are always read as such", (True,), of_prompt=True),
        "n_keep": Refused("a prompt that is too long is refused; use truncate_prompt_tokens"),
        "n_discard": Refused("a prompt that is too long is refused; use truncate_prompt_tokens"),
        "truncation": Refused("shorten the input", ("disabled",)),
        "input_prefix": Refused("write the prompt in the model's own form for code"),
        "input_suffix": Refused("write the prompt in the model's own form for code"),
        "input_extra": Refused("write the prompt in the model's own form for code"),
        "previous_input_messages": Refused(_STORED),
        "previous_response": Refused(_STORED),
        "conversation": Refused(f"conversations have no id; {_STORED}"),
        # content of the answer
        "audio": Refused(_TEXT_ONLY),
        "detokenize": Refused("answers are text; set return_token_ids for their tokens", (True,)),
        "enable_response_messages": Refused("leave it out"),
        "functions": Refused("use tools"),
        "function_call": Refused("use tool_choice"),
        "tool_choice": Refused(f"{_CHAT} for tools", ("auto", "none")),
        "include": Refused("use logprobs; include is a field of /v1/responses"),
        "include_reasoning": Refused("ignore reasoning_content instead", (True,)),
        "reasoning": Refused("use reasoning_effort on /v1/chat/completions; reasoning is a field of /v1/responses"),
        "reasoning_format": Refused("reasoning is always in reasoning_content", ("auto", "deepseek")),
        "kv_transfer_params": Refused(_ONE_MODEL),
        "ec_transfer_params": Refused(_ONE_MODEL),
        "logprob_token_ids": Refused("use logprobs"),
        "n_probs": Refused("use logprobs"),
        "post_sampling_probs": Refused("log-probabilities are the model's own; leave it out"),
        "response_fields": Refused("leave it out"),
        "return_progress": Refused("leave it out"),
        "return_prompt_text": Refused("use /tokenize and /detokenize"),
        "return_tokens": Refused("set return_token_ids"),
        "return_tokens_as_token_ids": Refused("set return_token_ids"),
        "routed_experts_prompt_start": Refused("leave it out"),
        "spaces_between_special_tokens": Refused("the tokenizer decides on spaces; leave it out", (True,)),
        "timings_per_token": Refused("see --per-request-spec-decode-metrics, or /metrics"),
        "verbosity": Refused("say it in the prompt", ("medium",)),
        "web_search_options": Refused("this server searches nothing; leave it out"),
        "with_pieces": Refused("set return_token_strs", of_prompt=True),
    }
)

# Fields that change nothing in the answer, and why.
ACCEPTED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("user", "metadata", "store", "service_tier", "safety_identifier", "session_id", "request_id"),
            "labels of a request: of these only /v1/responses reads store and metadata",
        ),
        **dict.fromkeys(
            ("prompt_cache_key", "prompt_cache_retention", "cache_prompt", "id_slot", "n_cache_reuse"),
            "the prefix cache decides by itself, and changes no token",
        ),
        **dict.fromkeys(
            ("stream_interval", "sse_ping_interval"), "a stream has a chunk for each token; its text is the same"
        ),
        **dict.fromkeys(("return_token_offsets", "return_mm_kwargs"), "of vLLM's render routes, which are not here"),
        **dict.fromkeys(
            ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
            "nothing without dry_multiplier, which is refused",
        ),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "nothing without mirostat, which is refused"),
        "dynatemp_exponent": "nothing without dynatemp_range, which is refused",
        "xtc_threshold": "nothing without xtc_probability, which is refused",
        "guided_decoding_backend": "nothing without the other guided fields, which are refused",
        "guided_whitespace_pattern": "nothing without the other guided fields, which are refused",
        "parallel_tool_calls": "nothing where there are no tools",
    }
)
