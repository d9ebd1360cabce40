"""A draft model that lacks some of the target's tokens, or has others, keeps the output's distribution."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant.config import Limits
from speculant.drafting import Drafter, DraftModelRunner, ModelDrafter, read_tree
from speculant.kernels import usable_sets
from speculant.lab.exactness import FULL_SUPPORT, MIXED, Pair
from speculant.models import CausalLM, DraftVocabulary, load_model
from speculant.sampling import Chances, KeyedChances
from tests.exactness import speculation
from tests.exactness.selection import combinations
from tests.exactness.speculation import BRANCHING, LOSSLESS, Case
from tests.examples import examples
from tests.fakes import slotted
from tests.models import HIDDEN_SIZE, Shape, make_request, write_checkpoint

KERNELS = ["reference", *(["native"] if usable_sets() else [])]
# Rows of the draft, and the ids of a target of 4 tokens, or beyond, that one of the two alone has.
VOCABULARIES = {
    "the last one is missing": (3, {3}),
    "one in the middle is missing": (4, {1}),
    "two are missing": (3, {0, 3}),
    "one is the draft's own": (6, {4, 5}),
    "all of that": (6, {1, 5}),
}


@functools.cache
def draft_of(name: str, kernels: str) -> CausalLM:
    """Load a draft model for a target of 4 tokens."""
    rows, unknown = VOCABULARIES[name]
    folder = write_checkpoint(Path(tempfile.mkdtemp(prefix="vocabulary-")) / "draft", Shape(vocab_size=rows, end=2))
    vocabulary = DraftVocabulary(4, frozenset(unknown), substitute=2)
    dtype = "float64" if kernels == "reference" else "float32"  # its rows depend on the batch, in their last bits
    return load_model(folder, dtype, kernels=kernels, vocabulary=vocabulary).model


def make(name: str, kernels: str, tree: Any, pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    model = draft_of(name, kernels)
    cache, most = slotted(model.cache_shape, limits), limits.max_num_batched_tokens
    return ModelDrafter(DraftModelRunner(model, cache, chances, most), pair.vocab_size, topology=read_tree(tree))


def assert_exact(name: str, kernels: str, tree: Any, verifier: str, length: int) -> None:
    accepted = 0.0
    for seed in range(examples(2, least=1)):
        pair = Pair(seed, 4, MIXED if seed % 2 else FULL_SUPPORT)
        drafter = functools.partial(make, name, kernels, tree)
        case = Case(pair, length, verification=verifier, prompt=(0, 3, 1), width=8, make_drafter=drafter)
        accepted += speculation.assert_exact(case)
    assert accepted > 0.1


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_chains_keep_the_distribution(name: str, kernels: str, verifier: str) -> None:
    assert_exact(name, kernels, None, verifier, 2)


QUICK_TREES = {
    ("one in the middle is missing", "native", "multi_draft"),
    ("two are missing", "reference", "match"),
}


@pytest.mark.parametrize(
    ("name", "kernels", "verifier"),
    combinations(lambda *each: each in QUICK_TREES, VOCABULARIES, KERNELS, BRANCHING),
)
def test_trees_keep_the_distribution(name: str, kernels: str, verifier: str) -> None:
    assert_exact(name, kernels, [2, 1], verifier, examples(4, least=3))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_drafts_are_drawn_from_the_shared_tokens(name: str, kernels: str) -> None:
    """The draft's probabilities are those of its own logits among these tokens, and sum to 1."""
    drafter = make(name, kernels, None, Pair(0, 4), KeyedChances(), Limits(32, 1, 64))
    model, (rows, unknown) = draft_of(name, kernels), VOCABULARIES[name]
    drawable = [token for token in range(min(rows, 4)) if token not in unknown]
    request = make_request([0, 3, 1, 2], shared_noise=False)
    drafter.begin(request)
    (tree,) = drafter.propose([request], [6])
    assert tree.probs is not None
    assert {*tree.token_list} <= {*drawable}
    assert tree.probs.sum(-1).tolist() == pytest.approx([1.0] * 6, abs=1e-12)
    assert (tree.probs > 0).any(0).nonzero()[:, 0].tolist() == drawable
    states = torch.ones(1, HIDDEN_SIZE, dtype=model.cache_shape.dtype)
    assert model.logits(states).isfinite()[0].nonzero()[:, 0].tolist() == drawable
