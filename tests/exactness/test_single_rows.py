"""Passes of one row, whose layers have no stage for their input: the same bits beside other rows, with any threads."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from speculant.cache import paged_cache
from speculant.models import ROUNDINGS, NativeDecoder, SequenceInput, build_batch
from speculant.types import DraftTree
from tests.exactness.test_native_decoder import VARIANTS, make_decoder, packed
from tests.native import SETS, needs_kernels, on

pytestmark = needs_kernels
CPU = torch.device("cpu")
PROMPT, NEXT = [5, 6, 7, 8], 9
WIDE = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 64, "vocab_size": 300}
TYPES = {"float32": None, "int8": "int8", "int4": "int4"}


@cache
def model_of(isa: str, threads: int, weights: str, variant: str) -> NativeDecoder:
    rounding, changes = TYPES[weights], WIDE if variant == "wide" else VARIANTS[variant]
    return packed(make_decoder(**changes), on(isa, threads), None if rounding is None else ROUNDINGS[rounding])


@torch.inference_mode()
def decode(model: NativeDecoder, others: int = 0) -> Tensor:
    """Compute NEXT in one pass with `others` more sequences, and return its hidden states."""
    storage = paged_cache(model.cache_shape, 64, 16)
    sequences = range(1 + others)
    for seq_id in sequences:
        prompt = [(token + seq_id) % 90 for token in PROMPT]
        model.forward(build_batch([SequenceInput(seq_id, prompt, DraftTree.empty())], storage, CPU), storage.storage)
    inputs = [SequenceInput(seq_id, [NEXT + seq_id], DraftTree.empty()) for seq_id in sequences]
    return model.forward(build_batch(inputs, storage, CPU), storage.storage).last[0].clone()


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("variant", ["wide", "normed", "biases", "experts", "odd"])
def test_one_row_has_its_bits_beside_others(isa: str, weights: str, variant: str) -> None:
    model = model_of(isa, 2, weights, variant)
    assert torch.equal(decode(model), decode(model, others=4))


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("threads", [2, 4, 8, 16])
def test_one_row_has_its_bits_with_any_threads(isa: str, weights: str, threads: int) -> None:
    """More threads than processors: some are descheduled within a stage, or begin late."""
    expected = decode(model_of(isa, 1, weights, "wide"))
    for _ in range(5):
        assert torch.equal(decode(model_of(isa, threads, weights, "wide")), expected)


@pytest.mark.parametrize("weights", TYPES)
def test_no_norm_or_packing_is_a_stage_of_one_item(weights: str) -> None:
    """Of a layer: queries, keys and values; rotation; attention; output; gate and up; down. int4 has values apart."""
    model = model_of(SETS[0], 2, weights, "wide")
    decode(model)
    items, layers = model.kernels.stage_items(), len(model.config.layers)
    assert len(items) == (7 if weights == "int4" else 6) * layers + 2
    assert items.count(1) == 2, "embedding and final norm"


def test_rows_that_are_packed_together_have_stages() -> None:
    """A pass of several rows keeps its stages: norms and packing have an item for each row or tile."""
    model = model_of(SETS[0], 1, "int8", "wide")
    decode(model, others=4)
    items, layers = model.kernels.stage_items(), len(model.config.layers)
    assert len(items) == 12 * layers + 2
