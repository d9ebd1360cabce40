"""Gemma 4's config.json and the tensors in its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from speculant.errors import ModelError
from speculant.models import load_model, text_config
from speculant.models.families.gemma4_text import read_config
from tests.unit.models.families import FULL, SLIDES, SMALL, VARIANTS, Session, make_pair, random_tokens

SMALLEST = {**SMALL, "hidden_size_per_layer_input": 0, "num_hidden_layers": 6}
SHARED = {**SMALLEST, "layer_types": [SLIDES, FULL] * 3}


@pytest.mark.parametrize("variant", VARIANTS["gemma4_text"])
def test_old_and_new_heads_of_layers(variant: str) -> None:
    """transformers writes the heads by layer, and the published files have those of full attention."""
    old = {**SMALL, **VARIANTS["gemma4_text"][variant]}
    new = json.loads(AutoConfig.for_model("gemma4_text", **old).to_json_string(use_diff=False))
    assert "per_layer_config" in new
    assert read_config(new) == read_config({**new, "per_layer_config": None, **old})


def test_the_kinds_of_layers_by_default() -> None:
    layers = [layer.attention for layer in read_config({**SMALLEST, "num_hidden_layers": 14}).layers]
    assert [of.window for of in layers] == [512] * 5 + [None] + [512] * 5 + [None, 512, None]
    assert {(of.window, of.head_dim, of.kv_heads) for of in layers} == {(512, 256, 2), (None, 512, 2)}
    assert {of.rotated for of in layers} == {256, 512}


def test_layers_read_the_last_keys_of_their_kind() -> None:
    found = read_config({**SHARED, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}).layers
    assert [layer.attention.shares for layer in found] == [None, None, None, 1, 2, 1]
    assert [layer.mlp.size for layer in found] == [48] * 3 + [96] * 3
    narrow = read_config({**SHARED, "num_kv_shared_layers": 3}).layers
    assert [layer.mlp.size for layer in narrow] == [48] * 6


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"enable_moe_block": True, "num_experts": 4}, "enable_moe_block = True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"num_kv_shared_layers": 5}, "no layer with full_attention before"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6 of 6 layers"),
        ({"num_kv_shared_layers": True}, "num_kv_shared_layers = True"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 60}, "a table of 60 tokens"),
    ],
)
def test_what_is_not_implemented_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config({**SHARED, **entries})


def test_a_model_within_a_larger_one_with_unused_keys(tmp_path: Path) -> None:
    """The published files have keys' tensors for all layers."""
    pair = make_pair(tmp_path / "plain", "gemma4_text", "shared")
    inner = json.loads((tmp_path / "plain" / "config.json").read_text())
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for layer in range(3, 7):
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(3)
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    (tmp_path / "larger").mkdir()
    save_file({**named, "model.vision_tower.blocks.7.weight": torch.zeros(3)}, tmp_path / "larger/model.safetensors")
    outer = {"model_type": "gemma4", "vision_config": {}, "text_config": inner}
    assert text_config(outer)["model_type"] == "gemma4_text"
    (tmp_path / "larger" / "config.json").write_text(json.dumps(outer))
    tokens = random_tokens(9)
    found = Session(load_model(str(tmp_path / "larger")).model).extend(tokens)
    assert torch.equal(found, Session(pair.ours).extend(tokens))
    del named["model.language_model.layers.2.self_attn.k_proj.weight"]
    save_file(named, tmp_path / "larger" / "model.safetensors")
    with pytest.raises(ModelError, match="k_proj"):
        load_model(str(tmp_path / "larger"))
