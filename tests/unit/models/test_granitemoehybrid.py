"""Granite 4's config.json, as transformers writes it and as the published files have it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from speculant.errors import ModelError
from speculant.models import Experts, State, read_description
from tests.unit.models.families import FULL, LINEAR, MAMBA, SMALL

HYBRID = {**SMALL, **MAMBA, "model_type": "granitemoehybrid", "layer_types": [LINEAR, FULL, LINEAR]}


def state_of(**entries: Any) -> State:
    found = read_description({**HYBRID, **entries}).states[0]
    assert found
    return found


@pytest.mark.parametrize(
    "entries",
    [
        {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"},
        {"mamba_d_head": "auto", "time_step_limit": [0.0, {"__float__": "Infinity"}]},
        {"mamba_d_head": 8, "time_step_limit": [0.0, math.inf]},
    ],
)
def test_published_files_say_the_same(entries: dict[str, Any]) -> None:
    assert read_description({**HYBRID, **entries}) == read_description(HYBRID)


def test_layers_of_attention_alone_rotate_and_have_no_state() -> None:
    found = read_description({**HYBRID, "layer_types": ["attention"] * 3, "position_embedding_type": "rope"})
    assert not any(found.states)
    assert all(layer.attention and layer.attention.rope for layer in found.layers)


def test_groups_share_keys_and_norms() -> None:
    of = state_of(mamba_n_groups=4, mamba_expand=1)
    assert (of.heads, of.key_heads, of.head_dim, of.size, of.width) == (8, 4, 4, 32, 32 + 2 * 4 * 12)
    assert state_of(time_step_limit=[0.5, 2]).steps == (0.5, 2.0)


def test_experts_have_a_block_beside_them() -> None:
    """There are eight if config.json does not say."""
    entries = {key: value for key, value in HYBRID.items() if key != "num_local_experts"}
    blocks = [layer.mlp for layer in read_description({**entries, "shared_intermediate_size": 20}).layers]
    assert all(isinstance(of, Experts) and of.shared and of.renormalise for of in blocks)
    assert {(of.count, of.used, of.size, of.shared.size) for of in blocks} == {(8, 2, 48, 20)}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"mamba_n_groups": 3}, "8 heads for 3 keys"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "each token use 3 experts"),
        ({"num_local_experts": -1}, "num_local_experts = -1"),
        ({"mamba_d_head": 9}, "8 heads of 9 in states of 64 numbers"),
        ({"mamba_n_heads": 7}, "7 heads of 9 in states of 64 numbers"),
        ({"hidden_act": "relu"}, "hidden_act=relu in layers with a state"),
        ({"time_step_limit": [1.0]}, "time_step_limit = \\[1.0\\], not two numbers"),
        ({"time_step_limit": [2.0, 1.0]}, "time_step_limit = 1.0, not a number from 2 to inf"),
        ({"time_step_limit": [0.0, math.nan]}, "time_step_limit = nan"),
        ({"layer_types": [LINEAR] * 3}, "3 layers without attention"),
        ({"layer_types": [LINEAR, FULL, "conv"]}, "layer_types = "),
    ],
    ids=str,
)
def test_wrong_entries_are_named(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_description({**HYBRID, **entries})
