"""The request fields that vLLM's, llama.cpp's and Anthropic's servers document, as data.

Sources: vLLM's protocol classes (vllm/entrypoints/openai/completion/protocol.py, .../chat_completion/protocol.py,
.../responses/protocol.py at 010a69c, vllm/entrypoints/serve/tokenize/protocol.py at 030ea52; the first two at 002032e)
with the fields of earlier versions that clients still send; llama.cpp's tools/server/README.md at 00dc805;
the types MessageCreateParams of Anthropic's package, those of its beta too, in 2.14.0 and with earlier fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_VLLM_GENERATION = """
model stream stream_options n temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty
logit_bias seed max_tokens min_tokens stop stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids
bad_words use_beam_search length_penalty watermarking add_special_tokens response_format structured_outputs priority
request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
stream_interval user echo logprobs
"""
_VLLM_BEFORE = """
guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
logits_processors best_of
"""
VLLM: Mapping[str, str] = MappingProxyType(
    {
        "/v1/completions": _VLLM_GENERATION + _VLLM_BEFORE + "prompt suffix prompt_embeds",
        "/v1/chat/completions": _VLLM_GENERATION
        + _VLLM_BEFORE
        + """messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
        parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs return_prompt_text""",
        "/v1/responses": """background include input instructions max_output_tokens max_tool_calls metadata model
        logit_bias parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text
        tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output
        prompt_cache_key request_id mm_processor_kwargs priority cache_salt enable_response_messages
        previous_input_messages previous_response structured_outputs repetition_penalty seed stop ignore_eos
        vllm_xargs""",
        "/tokenize": """model prompt messages add_special_tokens return_token_strs add_generation_prompt
        continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
        "/detokenize": "model tokens",
    }
)
_VLLM_PROMPTS = "encoder_prompt decoder_prompt"  # keys of vLLM's prompts for encoder-decoder models
LLAMA_CPP = """
prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl n_cache_reuse
stream stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base
dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau
mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt
return_tokens samplers timings_per_token return_progress sse_ping_interval post_sampling_probs response_fields lora
top_n_sigma n_discard speculative.n_max speculative.n_min speculative.p_min input_prefix input_suffix input_extra
messages response_format chat_template_kwargs reasoning_effort reasoning_format reasoning_control parallel_tool_calls
content add_special parse_special with_pieces tokens
"""
_EDITORS = "t_max_prompt_ms"  # llama.vim and llama.vscode send it, and llama.cpp does not read it
OPENAI = """
audio function_call functions modalities metadata prediction prompt_cache_key prompt_cache_retention
safety_identifier service_tier store verbosity web_search_options conversation
"""
NAMES: tuple[str, ...] = tuple(
    sorted({*" ".join((*VLLM.values(), _VLLM_PROMPTS, LLAMA_CPP, _EDITORS, OPENAI)).split()})
)

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_MESSAGES = [{"role": "user", "content": "def f(x):"}]

# A value of each field that is not its default; of those that are not here, `ANY`.
ANY = {"x": 1}
VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "add_generation_prompt": False,
        "add_special": True,
        "add_special_tokens": None,  # see `value_of`: the default differs by route
        "allowed_token_ids": [40, 41],
        "audio": {"voice": "alloy", "format": "wav"},
        "background": True,
        "bad_words": ["return"],
        "best_of": 3,
        "cache_prompt": False,
        "cache_salt": "mine",
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"enable_thinking": False},
        "content": "x",
        "continue_final_message": True,
        "conversation": "conv_1",
        "documents": [{"title": "t", "text": "x"}],
        "dry_allowed_length": 3,
        "dry_base": 2.0,
        "dry_multiplier": 0.8,
        "dry_penalty_last_n": 10,
        "dry_sequence_breakers": ["x"],
        "dynatemp_exponent": 2.0,
        "dynatemp_range": 0.5,
        "echo": True,
        "frequency_penalty": 0.5,
        "grammar": 'root ::= "a"',
        "guided_choice": ["a"],
        "guided_grammar": 'root ::= "a"',
        "guided_regex": "a",
        "id_slot": 0,
        "ignore_eos": True,
        "include": ["message.output_text.logprobs"],
        "include_reasoning": False,
        "include_stop_str_in_output": True,
        "input": "def f(x):",
        "instructions": "be brief",
        "length_penalty": 2.0,
        "logit_bias": {"5": 1.0},
        "logprob_token_ids": [5],
        "logprobs": 1,
        "lora": [{"id": 0, "scale": 0.5}],
        "max_completion_tokens": 3,
        "max_output_tokens": 3,
        "max_tokens": 3,
        "max_tool_calls": 1,
        "messages": _MESSAGES,
        "min_keep": 2,
        "min_p": 0.2,
        "min_tokens": 1,
        "mirostat": 2,
        "mirostat_eta": 0.2,
        "mirostat_tau": 4.0,
        "modalities": ["text", "audio"],
        "model": "another",
        "n": 2,
        "n_cache_reuse": 8,
        "n_cmpl": 2,
        "n_discard": 5,
        "n_indent": 2,
        "n_keep": 5,
        "n_predict": 3,
        "n_probs": 2,
        "parallel_tool_calls": False,
        "parse_special": False,
        "post_sampling_probs": True,
        "prediction": {"type": "content", "content": "x"},
        "presence_penalty": 0.5,
        "previous_response_id": "resp_1",
        "priority": 1,
        "prompt": "def f(x):",
        "prompt_logprobs": 1,
        "reasoning_effort": "low",
        "reasoning_format": "none",
        "repeat_last_n": 10,
        "repeat_penalty": 1.3,
        "repetition_penalty": 1.3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
        "return_token_ids": True,
        "return_token_strs": True,
        "seed": 7,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "speculative.n_max": 4,
        "speculative.n_min": 1,
        "speculative.p_min": 0.5,
        "stop": ["return"],
        "stop_token_ids": [40],
        "store": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "structured_outputs": {"json": _SCHEMA},
        "suffix": "x",
        "t_max_predict_ms": 10,
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
        "thinking_token_budget": 5,
        "tokens": [5],
        "tool_choice": "required",
        "tools": [_TOOL],
        "top_k": 5,
        "top_logprobs": 1,
        "top_n_sigma": 1.0,
        "top_p": 0.5,
        "truncate_prompt_tokens": 2,
        "truncation": "auto",
        "truncation_side": "right",
        "typical_p": 0.5,
        "verbosity": "low",
        "watermarking": True,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
    }
)


def value_of(name: str, path: str) -> Any:
    """Return a value of a field that is not its default on a route."""
    if name == "add_special_tokens":
        return path in ("/v1/chat/completions", "/v1/responses")
    if name == "logprobs" and path != "/v1/completions":
        return True
    return VALUES.get(name, ANY)


# Anthropic's fields, each with a value that is not its default, and what this server does: it reads the value, refuses
# it by name, or accepts it because the answer is the same.
ANTHROPIC: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "billing_policy": ({"type": "billing_policy", "bill_to": "self"}, "accepts"),
        "cache_control": ({"type": "ephemeral"}, "accepts"),
        "compaction": ({"type": "x"}, "refuses"),
        "container": ("container_1", "refuses"),
        "context_management": ({"edits": [{"type": "clear_tool_uses_20250919"}]}, "refuses"),
        "diagnostics": ({"previous_message_id": "msg_1"}, "accepts"),
        "fallback_credit_token": ("x", "accepts"),
        "fallbacks": ([{"model": "another"}], "accepts"),
        "inference_geo": ("eu", "accepts"),
        "max_tokens": (3, "reads"),
        "mcp_servers": ([{"type": "url", "name": "x", "url": "https://x"}], "refuses"),
        "messages": ([{"role": "user", "content": "other"}], "reads"),
        "metadata": ({"user_id": "me"}, "accepts"),
        "output_config": ({"format": {"type": "json_schema", "schema": _SCHEMA}}, "reads"),
        "output_format": ({"type": "json_schema", "schema": _SCHEMA}, "reads"),
        "service_tier": ("standard_only", "accepts"),
        "speed": ("fast", "accepts"),
        "stop_sequences": (["-", "9"], "reads"),
        "system": ("be brief", "reads"),
        "temperature": (0.0, "reads"),
        "thinking": ({"type": "enabled", "budget_tokens": 1024}, "reads"),
        "thread": ({"type": "create"}, "refuses"),
        "tool_choice": ({"type": "any"}, "reads"),  # beside tools
        "tools": ([{"name": "f", "input_schema": {"type": "object"}}], "reads"),
        "top_k": (1, "reads"),
        "top_p": (0.01, "reads"),
        "user_profile_id": ("me", "accepts"),
    }
)
