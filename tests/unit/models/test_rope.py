"""Rotary positions of every kind, in every form that config.json has for them, against transformers' own."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Ministral3Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    StableLmConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from speculant.errors import ModelError
from speculant.models import Rope, Rotary, read_rope, restart_of, rope_entries
from tests.unit.models.families import LLAMA3, SMALL

POSITIONS = torch.cat((torch.arange(200), torch.arange(200, 4096, 97), torch.tensor([4095])))
HEAD_DIM = 16
SIZES = {**SMALL, "head_dim": HEAD_DIM, "max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.5, 2.0, 2.25, 2.5],
    "long_factor": [1.0, 1.5, 3.0, 7.0, 20.0, 31.5, 40.0, 64.0],
}
Settings = dict[str, Any]


def drawn(kind: str, seed: int) -> Settings:
    """Return random settings of a kind."""
    rng = random.Random(f"{kind} {seed}")
    settings: Settings = {"rope_type": kind, "rope_theta": rng.choice([10000.0, 500000.0, rng.uniform(2, 1e7)])}
    factor, original = rng.uniform(1, 40), rng.choice([64, 512, 1024, 2048])
    if kind in ("linear", "proportional"):
        settings["factor"] = factor
    if kind == "proportional":
        settings["partial_rotary_factor"] = rng.choice([0.25, 0.5, 0.75, 1.0])
    if kind == "llama3":
        low = rng.uniform(0.5, 2)
        settings |= {
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": low + rng.uniform(0.1, 8),
            "original_max_position_embeddings": original,
        }
    if kind == "yarn":
        settings |= {"factor": rng.choice([factor, 1.0]), "original_max_position_embeddings": original}
        others = {
            "beta_fast": rng.uniform(8, 64),
            "beta_slow": rng.uniform(0.5, 4),
            "truncate": False,
            "mscale": rng.uniform(0.5, 2),
            "mscale_all_dim": rng.uniform(0.5, 2),
            "attention_factor": rng.uniform(0.5, 2),
        }
        settings |= {key: value for key, value in others.items() if rng.random() < 0.5}
    if kind == "longrope":
        settings |= {
            "short_factor": [rng.uniform(1, 2) for _ in range(HEAD_DIM // 2)],
            "long_factor": [rng.uniform(1, 60) for _ in range(HEAD_DIM // 2)],
            "original_max_position_embeddings": original,
        }
        settings |= rng.choice([{}, {"factor": factor}, {"attention_factor": 1.2}])
    return settings


def old_form(settings: Settings) -> Settings:
    """Return the entries of an old config.json for settings of the new form."""
    scaling = {key: value for key, value in settings.items() if key not in ("rope_theta", "rope_type")}
    return {"rope_theta": settings["rope_theta"], "rope_scaling": {**scaling, "type": settings["rope_type"]}}


def same(rope: Rope, expected: tuple[Tensor, Tensor], head_dim: int = HEAD_DIM, long: bool = False) -> None:
    """Compare the angles of all positions with transformers' [1, T, dims]."""
    rows = torch.full_like(POSITIONS, long, dtype=torch.bool)
    dims = head_dim if rope.dims is None else rope.dims
    for own, theirs in zip(Rotary(rope, dims).angles(POSITIONS, torch.float32, rows), expected, strict=True):
        assert own.shape == (len(POSITIONS), 1, dims)
        # The last bit of torch's powers depends on the processor; blends of frequencies and positions enlarge it.
        error = (own[:, 0] - theirs[0]).abs()
        most = (1e-6 + 2**-23 * POSITIONS).clamp(max=3e-5)
        assert bool((error <= most[:, None]).all()), error.max()


def oracle(
    settings: Settings, config: type[PretrainedConfig] = LlamaConfig, long: bool = False
) -> tuple[Tensor, Tensor]:
    """Return transformers' cos and sin by its table of functions, as its rotary modules use them."""
    made = config(**copy.deepcopy({**SIZES, **settings}))
    kind = made.rope_parameters["rope_type"]
    length = made.rope_parameters["original_max_position_embeddings"] + 1 if long else None
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](made, seq_len=length)
    angle = POSITIONS[None, :, None].float() * frequencies
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos() * scale, angle.sin() * scale


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "longrope", "proportional"])
@pytest.mark.parametrize("form", ["old", "new"])
def test_every_kind_has_transformers_angles(kind: str, seed: int, form: str) -> None:
    settings = drawn(kind, seed)
    given = old_form(settings) if form == "old" else {"rope_parameters": settings}
    rope = read_rope({**SIZES, **given}, 4096)
    for long in (False, True) if kind == "longrope" else (False,):
        same(rope, oracle(given, long=long), long=long)
    written = json.loads(json.dumps(rope_entries(rope), allow_nan=False))  # inf is not JSON
    assert read_rope(written, 4096) == rope


def module_angles(module: Any, *layer_type: str) -> tuple[Tensor, Tensor]:
    cos, sin = module(torch.zeros(1), POSITIONS[None], *layer_type)
    return cos, sin


def test_plain_angles_are_transformers() -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    rope = read_rope(config.to_dict(), 4096)
    assert rope == Rope(5e5)
    same(rope, module_angles(LlamaRotaryEmbedding(config)))


@pytest.mark.parametrize("share", [0.25, 0.4, 0.5, 0.75, 0.32, 1.0])
@pytest.mark.parametrize("form", ["rotary_pct", "partial_rotary_factor", "settings", "default"])
def test_parts_of_heads(share: float, form: str) -> None:
    """0.32 of 16 dimensions are 5, which transformers rounds up to 3 pairs."""
    given: Settings = {
        "rotary_pct": {"rotary_pct": share, "rotary_emb_base": 3e4},
        "partial_rotary_factor": {"rope_parameters": {"partial_rotary_factor": share, "rope_theta": 3e4}},
        "settings": {"rope_scaling": {"type": "linear", "factor": 3.0, "partial_rotary_factor": share}},
        "default": {"rotary_emb_base": 3e4},
    }[form]
    config = GPTNeoXConfig(**copy.deepcopy({**SIZES, **given}))
    rope = read_rope({**SIZES, **given}, 4096, share=0.25)
    same(rope, module_angles(GPTNeoXRotaryEmbedding(config)))
    assert read_rope(rope_entries(rope), 4096) == rope


def test_a_family_s_own_share() -> None:
    config = StableLmConfig(**SIZES)
    rope = read_rope({**SIZES}, 4096, share=0.25)
    assert rope.dims == int(HEAD_DIM * config.rope_parameters["partial_rotary_factor"]) == 4
    assert read_rope({**SIZES, "partial_rotary_factor": 0.75}, 4096, share=0.25).dims == 12
    assert read_rope({**SIZES, "partial_rotary_factor": 1.0}, 4096, share=0.25) == Rope(10000.0)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("extra", [{}, {"factor": 4.0}, {"attention_factor": 1.3}])
def test_longrope_of_phi(share: float, extra: Settings) -> None:
    """The original context is beside the settings, and the factor follows from both contexts."""
    pairs = int(HEAD_DIM * share) // 2
    settings = {key: value[:pairs] if isinstance(value, list) else value for key, value in LONGROPE.items()}
    sizes = {**SIZES, "hidden_size": 4 * HEAD_DIM, "original_max_position_embeddings": 512}
    given = {"rope_theta": 3e4, "rope_scaling": {**settings, **extra}, "partial_rotary_factor": share}
    rope = read_rope({**sizes, **given}, 4096, share=1.0)
    assert rope.original_max_positions == 512
    module = Phi3RotaryEmbedding(Phi3Config(**copy.deepcopy({**sizes, **given})))
    assert rope.dims == (None if share == 1.0 else 8)
    same(rope, module_angles(module), long=True)  # 4,095 is beyond the original context
    short = POSITIONS[POSITIONS < 512]
    theirs = module(torch.zeros(1), short[None])
    for own, expected in zip(Rotary(rope, 2 * pairs).angles(short, torch.float32), theirs, strict=True):
        torch.testing.assert_close(own[:, 0], expected[0], atol=1e-6, rtol=0)


Make = Callable[[PretrainedConfig], Any]
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.2}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_parameters": NESTED},
        {"rope_parameters": {"full_attention": {**YARN, "truncate": False}, "sliding_attention": {}}},
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": None}},
        {"rope_theta": 7e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": NESTED, "rope_scaling": {"factor": 2.0}},
        {"rope_local_base_freq": 3e4, "rope_theta": 7e5},
    ],
    ids=str,
)
@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_kinds_of_layers_have_settings_of_their_own(layer_type: str, given: Settings) -> None:
    layer_types = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    bases = {"full_attention": 1e6, "sliding_attention": 1e4}
    config = Gemma3TextConfig(**copy.deepcopy({**SIZES, **layer_types, **given}))
    rope = read_rope({**SIZES, **given}, 4096, layer_type, theta=bases[layer_type])
    same(rope, module_angles(Gemma3RotaryEmbedding(config), layer_type))
    if "rope_local_base_freq" not in given:
        olmo = Olmo3Config(**copy.deepcopy({**SIZES, **layer_types, **given}))
        rope = read_rope({**SIZES, **given}, 4096, layer_type, theta=5e5)
        same(rope, module_angles(Olmo3RotaryEmbedding(olmo), layer_type))


def test_equal_factors_never_restart_a_text() -> None:
    settings = {**LONGROPE, "long_factor": LONGROPE["short_factor"], "original_max_position_embeddings": 64}
    rope = read_rope({**SIZES, "rope_parameters": settings}, 4096)
    assert restart_of([rope]) is None
    same(rope, oracle({"rope_parameters": settings}, long=True), long=True)


def test_boundaries_that_differ_are_refused() -> None:
    ropes = [
        read_rope({**SIZES, "rope_parameters": {**LONGROPE, "original_max_position_embeddings": at}}, 4096)
        for at in (64, 128)
    ]
    assert restart_of(ropes[:1]) == 64
    with pytest.raises(ModelError, match="64 and beyond 128"):
        restart_of(ropes)


def test_dynamic_rope_of_parts_of_heads() -> None:
    """Within the trained context it is the plain one."""
    settings = {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5}
    rope = read_rope({**SIZES, "rope_parameters": settings}, 4096, share=1.0)
    assert rope == Rope(10000.0, "dynamic", 2.0, 4096, dims=8)
    assert read_rope(rope_entries(rope), 4096) == rope


def test_query_factors_are_transformers() -> None:
    positions = torch.tensor([0, 1, 63, 64, 65, 127, 128, 4095])
    given = {"rope_parameters": {**YARN, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}}
    config = Ministral3Config(**copy.deepcopy({**SIZES, **given}))
    rope = read_rope({**SIZES, **given}, 4096)
    expected = get_llama_4_attn_scale(positions[None], config.rope_parameters["llama_4_scaling_beta"], 64)
    own = Rotary(rope, HEAD_DIM).query_factors(positions)
    assert own is not None
    assert torch.equal(own, expected[0, 0, :, 0])
    assert own[2] == 1.0 < own[3]
    assert Rotary(Rope(1e4), HEAD_DIM).query_factors(positions) is None
    assert read_rope(rope_entries(rope), 4096) == rope


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_type": "axial"}, ("axial", "longrope")),
        ({"rope_type": ["yarn"]}, ("yarn",)),
        ({"rope_type": "longrope", "short_mscale": 1.1}, ("short_mscale",)),
        ({"rope_type": "yarn", "factor": "4"}, ("factor", "'4'")),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, ("rope_theta = 1",)),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}, ("beta_fast = -1",)),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, ("truncate = 'no'",)),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}, ("attention_factor = 0",)),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, ("original_max_position",)),
        ({"rope_type": "llama3", "factor": 4.0}, ("without low_freq_factor, high_freq_factor",)),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, ("without long_factor",)),
        ({**LONGROPE, "long_factor": [1.0] * 7}, ("long_factor", "of 8")),
        ({**LONGROPE, "long_factor": [1.0] * 7 + ["1"]}, ("long_factor = '1'",)),
        ({**LONGROPE, "short_factor": [1.0] * 7 + [0.0]}, ("short_factor = 0.0",)),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, ("over 0.5 of each head",)),
        ({"rope_type": "proportional", "partial_rotary_factor": 2}, ("partial_rotary_factor = 2",)),
        ({"rope_type": "default", "llama_4_scaling_beta": "0.1"}, ("llama_4_scaling_beta = '0.1'",)),
        ({"full_attention": {"rope_type": "default"}}, ("full_attention",)),
    ],
    ids=str,
)
def test_wrong_settings_are_named(settings: Settings, words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        read_rope({**SIZES, "rope_parameters": settings}, 4096)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("share", [0.0, 0.01, 1.5, -1, "half", True])
def test_shares_that_rotate_nothing_are_refused(share: Any) -> None:
    with pytest.raises(ModelError):
        read_rope({**SIZES, "partial_rotary_factor": share}, 4096, share=0.5)


@pytest.mark.parametrize(
    "given",
    [{"rope_parameters": {"rope_type": "default"}}, {"rope_parameters": {"full_attention": 3}}, {"rope_scaling": [1]}],
    ids=str,
)
def test_settings_without_kinds_of_layers_are_refused(given: Settings) -> None:
    with pytest.raises(ModelError):
        read_rope({**SIZES, **given}, 4096, "full_attention")


def test_factors_give_frequencies_bit_for_bit() -> None:
    """Llama 3.1's frequencies are blends, which float32 divisors would miss by a unit in the last place."""
    rope = read_rope({**SIZES, "rope_parameters": LLAMA3}, 4096)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**copy.deepcopy({**SIZES, "rope_parameters": LLAMA3})))
    assert torch.equal(Rotary(rope, HEAD_DIM)._frequencies, theirs)
    assert not any(math.isinf(each) for each in rope.factors)
