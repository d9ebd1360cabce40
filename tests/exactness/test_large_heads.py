"""Heads too large for the attention of the native kernels run on the reference kernels, also over a native target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculant import plugins
from speculant.cache import paged_cache
from speculant.drafting import Drafter, HeadFolder
from speculant.models import CausalLM, HeadDecoder, NativeHead, SequenceInput, build_batch
from speculant.types import DraftTree
from tests.exactness.test_native_decoder import make_decoder, make_native, tokens_of
from tests.heads import Shown, head_context, write_eagle, write_eagle3
from tests.models import make_request
from tests.native import needs_kernels

pytestmark = needs_kernels
DTYPES = [torch.float32, torch.bfloat16]
WRITERS = {"eagle": write_eagle, "eagle3": write_eagle3}


def sizes(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


TOO_LARGE = {
    "64 query heads per key head": sizes(64, 1, 8),
    "33 query heads per key head": sizes(66, 2, 8),
    "head_dim 640": sizes(2, 1, 640),
    "head_dim 1024": sizes(4, 2, 1024),
    "head_dim 514": sizes(2, 2, 514),
}
LARGEST = {"32 heads of 256": sizes(32, 1, 256), "2 x 32 heads of 64": sizes(64, 2, 64)}
WHY = "the head runs on the reference kernels, which are slower and round no weights"


def write(folder: Path, method: str, layer: Mapping[str, int]) -> str:
    return WRITERS[method](folder / method, 32, 96, **layer)


def load(method: str, folder: str, target: CausalLM) -> CausalLM:
    loaded = plugins.load("speculant.drafting", method).load(HeadFolder.open(folder, method), target)
    model: CausalLM = loaded[0] if isinstance(loaded, tuple) else loaded
    return model


@torch.inference_mode()
def states_and_logits(model: CausalLM) -> tuple[Tensor, Tensor]:
    """Return a head's results for random states: a prompt in two chunks, the second one with a tree."""
    cache = paged_cache(model.cache_shape, 100, 4)
    tree, tokens = DraftTree.of([3, 5, 7, 9], [-1, -1, 0, 1]), tokens_of(1)[:90]
    states = torch.randn(94, 32, generator=torch.Generator().manual_seed(2))
    rows = list[Tensor]()
    for first, end, own in ((0, 70, DraftTree.empty()), (70, 90, tree)):
        hidden = states[first : end + own.size]
        batch = build_batch([SequenceInput(1, tokens[first:end], own, hidden=hidden)], cache, torch.device("cpu"))
        rows.append(model.forward(batch, cache.storage).last)
    return torch.cat(rows).float(), model.logits(torch.cat(rows)).float()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", [*TOO_LARGE, *LARGEST])
@pytest.mark.parametrize("method", WRITERS)
def test_a_head_of_any_size_is_the_reference_s(tmp_path: Path, method: str, layer: str, dtype: torch.dtype) -> None:
    folder = write(tmp_path, method, {**TOO_LARGE, **LARGEST}[layer])
    seen, own = (load(method, folder, target) for target in (make_native(dtype=dtype), make_decoder(dtype)))
    assert isinstance(seen, HeadDecoder if layer in TOO_LARGE else NativeHead)
    assert isinstance(own, HeadDecoder)
    slack = 1e-4 if dtype == torch.float32 else 0.03
    for ours, expected in zip(states_and_logits(seen), states_and_logits(own), strict=True):
        assert ours.isfinite().all()
        assert float((ours - expected).norm() / expected.norm()) < slack


@pytest.mark.covering(1)
@pytest.mark.parametrize("layer", [*TOO_LARGE, *LARGEST])
@pytest.mark.parametrize("method", WRITERS)
def test_a_head_that_falls_back_says_why_once(
    tmp_path: Path, method: str, layer: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "speculant"):
        load(method, write(tmp_path, method, {**TOO_LARGE, **LARGEST}[layer]), make_native())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (layer in TOO_LARGE)
    for line in said:
        assert line.startswith(f"{WHY}: heads of ")
        assert line.endswith(" are too large for them")


@torch.inference_mode()
def drafted(method: str, folder: str, target: CausalLM, tree: list[int] | None) -> list[DraftTree]:
    """Return two drafts, the second one after tokens that the target has committed meanwhile."""
    context, tokens = head_context(folder, target, {"tree": tree} if tree else {}), tokens_of(3)
    inner: Drafter = plugins.load("speculant.drafting", method).build(context)
    drafter, request = Shown(inner, target), make_request(tokens[:40])
    drafter.begin(request)
    found = drafter.propose([request], [6])
    request.tokens += tokens[40:47]
    return [*found, *drafter.propose([request], [6])]


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", [None, [2, 1]], ids=["chain", "tree"])
@pytest.mark.parametrize("layer", TOO_LARGE)
@pytest.mark.parametrize("method", WRITERS)
def test_drafts_of_a_large_head_are_the_reference_s(
    tmp_path: Path, method: str, layer: str, tree: list[int] | None
) -> None:
    folder = write(tmp_path, method, TOO_LARGE[layer])
    on_native, on_reference = (drafted(method, folder, target, tree) for target in (make_native(), make_decoder()))
    for ours, expected in zip(on_native, on_reference, strict=True):
        assert ours.size > 0
        assert (ours.token_list, ours.parent_list) == (expected.token_list, expected.parent_list)
