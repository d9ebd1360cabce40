"""Every spelling of a config that transformers writes or has written means the same."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from speculant.errors import ModelError
from speculant.models import Rope, Rotary, rope_entries
from speculant.models.families import llama, mistral, qwen2, qwen3
from tests.unit.models.families import LLAMA3, SMALL


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2}},
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
            {"rope_parameters": LLAMA3},
        ),
    ],
)
def test_old_and_new_rotary_settings(old: dict[str, Any], new: dict[str, Any]) -> None:
    shared = {**SMALL, "model_type": "llama"}
    assert llama.read_config({**shared, **old}) == llama.read_config({**shared, **new})


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("parameters", [None, {}, {"rope_type": "default", "rope_theta": 5e5}, LLAMA3])
def test_rope_scaling_replaces_rope_parameters(parameters: dict[str, Any], scaling: dict[str, Any]) -> None:
    both = {"rope_theta": 3e4, "rope_parameters": parameters, "rope_scaling": scaling}
    theirs = LlamaConfig(**copy.deepcopy({**SMALL, **both})).rope_parameters
    ours = llama.read_config({**SMALL, "model_type": "llama", **both}).attention.rope
    kinds = {"default": (), "linear": (4.0,) * 4}
    assert ours.theta == theirs["rope_theta"]
    assert ours.factors == kinds.get(theirs["rope_type"], ours.factors)
    assert bool(ours.factors) == (theirs["rope_type"] != "default")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_both_forms_of_rotary_settings_are_checked(key: str) -> None:
    both = {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3, key: [1]}
    with pytest.raises(ModelError, match=key):
        llama.read_config({**SMALL, "model_type": "llama", **both})


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        (mistral, {}, (4096,) * 3),
        (mistral, {"sliding_window": None}, (None,) * 3),
        (mistral, {"sliding_window": 8}, (8,) * 3),
        (qwen2, {"sliding_window": 8}, (None,) * 3),
        (qwen2, {"sliding_window": 8, "use_sliding_window": True}, (None,) * 3),
        (qwen2, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        (qwen3, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None,) * 3),
        (
            qwen3,
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 8, None),
        ),
    ],
)
def test_windows(family: ModuleType, settings: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    layers = family.read_config({**SMALL, "model_type": "any", **settings}).layers
    assert tuple(layer.attention.window for layer in layers) == windows


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((mistral, {"sliding_window": value}) for value in (0, -1, "8", 1.5, True, 2**31, [4])),
        *((qwen2, {"use_sliding_window": value}) for value in (1, "yes", [])),
        *((qwen2, {"use_sliding_window": True, "max_window_layers": value}) for value in (-1, "1", 1.0, None)),
        *((qwen3, {"use_sliding_window": True, "sliding_window": value}) for value in (0, "8")),
        *(
            (qwen3, {"use_sliding_window": True, "sliding_window": 8, "layer_types": value})
            for value in ("full_attention", ["full_attention"], ["full"] * 3, [["full_attention"]] * 3, {}, 3)
        ),
        (llama, {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        *(
            (llama, {"rope_scaling": {"rope_type": "factors", "factors": value}})
            for value in ([], 2.0, [1.0] * 3, [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, "1"])
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_settings_of_another_kind_are_refused(family: ModuleType, settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        family.read_config({**SMALL, "model_type": "any", **settings})


@pytest.mark.parametrize("given", [{}, {"head_dim": None, "num_key_value_heads": None}])
def test_null_and_absent_sizes_follow_from_the_others(given: dict[str, Any]) -> None:
    hf = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    attention = llama.read_config({**hf, "model_type": "llama", **given}).attention
    assert (attention.head_dim, attention.kv_heads) == (8, 4)


def test_dynamic_angles_depend_on_the_position_alone() -> None:
    """Within the trained length they are the plain ones; beyond it, each position has its own base."""
    hf = {**SMALL, "model_type": "llama", "max_position_embeddings": 8}
    plain = Rotary(llama.read_config(hf).attention.rope, 8)
    dynamic = Rotary(llama.read_config({**hf, "rope_scaling": {"type": "dynamic", "factor": 2.0}}).attention.rope, 8)
    positions = torch.arange(20)
    together = dynamic.angles(positions, torch.float32)[0]
    alone = torch.cat([dynamic.angles(position[None], torch.float32)[0] for position in positions])
    assert torch.equal(together, alone)
    unscaled = plain.angles(positions, torch.float32)[0]
    torch.testing.assert_close(together[:8], unscaled[:8])
    assert not torch.allclose(together[8:], unscaled[8:])


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"type": "linear", "factor": 3.0}])
def test_factors_of_pairs_give_the_same_angles(scaling: dict[str, Any] | None) -> None:
    """Any scaling is a divisor of each pair's frequency; a trained head writes the divisors unchanged."""
    hf = {**SMALL, "model_type": "llama", "rope_scaling": scaling}
    theta = (scaling or {}).get("rope_theta", 10000.0)
    rope = llama.read_config(hf).attention.rope
    plain, scaled = (Rotary(each, 8)._frequencies for each in (Rope(theta), rope))
    factors = {"rope_type": "factors", "factors": (plain / scaled).tolist()}
    own = llama.read_config({**hf, "rope_theta": theta, "rope_scaling": factors}).attention.rope
    positions = torch.arange(64)
    for ours, expected in zip(*(Rotary(each, 8).angles(positions, torch.float32) for each in (own, rope)), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert llama.read_config({**hf, **rope_entries(own)}).attention.rope == own
