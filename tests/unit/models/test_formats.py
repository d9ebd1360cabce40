"""Formats that can't be read are named, with a remedy. Null entries of a config count as absent."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from speculant import plugins
from speculant.config import EngineConfig, resolve
from speculant.errors import ConfigError, ModelError
from speculant.models import load_model
from tests.unit.models.families import SMALL, VARIANTS, Pair, Session, make_pair
from tests.unit.models.test_loading import PROMPT, edit, edit_tensors

HELP = ("--quantization int4", 'quantization="int4"')


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("mistral"), "mistral", "v0.1")


@pytest.fixture
def folder(original: Pair, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(original.folder, tmp_path / "model")


def refused(source: Path | str, *words: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(source))
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_null_quantization_config_is_none(folder: Path, key: str, original: Pair) -> None:
    edit(folder / "config.json", **{key: None})
    assert Session(load_model(str(folder)).model).greedy(PROMPT, 4) == Session(original.ours).greedy(PROMPT, 4)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"quantization_config": {"quant_method": "hqq", "bits": 4, "group_size": 128}}, "(hqq, 4 bits)"),
        ({"compression_config": {"quant_method": "sparseml", "bits": 8}}, "(sparseml, 8 bits)"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scheme": "dynamic"}}, "(fbgemm_fp8)"),
        ({"quantization_config": {"load_in_8bit": True, "load_in_4bit": False}}, "(bitsandbytes, 8 bits)"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "(NVFP4)"),
        ({"quantization_config": {}}, "(quantization_config does not name the format)"),
        ({"quantization_config": [4]}, "(quantization_config does not name the format)"),
        ({"quantization_config": {"quant_method": {"name": "x"}, "bits": "4"}}, "({'name': 'x'})"),
    ],
    ids=str,
)
def test_a_quantised_checkpoint_is_called_by_its_format(folder: Path, changes: dict[str, Any], name: str) -> None:
    edit(folder / "config.json", **changes)
    refused(folder, f"this checkpoint is quantised {name}", "unquantised", *HELP)


@pytest.mark.parametrize("family", ["mistral3", "ministral", "qwen2_moe", "llama4", "mixtral3", "lama"])
def test_an_unknown_family_is_not_taken_for_another(folder: Path, family: str) -> None:
    """A similar name is no reason to load it as another family; a class that config.json names is one."""
    own = "".join(family.title().split("_")) + "ForCausalLM"
    for architectures in ([own], None, own, [3]):
        edit(folder / "config.json", model_type=family, architectures=architectures)
        assert "did you mean" not in refused(folder, repr(family), "these families: bart, cohere")
    edit(folder / "config.json", architectures=["MistralForCausalLM"])
    refused(folder, "did you mean 'mistral'?", "architectures")
    edit(folder / "config.json", model_type="mistral")
    load_model(str(folder))


@pytest.mark.parametrize("family", ["qwen2_moe", 3, None])
def test_a_null_auto_map_is_no_code(folder: Path, family: Any) -> None:
    edit(folder / "config.json", model_type=family, auto_map=None)
    assert "auto_map" not in refused(folder, "model_type")


def test_null_key_heads_of_mistral_are_its_query_heads() -> None:
    """As in transformers 4; version 5 refuses null. An absent entry means 8."""
    read, shared = plugins.load("speculant.models", "mistral").read_config, {**SMALL, "model_type": "mistral"}
    assert read({**shared, "num_attention_heads": 16, "num_key_value_heads": None}).attention.kv_heads == 16
    del shared["num_key_value_heads"]
    assert read({**shared, "num_attention_heads": 16}).attention.kv_heads == 8


ROPE_BY_DEFAULT = ("gemma4_text", "ministral3")  # an object, even of nulls, replaces their rotary settings
NULLS = ["num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"]


@pytest.mark.parametrize("key", NULLS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_null_sizes_are_those_of_transformers(family: str, key: str) -> None:
    if (family, key) == ("mistral", "num_key_value_heads"):
        pytest.skip("transformers 5 refuses it")
    hf = {**SMALL, "model_type": family, key: None}
    theirs = AutoConfig.for_model(**hf)
    ours = plugins.load("speculant.models", family).read_config(hf).attention
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert theirs.rope_parameters["rope_type"] == ours.rope.kind


@pytest.mark.parametrize(
    "entry",
    [
        {"hidden_act": None},
        {"rms_norm_eps": None},
        {"tie_word_embeddings": None},
        {"attention_bias": None},
        {"partial_rotary_factor": None},
        {"rope_scaling": {"rope_type": None, "type": None}},
        {"rope_parameters": {"rope_type": None, "partial_rotary_factor": None}},
        {"use_sliding_window": None},
    ],
    ids=str,
)
def test_null_entries_count_as_absent(entry: dict[str, Any]) -> None:
    (key,) = entry
    for family, variants in VARIANTS.items():
        read = plugins.load("speculant.models", family).read_config
        for name, own in variants.items():
            shared = {**SMALL, **own, "model_type": family}
            given = key in own or (key.startswith("rope") and family in ROPE_BY_DEFAULT)
            assert given or read({**shared, **entry}) == read(shared), f"{family}, {name}"


def test_a_null_factor_does_not_hide_another(folder: Path) -> None:
    edit(folder / "config.json", rope_scaling={"type": None, "partial_rotary_factor": None}, partial_rotary_factor=0.5)
    refused(folder, "0.5")


def test_null_end_tokens_hide_no_others(folder: Path) -> None:
    """A text without an end token would run up to its limit."""
    edit(folder / "config.json", eos_token_id=7)
    edit(folder / "generation_config.json", eos_token_id=None)
    assert load_model(str(folder)).eos_token_ids == {7}


@pytest.mark.parametrize(("kind", "said"), [("dynamic", 1), ("linear", 0)])  # linear extends the context
def test_dynamic_rope_says_that_it_has_no_effect(
    folder: Path, kind: str, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    edit(folder / "config.json", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})
    with caplog.at_level(logging.WARNING, "speculant"):
        model = load_model(str(folder)).model
    lines = [record.getMessage() for record in caplog.records if "dynamic rope scaling" in record.getMessage()]
    assert len(lines) == said
    assert all("no effect" in line and "128 positions" in line for line in lines)
    longest = 128 if kind == "dynamic" else 512
    assert resolve(EngineConfig(model="m", max_model_len=longest), model.max_positions).max_model_len == longest
    with pytest.raises(ConfigError, match=f"more than the {longest} positions"):  # where dynamic would have an effect
        resolve(EngineConfig(model="m", max_model_len=longest + 1), model.max_positions)


def test_null_does_not_excuse_a_missing_tensor(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=None)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, "lm_head.weight")
