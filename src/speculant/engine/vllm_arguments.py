"""vLLM's arguments and methods: some change nothing here, some have another name or value, others are refused.

`LLM`, `AsyncEngine` and `speculant serve` read the same tables.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from speculant.checks import Rule
from speculant.config import EngineConfig
from speculant.drafting import IN_ONE_PASS, own_name
from speculant.errors import AbsentError, ConfigError

logger = logging.getLogger(__name__)


_ANY = Rule()
_OFF: tuple[Any, ...] = (None, False)
_UNSET: tuple[Any, ...] = (None, {}, [])
_ONE_PROCESS = Rule((None, 1), "one process computes the model", "leave it out, or start one process per copy.")
_NO_ADAPTERS = "adapters (LoRA) are not supported"
_NO_TRANSFER = "keys and values stay in this process"
_TEXT_ALONE = "models here complete text, and do nothing else"
_CONFIG_STAYS = "config.json is read as it is"
_EDIT_CONFIG = "edit a copy of config.json."

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("aggregate_engine_logging", "all2all_backend", "allow_deprecated_quantization"),
                *("allowed_local_media_path", "allowed_media_domains", "async_scheduling", "attention_backend"),
                *("attention_config", "compilation_config", "cudagraph_capture_sizes", "disable_async_output_proc"),
                *("disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce"),
                *("disable_hybrid_kv_cache_manager", "disable_log_requests", "disable_log_stats"),
                *("disable_mm_preprocessor_cache", "distributed_executor_backend", "enable_chunked_prefill"),
                *("enable_log_requests", "enforce_eager", "fail_on_environ_validation", "gpu_memory_utilization"),
                *("guided_decoding_backend", "limit_mm_per_prompt", "long_prefill_token_threshold"),
                *("max_cudagraph_capture_size", "max_long_partial_prefills", "max_num_partial_prefills"),
                *("max_parallel_loading_workers", "max_seq_len_to_capture", "mm_encoder_tp_mode"),
                *("mm_processor_cache_gb", "mm_processor_cache_type", "num_lookahead_slots", "observability_config"),
                *("offload_group_size", "offload_num_in_group", "offload_prefetch_step", "optimization_level"),
                *("performance_mode", "prefix_caching_hash_algo", "profiler_config", "ray_workers_use_nsight"),
                *("safetensors_load_strategy", "scheduler_reserve_full_isl", "served_model_name", "skip_mm_profiling"),
                *("stream_interval", "structured_outputs_config", "swap_space", "use_tqdm_on_load"),
                *("trust_remote_code", "use_v2_block_manager", "watermark"),
            ),
            _ANY,
        ),
        "calculate_kv_scales": Rule(_OFF, 'kv_cache_dtype="int8" computes scales by itself, for each head and token'),
        "code_revision": Rule((None,), "code of a repository is never run"),
        "config_format": Rule((None, "auto", "hf"), "config.json in Hugging Face's form is read"),
        "convert": Rule((None, "auto", "none"), _TEXT_ALONE),
        "cpu_offload_gb": Rule((None, 0), "weights lie in one memory", "leave it out, or set quantization."),
        "data_parallel_size": _ONE_PROCESS,
        "decode_context_parallel_size": _ONE_PROCESS,
        "disable_sliding_window": Rule(_OFF, _CONFIG_STAYS, "set max_model_len to the window's size."),
        "enable_expert_parallel": Rule(_OFF, _ONE_PROCESS.why),
        "enable_lora": Rule(_OFF, _NO_ADAPTERS, "merge the adapter into the weights and load those."),
        "enable_prompt_embeds": Rule(_OFF, "a prompt can't be given as embeddings", "give texts or token ids."),
        "enable_return_routed_experts": Rule(_OFF, "routing of experts is not reported"),
        "enable_sleep_mode": Rule(_OFF, "a model is in memory as long as its LLM"),
        "hf_config_path": Rule((None,), _CONFIG_STAYS, _EDIT_CONFIG),
        "hf_overrides": Rule(_UNSET, _CONFIG_STAYS, _EDIT_CONFIG),
        "hf_token": Rule((None, True), "the hub's own login is used", "set HF_TOKEN, or run `hf auth login`."),
        "kv_events_config": Rule(_UNSET, _NO_TRANSFER),
        "kv_transfer_config": Rule(_UNSET, _NO_TRANSFER),
        "load_format": Rule(
            (None, "auto", "hf", "safetensors", "gguf"), "the format of weights is read from the files"
        ),
        "logits_processors": Rule(_UNSET, "code in a step would see no drafts", "use SamplingParams.logit_bias."),
        "logprobs_mode": Rule((None, "raw_logprobs"), "log-probabilities are the model's own"),
        "mm_processor_kwargs": Rule(_UNSET, _TEXT_ALONE),
        "num_gpu_blocks_override": Rule((None,), "kv_memory bounds the caches", "set kv_memory."),
        "offload_params": Rule((*_UNSET, set()), "weights lie in one memory"),
        "override_pooler_config": Rule(_UNSET, _TEXT_ALONE),
        "pipeline_parallel_size": _ONE_PROCESS,
        "pooler_config": Rule(_UNSET, _TEXT_ALONE),
        "prefill_context_parallel_size": _ONE_PROCESS,
        "quantization_config": Rule(_UNSET, "quantization names the type of the weights", "set quantization."),
        "rope_scaling": Rule(_UNSET, _CONFIG_STAYS, _EDIT_CONFIG),
        "rope_theta": Rule((None,), _CONFIG_STAYS, _EDIT_CONFIG),
        "runner": Rule((None, "auto", "generate"), _TEXT_ALONE),
        "skip_tokenizer_init": Rule(_OFF, "stop strings and forms need a tokenizer", "use detokenize=False."),
        "task": Rule((None, "auto", "generate"), _TEXT_ALONE),
        "tensor_parallel_size": _ONE_PROCESS,
        "tokenizer_mode": Rule((None, "auto", "hf", "fast"), "tokenizer.json is the one form that is read"),
        "worker_cls": Rule((None, "auto"), _ONE_PROCESS.why),
        "worker_extension_cls": Rule((None, ""), _ONE_PROCESS.why),
    }
)
# Arguments of vLLM's server alone. What the server honours is a flag of its own.
SERVER_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("disable_access_log_for_endpoints", "disable_fastapi_docs", "disable_frontend_multiprocessing"),
                *("disable_uvicorn_access_log", "enable_auto_tool_choice", "enable_log_outputs"),
                *("enable_prompt_tokens_details", "enable_request_id_headers", "enable_server_load_tracking"),
                *("enable_tokenizer_info_endpoint", "h11_max_header_count", "h11_max_incomplete_event_size"),
                *("log_error_stack", "max_log_len", "reasoning_parser", "uvicorn_log_level"),
            ),
            _ANY,
        ),
        "allow_credentials": Rule(_OFF, "no cookies are read"),
        "api_server_count": _ONE_PROCESS,
        "config": Rule((None,), "no file of flags is read", "write flags, or the variables SPECULANT_<FLAG>."),
        "default_chat_template_kwargs": Rule(
            _UNSET, "variables of a template belong to requests", "send chat_template_kwargs."
        ),
        "enable_force_include_usage": Rule(_OFF, "a client asks for its usage", "send stream_options."),
        "exclude_tools_when_tool_choice_none": Rule(_OFF, "the template gets the tools of every request"),
        "headless": Rule(_OFF, _ONE_PROCESS.why),
        "log_config_file": Rule((None,), "logs have no file of settings", "use --log-level and --access-log."),
        "lora_modules": Rule(_UNSET, _NO_ADAPTERS, "merge the adapter into the weights and serve those."),
        "middleware": Rule(_UNSET, "code of others is not run between the server and its clients", "use a proxy."),
        "response_role": Rule((None, "assistant"), "answers have the role assistant"),
        "return_tokens_as_token_ids": Rule(_OFF, "a client asks for token ids", "send return_tokens_as_token_ids."),
        "tool_parser_plugin": Rule(
            (None, ""), "a format of tool calls is a package", "add an entry point of speculant.serving.tools."
        ),
        "tool_server": Rule((None,), "clients run their tools", "run the tools where the client is."),
        "uds": Rule((None,), "the server listens at a port", "use --host and --port."),
    }
)
# Arguments that take no value on vLLM's command line; `--no-NAME` turns one off.
SWITCHES = frozenset(
    (
        *("aggregate_engine_logging", "allow_credentials", "allow_deprecated_quantization", "async_scheduling"),
        *("calculate_kv_scales", "disable_async_output_proc", "disable_cascade_attn", "disable_chunked_mm_input"),
        *("disable_custom_all_reduce", "disable_fastapi_docs", "disable_frontend_multiprocessing"),
        *("disable_hybrid_kv_cache_manager", "disable_log_requests", "disable_log_stats"),
        *("disable_mm_preprocessor_cache", "disable_sliding_window", "disable_uvicorn_access_log"),
        *("enable_auto_tool_choice", "enable_chunked_prefill", "enable_expert_parallel", "enable_force_include_usage"),
        *("enable_log_outputs", "enable_log_requests", "enable_lora", "enable_prompt_embeds"),
        *("enable_prompt_tokens_details", "enable_request_id_headers", "enable_return_routed_experts"),
        *("enable_server_load_tracking", "enable_sleep_mode", "enable_tokenizer_info_endpoint", "enforce_eager"),
        *("exclude_tools_when_tool_choice_none", "fail_on_environ_validation", "headless", "log_error_stack"),
        *("ray_workers_use_nsight", "return_tokens_as_token_ids", "scheduler_reserve_full_isl", "skip_mm_profiling"),
        *("skip_tokenizer_init", "trust_remote_code", "use_tqdm_on_load", "use_v2_block_manager"),
    )
)
SHORT: Mapping[str, str] = MappingProxyType(
    {
        "api_server_count": "-asc",
        "data_parallel_size": "-dp",
        "decode_context_parallel_size": "-dcp",
        "enable_expert_parallel": "-ep",
        "pipeline_parallel_size": "-pp",
        "prefill_context_parallel_size": "-pcp",
        "tensor_parallel_size": "-tp",
    }
)
# vLLM's names of formats of tool calls, and ours.
TOOL_PARSERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("llama3_json", "llama4_json"), "llama3"),
        **dict.fromkeys(("openai", "gpt_oss"), "harmony"),
        **dict.fromkeys(("lfm2", "llama4_pythonic"), "pythonic"),
        **dict.fromkeys(("glm45", "glm47"), "glm"),
        **dict.fromkeys(("deepseek_v3", "deepseek_v31"), "deepseek"),
        **dict(granite4="hermes", kimi_k2="kimi", minimax_m2="minimax", phi4_mini_json="phi4", qwen3_xml="qwen3_coder"),
    }
)
# The keys of speculative_config. Keys that only change the speed of drafting have no effect here.
SPECULATIVE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("attention_backend", "adaptive_verification", "disable_by_batch_size", "disable_eagle_block_drop"),
                *("disable_log_stats", "disable_logprobs", "disable_padded_drafter_batch", "draft_sample_method"),
                *("enable_adaptive_verification", "enforce_eager", "index_share_for_mtp_iteration", "kv_cache_dtype"),
                *("max_model_len", "moe_backend", "use_local_argmax_reduction"),
            ),
            _ANY,
        ),
        "code_revision": Rule((None,), "code of a repository is never run"),
        "draft_load_config": Rule(_UNSET, "the format of weights is read from the files"),
        "draft_tensor_parallel_size": _ONE_PROCESS,
        "quantization": Rule((None,), "it has another name", "set draft_quantization beside speculative_config."),
        "rejection_sample_method": Rule(
            (None, "standard", "block", "strict", "probabilistic"),
            "it accepts drafts by chance, so the text is not the model's",
            'leave it out; "method": "synthetic" has a chosen rate of acceptance and keeps the text.',
        ),
        "revision": Rule((None,), "revision is the target's", "download the draft and name its folder."),
        "speculative_token_tree": Rule((None,), "it has another name", 'set "tree" (docs/drafters.md).'),
        "tensor_parallel_size": _ONE_PROCESS,
    }
)
_CALLS: Mapping[str, Rule] = MappingProxyType(
    {
        "lora_request": Rule((None, [], ()), _NO_ADAPTERS, "merge the adapter into the weights and load those."),
        "tokenization_kwargs": Rule(_UNSET, "a prompt is tokenised in one way", "give token ids."),
        "mm_processor_kwargs": Rule(_UNSET, _TEXT_ALONE),
        "chat_template_content_format": Rule(("auto", "string"), "templates get a message's content as text"),
    }
)
RENAMED: Mapping[str, str] = MappingProxyType({"kv_cache_memory_bytes": "kv_memory", "model_impl": "model_backend"})
# Values of arguments that exist here too, and our value for each.
VALUES: Mapping[str, Mapping[Any, Any]] = MappingProxyType(
    {
        "device": {"auto": "cpu"},
        "max_model_len": {-1: None, "auto": None},
        "model_backend": {"vllm": "auto"},
        "quantization": dict.fromkeys(  # files say it
            ("awq", "awq_marlin", "compressed-tensors", "gguf", "gptq", "gptq_marlin", "mxfp4")
        ),
        "scheduling_policy": {"fcfs": "first-come", "priority": "decode-first"},
    }
)
FRONTEND = ("chat_template", "generation_config", "override_generation_config")  # arguments beside `EngineConfig`
_ONE_TEXT = "the model completes text, and does nothing else"
_KEPT = "a model is in memory as long as its LLM"
_STEPS = "no call runs in the middle of a step"
# Methods and attributes of vLLM's LLM that are absent here: the reason and the alternative.
ABSENT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("encode", "embed", "classify", "score", "reward"),
            (_ONE_TEXT, "use a package for embeddings; a prompt's log-probabilities are prompt_logprobs."),
        ),
        **dict.fromkeys(("sleep", "wake_up"), (_KEPT, "delete the LLM, and make a new one when it is needed.")),
        **dict.fromkeys(
            ("collective_rpc", "apply_model"), (_STEPS, "read the model's folder; `checkpoint` describes the model.")
        ),
        **dict.fromkeys(
            ("start_profile", "stop_profile"),
            ("profiles are made by commands", "run `speculant bench --profile FILE`, or see docs/profiling.md."),
        ),
        **dict.fromkeys(
            ("enqueue", "wait_for_completion"),
            ("a call waits for its prompts", "use LLM.stream, or AsyncEngine.generate for many at a time."),
        ),
        "llm_engine": (
            "no loop of steps is public",
            "use LLM.generate, LLM.stream, or AsyncEngine for other programs.",
        ),
        "renderer": ("prompts are rendered by the LLM", "use LLM.render_chat, or get_tokenizer()."),
        "set_tokenizer": ("a model has one tokenizer", "make LLM(tokenizer=...)."),
    }
)
QUANTISED = ("hqq", "modelopt", "quark", "torchao")
ROUNDED = ("bitsandbytes", "fp8")  # vLLM rounds an unquantised checkpoint, too


def read_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in the names and values of `EngineConfig`; None stands for a default.

    vLLM's own are left out where they change nothing, and a line of the log names them. Raises ConfigError with the
    reason for one that can't be followed. Unknown names are returned: `EngineConfig` refuses them.
    """
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    values: dict[str, Any] = {}
    for name, value in _without_foreign(RULES, given).items():
        own = RENAMED.get(name, name)
        if own in values:
            raise ConfigError(f"{name} and {own} are both given", "keep one.")
        read = _read_value(own, value)
        if read is not None or fields.get(own) is None:
            values[own] = read
    return values


def configured(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are fields of `EngineConfig`, without those of `Frontend`."""
    return {name: value for name, value in values.items() if name not in FRONTEND}


def _without_foreign(rules: Mapping[str, Rule], given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the arguments without a rule. Raises ConfigError for a refused value; the log names the ignored ones."""
    foreign = [name for name in given if name in rules]
    for name in foreign:
        rules[name].check(where + name, given[name])
    if foreign:
        logger.info("arguments of vLLM without effect (docs/vllm.md): %s", ", ".join(where + name for name in foreign))
    return {name: value for name, value in given.items() if name not in rules}


def check_call(**given: object) -> None:
    """Raise ConfigError for an argument of a call, such as lora_request, that is not supported."""
    for name, value in given.items():
        _CALLS[name].check(name, value)


def _read_value(name: str, value: Any) -> Any:
    """Return a value in the form of `EngineConfig`."""
    if name == "speculative_config" and isinstance(value, Mapping):
        return _read_speculative(_without_foreign(SPECULATIVE_RULES, value, "speculative_config."))
    if name == "quantization" and value in QUANTISED:
        raise ConfigError(
            f"quantization={value!r} is not supported: weights in this format can't be read",
            'use the checkpoint that it was made from, with quantization="int8" or "int4".',
        )
    if name == "quantization" and value in ROUNDED:
        raise ConfigError(
            f"quantization={value!r} is not supported: no weights are rounded to this type while they are loaded",
            "leave it out for a checkpoint in this format, which config.json names; for another one, use"
            ' quantization="int8" or "int4".',
        )
    known = VALUES.get(name, {})
    return known[value] if isinstance(value, str | int) and value in known else value


def _read_speculative(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a speculative_config with our names: of methods, of drafts in one pass, of lengths that vary."""
    values = dict(given)
    method = values.get("method")
    if isinstance(method, str):
        values["method"] = own_name(method)
    if values.pop("parallel_drafting", None):
        if method not in IN_ONE_PASS:
            raise ConfigError(
                f"speculative_config.parallel_drafting=True is not supported with method {method!r}",
                f"leave it out; with {', '.join(filter(None, IN_ONE_PASS))} it is known.",
            )
        values["method"] = IN_ONE_PASS[method]
    if values.pop("num_speculative_tokens_per_batch_size", None):
        values.setdefault("draft_length", "adaptive")  # lengths by measured costs, at most num_speculative_tokens
    return values


def absent(name: str, kind: str) -> AttributeError:
    """Return the error for an attribute that an object has not: the reason and a fix for one of vLLM's."""
    if name not in ABSENT:
        return AttributeError(f"{kind!r} object has no attribute {name!r}")
    return AbsentError(f"{kind}.{name} is absent: {ABSENT[name][0]}", ABSENT[name][1])
