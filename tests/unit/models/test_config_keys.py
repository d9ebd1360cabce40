"""Each entry of config.json that a family reads has the effect that it has in transformers, or is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from speculant import plugins
from speculant.errors import ModelError
from speculant.models import ACTIVATION_NAMES, load_model
from tests.quantised_folders import edit_config
from tests.unit.models.families import SMALL, VARIANTS, Session, cases, spread_weights

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
