"""Entries of config.json: all spellings, their effect in transformers, and wrong values, which are ModelErrors."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig

from speculant import LLM, SamplingParams, plugins
from speculant.errors import ModelError
from speculant.kernels import usable_sets
from speculant.models import ACTIVATION_NAMES, DecoderConfig, Rotary, load_model, longest_context
from speculant.models.families import gpt_neox, llama, mistral, qwen2, qwen3
from speculant.models.transformers import _extended
from tests.models import Shape, write_checkpoint
from tests.quantised_folders import edit_config
from tests.unit.models.families import LLAMA3, SMALL, VARIANTS, Session, cases, spread_weights


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


TOKENS = [(7 * i * i + 3 * i) % 61 for i in range(20)]
QUICK = ("gemma3_text", "gpt_neox")
FIRST = {family: variant for family, variant in reversed(cases()) if family in CONFIG_MAPPING}
FAMILIES = [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in FIRST]
OTHERS: dict[str, list[Any]] = {  # values of entries that are null in a small model
    "attn_logit_softcapping": [2.0], "final_logit_softcapping": [2.0], "sliding_window": [5],
}  # fmt: skip
SHAPES = {  # their values belong to the shapes of tensors, to one another, or to both
    "vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "rope_parameters", "rope_scaling",
    "per_layer_config", "global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input",
    "hidden_size_per_layer_input", "max_position_embeddings", "n_positions", "quantization_config", "pad_token_id",
    "n_head", "n_layer", "n_embd", "n_inner", "n_ctx",  # second names
}  # fmt: skip


def values_of(key: str, value: Any) -> Iterator[Any]:
    """Yield other values of an entry."""
    if isinstance(value, str) and value in ACTIVATION_NAMES:
        yield from (name for name in ("relu", "gelu", "gelu_fast", "silu") if name != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, float):
        yield from (1.3 * value, 0.5) if value else (0.5,)
    elif isinstance(value, int):
        yield 2 * value
    elif value is None:
        yield from OTHERS.get(key, [])


def entries_read(family: str, hf: dict[str, Any]) -> set[str]:
    """Return the entries whose value a family does not ignore."""
    found, read = set[str](), plugins.load("speculant.models", family).read_config
    for key in hf:
        for changed in ({**hf, key: "x"}, {**hf, key: -3}):
            try:
                if read(changed) != read(hf):
                    found.add(key)
            except ModelError:
                found.add(key)
    return found


@torch.inference_mode()
def expected_of(settings: dict[str, Any], folder: Path, family: str) -> Tensor | None:
    """Save a model of transformers and return its logits; None = it refuses the settings."""
    try:
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
        spread_weights(theirs)
        theirs.save_pretrained(folder)
        logits: Tensor = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    except (StrictDataclassError, ValueError, TypeError, RuntimeError, KeyError, AttributeError):
        return None
    return logits


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_entries_have_the_effect_that_they_have_in_transformers(family: str, tmp_path: Path) -> None:
    own = {**SMALL, **VARIANTS.get(family, {}).get(FIRST[family], {})}
    hf = AutoConfig.for_model(family, **own).to_dict()
    compared = 0
    for key in sorted(entries_read(family, hf) - SHAPES):
        for number, value in enumerate(values_of(key, hf[key])):
            folder = tmp_path / f"{key}-{number}"
            expected = expected_of({**own, key: value}, folder, family)
            if expected is None or not math.isfinite(float(expected.sum())):
                continue
            edit_config(folder, **{key: value})  # transformers leaves out what it does not know
            try:
                found = Session(load_model(str(folder), dtype="float32", kernels="reference").model).extend(TOKENS)
            except ModelError:
                continue  # it says what it can't read
            error = float((found - expected).norm() / expected.norm())
            assert error < 1e-4, f"{key} = {value}: {error}"
            compared += 1
    assert compared > 3


VALUES: list[Any] = [
    None, 0, -1, 1, 2, 3, 1.5, 1e300, -1e300, 10**30, math.nan, math.inf, True, False, "", "x", "gelu", [], [1], [[1]],
    [None] * 3, [0.5] * 3, [0, 1, 1], ["full_attention"], ["full_attention", "sliding_attention", "x"], {}, {"a": 1},
    {"full_attention": None}, {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}, {"rope_type": ["x"]},
    {"rope_type": "yarn", "factor": 0}, {"rope_type": "longrope", "short_factor": [1], "long_factor": "x"},
]  # fmt: skip
CASES = cases(with_encoders=True)
FIRST_VARIANTS = dict(reversed(CASES))
KNOWN = [
    pytest.param(
        *case,
        id="-".join(case),
        marks=[] if case[0] in ("llama", "gpt2") and FIRST_VARIANTS[case[0]] == case[1] else [pytest.mark.slow],
    )
    for case in CASES
    if case[0] in CONFIG_MAPPING
]


def config_of(family: str, variant: str) -> dict[str, Any]:
    """Return the config.json of a small model."""
    given = {**SMALL, **VARIANTS.get(family, {}).get(variant, {})}
    hf: dict[str, Any] = AutoConfig.for_model(family, **given).to_dict()
    return hf


@pytest.mark.parametrize(("family", "variant"), KNOWN)
def test_any_value_of_any_entry(family: str, variant: str) -> None:
    hf, read = config_of(family, variant), plugins.load("speculant.models", family).read_config
    assert isinstance(read(hf), DecoderConfig)
    refused = 0
    for key in hf:
        for changed in [{**hf, key: value} for value in VALUES] + [{k: v for k, v in hf.items() if k != key}]:
            try:
                assert isinstance(read(changed), DecoderConfig)
            except ModelError:
                refused += 1
    assert refused > len(hf)


KERNELS = ["reference", pytest.param("native", marks=pytest.mark.skipif(not usable_sets(), reason="not built"))]
ORIGINAL = {"original_max_position_embeddings": 32}
SCALED: list[tuple[dict[str, Any], int]] = [  # of a stated context of 40
    ({}, 40),
    ({"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 128),
    ({"type": "yarn", "factor": 4.0, **ORIGINAL}, 128),
    ({"rope_type": "yarn", "factor": 1.0, **ORIGINAL}, 40),
    ({"rope_type": "yarn", "factor": 4.0}, 160),
    ({"rope_type": "yarn", **ORIGINAL}, 40),
    ({"rope_type": "linear", "factor": 2.5}, 100),
    ({"rope_type": "linear", "factor": 0.5}, 40),
    ({"rope_type": "dynamic", "factor": 4.0}, 40),
    ({"rope_type": "llama3", **LLAMA3}, 40),
]


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox"])
def test_scalings_extend_the_stated_context(family: str, form: str) -> None:
    read = plugins.load("speculant.models", family).read_config
    for scaling, expected in SCALED:
        entries = {form: {"rope_theta": 1e4, **scaling} if form == "rope_parameters" else scaling}
        config = read({**SMALL, "model_type": family, "max_position_embeddings": 40, "rotary_pct": 1.0, **entries})
        assert config.max_positions == expected, scaling


def test_an_entry_beside_the_settings_is_the_original_context() -> None:
    hf = {"max_position_embeddings": 40, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert longest_context({**hf, "original_max_position_embeddings": 20}) == 80


def test_models_with_kinds_of_layers_state_an_extended_context() -> None:
    """Gemma 3 states 131,072 positions, and scales full attention by 8. Gemma 2 has one kind of rotary positions."""
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 40}
    for family, expected in (("gemma3_text", 40), ("gemma2", 320)):
        read = plugins.load("speculant.models", family).read_config
        assert read({**SMALL, "head_dim": 8, "rope_theta": 1e6, **linear}).max_positions == expected
    yarn = {"full_attention": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, "sliding_attention": {}}
    assert longest_context({"max_position_embeddings": 40, "rope_parameters": yarn}, by_kind=True) == 128


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_have_no_scaling(family: str) -> None:
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    read = plugins.load("speculant.models", family).read_config
    assert read({**SMALL, "n_positions": 128, "ffn_dim": 48, **scaling}).max_positions == 128


@torch.inference_mode()
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scaling", [SCALED[1][0], SCALED[6][0]], ids=str)
def test_logits_beyond_the_stated_context_are_transformers(
    scaling: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    entries = {"rope_parameters": {"rope_theta": 1e4, **scaling}, "max_position_embeddings": 40}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **{**SMALL, **entries})).eval()
    spread_weights(theirs)
    theirs.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", kernels=kernels).model
    assert model.max_positions == (128 if "original_max_position_embeddings" in scaling else 100)
    assert _extended(theirs.config.rope_parameters, theirs.config, 40) == model.max_positions
    tokens = [(7 * i * i + 3 * i) % 61 for i in range(100)]
    found, expected = Session(model).extend(tokens), theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found.float(), expected, atol=1e-4, rtol=1e-4)


def test_requests_may_be_as_long_as_the_extended_context(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", Shape(max_positions=40))
    edit_config(Path(path), rope_scaling={"rope_type": "yarn", "factor": 4.0, **ORIGINAL})
    llm = LLM(path, max_model_len=128, use_speculative_decoding=False)
    (out,) = llm.generate([[5, 9] * 45], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 20


def test_every_name_of_an_activation_is_its_function() -> None:
    """Of all that transformers has, those that are equal to ours but for float32's last digits."""
    from transformers.activations import ACT2FN

    from speculant.kernels import reference

    x = torch.linspace(-12, 12, 4001)
    for name in ACT2FN:
        if name in ("xielu", "prelu"):
            continue  # they have parameters
        equal = {own for own, function in reference.ACTIVATIONS.items()
                 if torch.allclose(ACT2FN[name](x), function(x), atol=2e-6, rtol=1e-5)}  # fmt: skip
        assert equal == ({ACTIVATION_NAMES[name]} if name in ACTIVATION_NAMES else set()), name
    sizes = {**SMALL, "hidden_act": "gelu_fast"}
    assert gpt_neox.read_config(sizes).layers[0].mlp.activation == "gelu_tanh"  # GPT-NeoX 20B's
