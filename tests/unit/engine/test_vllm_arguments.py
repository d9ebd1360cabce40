"""vLLM's arguments of `LLM`: each is a field here, changes nothing, has another name, or is refused with the reason."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from speculant.config import EngineConfig
from speculant.engine import (
    FRONTEND,
    QUANTISED,
    RENAMED,
    ROUNDED,
    RULES,
    SPECULATIVE_RULES,
    VALUES,
    check_call,
    read_arguments,
)
from speculant.errors import ConfigError

FIELDS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
# The arguments of vLLM 0.33's LLM, and the fields of its EngineArgs that offline scripts set.
VLLM = """
    runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code allowed_local_media_path
    allowed_media_domains tensor_parallel_size dtype quantization revision tokenizer_revision seed
    gpu_memory_utilization cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_params
    enforce_eager enable_return_routed_experts disable_custom_all_reduce hf_token hf_overrides mm_processor_kwargs
    pooler_config structured_outputs_config profiler_config attention_config kv_cache_memory_bytes compilation_config
    quantization_config logits_processors
    download_dir load_format config_format kv_cache_dtype max_model_len distributed_executor_backend
    pipeline_parallel_size data_parallel_size enable_expert_parallel max_parallel_loading_workers block_size
    enable_prefix_caching prefix_caching_hash_algo disable_sliding_window disable_cascade_attn swap_space
    max_num_batched_tokens max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold max_num_seqs
    max_logprobs logprobs_mode disable_log_stats code_revision rope_scaling rope_theta limit_mm_per_prompt
    enable_lora speculative_config enable_chunked_prefill scheduling_policy generation_config
    override_generation_config enable_sleep_mode model_impl kv_transfer_config kv_events_config
    calculate_kv_scales async_scheduling stream_interval served_model_name hf_config_path num_gpu_blocks_override
    use_tqdm_on_load safetensors_load_strategy optimization_level performance_mode enable_prompt_embeds
""".split()


@pytest.mark.parametrize("name", VLLM)
def test_every_argument_of_vllm_is_known(name: str) -> None:
    assert name in FIELDS or name in RULES or name in RENAMED or name in FRONTEND


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.harmless is not None])
def test_harmless_values_are_dropped_and_others_refused(name: str) -> None:
    rule = RULES[name]
    for value in rule.harmless or ():
        assert read_arguments({name: value}) == {}
    with pytest.raises(ConfigError) as caught:
        read_arguments({name: "something else"})
    assert caught.value.problem == f"{name}='something else' is not supported: {rule.why}"
    assert rule.why
    assert caught.value.fix == rule.fix


def test_no_rule_is_about_a_field_that_exists_here() -> None:
    assert not set(FIELDS) & set(RULES)
    assert {*RENAMED.values(), *VALUES} <= set(FIELDS)


@pytest.mark.parametrize("value", [2, "4", True])
def test_several_processes_are_refused(value: Any) -> None:
    if value is True:
        assert read_arguments({"tensor_parallel_size": value}) == {}  # True is 1
        return
    with pytest.raises(ConfigError, match="one process computes the model"):
        read_arguments({"tensor_parallel_size": value})


@pytest.mark.parametrize("given", ["half", "float16", "float", torch.float16, torch.float32, "float32"])
def test_types_are_read_by_all_their_names(given: Any) -> None:
    assert EngineConfig("x", dtype=given).dtype == "float32"
    assert EngineConfig("x", dtype=torch.bfloat16).dtype == "bfloat16"  # type: ignore[arg-type]
    assert read_arguments({"dtype": None}) == {}


@pytest.mark.parametrize("name", SPECULATIVE_RULES)
def test_keys_of_vllm_s_speculative_config_are_read(name: str) -> None:
    rule, own = SPECULATIVE_RULES[name], {"method": "ngram", "prompt_lookup_max": 3}
    for value in rule.harmless or (3,):
        assert read_arguments({"speculative_config": {**own, name: value}}) == {"speculative_config": own}
    if rule.harmless is not None:
        with pytest.raises(ConfigError, match=f"speculative_config.{name}='else' is not supported: {rule.why}"):
            read_arguments({"speculative_config": {**own, name: "else"}})


def test_other_names_and_values_are_translated() -> None:
    given = {"kv_cache_memory_bytes": 2**30, "scheduling_policy": "fcfs", "device": "auto", "max_model_len": -1}
    assert read_arguments(given) == {
        "kv_memory": 2**30,
        "scheduling_policy": "first-come",
        "device": "cpu",
        "max_model_len": None,
    }
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes and kv_memory are both given"):
        read_arguments({"kv_memory": "1GiB", "kv_cache_memory_bytes": 2**30})


def test_none_is_a_default_where_no_other_meaning_is_known() -> None:
    values = read_arguments(dict.fromkeys(FIELDS))
    assert values == {name: None for name, default in FIELDS.items() if default is None}


@pytest.mark.parametrize("name", [*QUANTISED, *ROUNDED])
def test_formats_of_quantised_checkpoints_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"quantization='{name}' is not supported(?s:.*)int8"):
        read_arguments({"quantization": name})
    assert read_arguments({"quantization": "int4"}) == {"quantization": "int4"}


def test_gguf_is_read_as_the_file_is() -> None:
    assert read_arguments({"quantization": "gguf", "load_format": "gguf"}) == {"quantization": None}


def test_unknown_names_are_passed_to_the_config() -> None:
    values = read_arguments({"max_modl_len": 3})
    with pytest.raises(ConfigError, match=r"'max_modl_len'(?s:.*)did you mean 'max_model_len'"):
        EngineConfig.from_arguments(model="x", **values)


def test_one_line_of_the_log_names_all_that_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speculant"):
        read_arguments({"enforce_eager": True, "swap_space": 4, "max_num_seqs": 3})
        read_arguments({"max_num_seqs": 3})
    (record,) = caplog.records
    assert record.getMessage() == "arguments of vLLM without effect (docs/vllm.md): enforce_eager, swap_space"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lora_request": "adapter"}, "adapters"),
        ({"tokenization_kwargs": {"padding": True}}, "tokenised in one way"),
        ({"mm_processor_kwargs": {"size": 1}}, "text"),
        ({"chat_template_content_format": "openai"}, "content as text"),
    ],
    ids=str,
)
def test_arguments_of_calls_are_checked(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_call(**given)
    check_call(lora_request=None, tokenization_kwargs={}, mm_processor_kwargs=None, chat_template_content_format="auto")
