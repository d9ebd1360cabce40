"""The model drafter's corners: vocabularies that differ in padding, a budget, little memory, a pass that fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant.cache.base import KVStorage
from speculant.cache.factory import paged_cache, slotted_cache
from speculant.drafting.growth import fit_vocabulary
from speculant.drafting.model.drafter import ModelDrafter
from speculant.drafting.model.runner import DraftModelRunner
from speculant.models.base import Batch, CausalLM, Hidden
from speculant.models.weights.load import load_model
from speculant.params import SamplingParams
from speculant.sampling.chance import KeyedChances
from speculant.types import Request
from tests.models import VOCAB_SIZE, Checkpoints, Shape, make_request, write_checkpoint

GREEDY = SamplingParams(temperature=0)
PROMPT = list(range(40, 60))


def drafter_of(model: CausalLM, budget: int = 256, num_blocks: int | None = None) -> ModelDrafter:
    """Make a drafter over slots, or over `num_blocks` blocks of four positions."""
    shape = model.cache_shape
    cache = paged_cache(shape, num_blocks, 4) if num_blocks else slotted_cache(shape, 4, 64)
    return ModelDrafter(DraftModelRunner(model, cache, KeyedChances(), budget), VOCAB_SIZE)


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> CausalLM:
    return load_model(checkpoints.near, "float64", "cpu").model


def begun(drafter: ModelDrafter, seq_id: int, tokens: list[int], cache_salt: str = "") -> Request:
    request = make_request(tokens, params=GREEDY, seq_id=seq_id, cache_salt=cache_salt)
    drafter.begin(request)
    return request


def test_logits_are_cut_or_padded_to_the_target_s_vocabulary() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(fit_vocabulary(logits, 2), logits[:, :2])
    assert torch.equal(fit_vocabulary(logits, 3), logits)
    wider = fit_vocabulary(logits, 5)
    assert torch.equal(wider[:, :3], logits)
    assert bool((wider[:, 3:] == -torch.inf).all())


@pytest.mark.parametrize("rows", [258, 300])
def test_another_padding_changes_no_proposal_of_known_tokens(model: CausalLM, tmp_path: Path, rows: int) -> None:
    other = load_model(write_checkpoint(tmp_path / "d", Shape(noise=0.1, vocab_size=rows)), "float64", "cpu").model
    trees = []
    for drafter in (drafter_of(model), drafter_of(other)):
        trees += drafter.propose([begun(drafter, 1, PROMPT)], [4])
    assert trees[0].token_list == trees[1].token_list


def test_a_token_that_the_draft_has_no_row_for_can_be_read(tmp_path: Path) -> None:
    """A target with more padding may have it in a prompt, or even say it."""
    small = load_model(write_checkpoint(tmp_path / "d", Shape(vocab_size=258)), "float64", "cpu").model
    drafter = drafter_of(small)
    request = begun(drafter, 1, [5, VOCAB_SIZE - 1, 6])
    (tree,) = drafter.propose([request], [3])
    assert tree.size == 3
    request.tokens += [VOCAB_SIZE - 2]
    (tree,) = drafter.propose([request], [3])
    assert tree.size == 3


def test_a_long_backlog_is_fed_in_parts_and_shared(model: CausalLM) -> None:
    """20 tokens each at 8 a round: the first is ready after three rounds, the second after six."""
    drafter = drafter_of(model, budget=8)
    requests = [begun(drafter, 1, PROMPT), begun(drafter, 2, PROMPT[::-1])]
    sizes, lengths = [], []
    for _ in range(6):
        sizes.append([tree.size for tree in drafter.propose(requests, [2, 2])])
        lengths.append([drafter.caches[0].length(request) for request in (1, 2)])
    assert sizes == [[0, 0], [0, 0], [2, 0], [2, 0], [2, 0], [2, 2]]
    assert lengths[:2] == [[8, 0], [16, 0]]


def test_a_long_backlog_is_fed_as_far_as_the_memory_goes(model: CausalLM) -> None:
    """Six blocks: one prompt has its five, the other waits with the last one until the first prompt ends."""
    drafter = drafter_of(model, num_blocks=6)
    requests = [begun(drafter, 1, PROMPT), begun(drafter, 2, PROMPT[::-1])]
    assert [tree.size for tree in drafter.propose(requests, [1, 3])] == [1, 0]
    assert [drafter.caches[0].length(request) for request in (1, 2)] == [20, 4]
    assert [tree.size for tree in drafter.propose(requests, [1, 3])] == [1, 0]
    drafter.end(requests[0])
    assert [tree.size for tree in drafter.propose(requests[1:], [3])] == [3]
    drafter.caches[0].check()


def test_a_draft_is_as_long_as_the_memory_allows(model: CausalLM) -> None:
    """The last drafted token is never fed, so two free positions are enough for three of them."""
    drafter = drafter_of(model, num_blocks=5)
    (tree,) = drafter.propose([begun(drafter, 1, PROMPT[:18])], [6])
    assert tree.size == 3
    assert drafter.caches[0].free_tokens() == 0
    fresh = drafter_of(model)
    (longer,) = fresh.propose([begun(fresh, 1, PROMPT[:18])], [6])
    assert tree.token_list == longer.token_list[:3]


def test_a_short_draft_does_not_end_its_neighbour_s(model: CausalLM) -> None:
    drafter = drafter_of(model, num_blocks=7)
    requests = [begun(drafter, 1, PROMPT[:12]), begun(drafter, 2, PROMPT[8:18])]
    sizes = [tree.size for tree in drafter.propose(requests, [6, 6])]
    assert sizes == [5, 3], "of two free positions and one block, the first who needs it takes the block"


def test_known_tokens_are_not_computed_again(model: CausalLM) -> None:
    counting = Counting(model)
    drafter = drafter_of(counting, num_blocks=30)
    request = begun(drafter, 1, PROMPT)
    (first,) = drafter.propose([request], [2])
    request.tokens += [5]
    drafter.propose([request], [1])  # what was committed is known from the next round on
    counting.rows.clear()
    again = begun(drafter, 2, PROMPT)
    (second,) = drafter.propose([again], [2])
    assert counting.rows == [1, 1], "all but the last token of five full blocks"
    assert second.token_list == first.token_list
    drafter.propose([begun(drafter, 3, PROMPT, cache_salt="other")], [2])
    assert counting.rows[2:] == [20, 1]


def test_a_preempted_request_begins_anew(model: CausalLM) -> None:
    counting = Counting(model)
    drafter = drafter_of(counting)
    request = begun(drafter, 1, PROMPT)
    drafter.propose([request], [3])
    drafter.end(request)
    assert drafter.caches[0].length(1) == 0
    request.tokens += [5, 6]
    drafter.begin(request)
    counting.rows.clear()
    (tree,) = drafter.propose([request], [2])
    assert counting.rows == [22, 1]
    fresh = drafter_of(model)
    assert tree.token_list == fresh.propose([begun(fresh, 1, [*PROMPT, 5, 6])], [2])[0].token_list


def test_nothing_is_fed_for_a_sequence_without_a_limit(model: CausalLM) -> None:
    drafter = drafter_of(model)
    requests = [begun(drafter, 1, PROMPT), begun(drafter, 2, PROMPT)]
    trees = drafter.propose(requests, [0, 1])
    assert [tree.size for tree in trees] == [0, 1]
    assert [drafter.caches[0].length(request) for request in (1, 2)] == [0, len(PROMPT)]


def test_only_missing_tokens_are_computed(model: CausalLM) -> None:
    counting = Counting(model)
    drafter = drafter_of(counting)
    request = begun(drafter, 1, PROMPT)
    (tree,) = drafter.propose([request], [4])
    assert counting.rows == [20, 1, 1, 1]
    counting.rows.clear()
    request.tokens += [*tree.token_list[:2], 99]  # two accepted, the third rejected
    drafter.propose([request], [4])
    assert counting.rows == [1, 1, 1, 1]
    counting.rows.clear()
    (tree,) = drafter.propose([request], [1])
    request.tokens += [*tree.token_list, 3]  # all accepted and a bonus: two are new
    drafter.propose([request], [1])
    assert counting.rows == [1, 2]


def test_a_failed_pass_leaves_no_trace(model: CausalLM) -> None:
    counting = Counting(model)
    drafter = drafter_of(counting)
    request, other = begun(drafter, 1, PROMPT), begun(drafter, 2, PROMPT[:4])
    drafter.propose([request], [2])
    for failing_pass in (1, 2, 3):
        request.tokens += [7]
        counting.fail_at = len(counting.rows) + failing_pass
        with pytest.raises(RuntimeError, match="out of luck"):
            drafter.propose([request, other], [4, 4])
    counting.fail_at = None
    fresh = drafter_of(model)
    expected = fresh.propose([begun(fresh, 1, request.tokens), begun(fresh, 2, other.tokens)], [4, 4])
    trees = drafter.propose([request, other], [4, 4])
    assert [tree.token_list for tree in trees] == [tree.token_list for tree in expected]


class Counting:
    """A model that counts the rows of its passes and can be made to fail at one of them."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.rows: list[int] = []
        self.fail_at: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        self.rows.append(len(batch.tokens))
        if len(self.rows) == self.fail_at:
            raise RuntimeError("out of luck")
        return self.model.forward(batch, storage, taps)
