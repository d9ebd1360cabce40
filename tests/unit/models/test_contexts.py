"""How long a context a model has: a scaling of rotary positions extends the one that config.json states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from speculant import LLM, SamplingParams, plugins
from speculant.kernels import usable_sets
from speculant.models import ACTIVATION_NAMES, load_model, longest_context
from speculant.models.families import gpt_neox
from speculant.models.transformers import _extended
from tests.models import Shape, write_checkpoint
from tests.quantised_folders import edit_config
from tests.unit.models.families import SMALL, Session, spread_weights

KERNELS = ["reference", pytest.param("native", marks=pytest.mark.skipif(not usable_sets(), reason="not built"))]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
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
