"""Drafts from tables, uniform drafts and drafts of one pass keep the output's distribution under any settings."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from speculant.drafting import StaticDrafter
from speculant.lab.exactness import EXACT, FULL_SUPPORT, Pair
from speculant.params import SamplingParams
from speculant.types import DraftTree, Request
from tests.exactness.speculation import BRANCHING, LOSSLESS, Case, assert_exact, enumerate_case
from tests.exactness.test_drafters import CHAINS, TREES, static
from tests.examples import examples
from tests.fakes import slotted

SETTINGS = {
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0},
    "filters": {"top_k": 2, "top_p": 0.8731},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {0: 1.3, 1: float("-inf")}},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drafter", ["static", "random", "parallel"])
def test_tables_keep_the_distribution_of_any_settings(drafter: str, name: str, verifier: str) -> None:
    params = SamplingParams(max_tokens=None, **SETTINGS[name])  # type: ignore[arg-type]
    for seed in range(examples(2, least=1)):
        make = functools.partial(CHAINS[drafter].make, cache=slotted)
        assert_exact(Case(Pair(seed, 3, FULL_SUPPORT), 2, params, verifier, width=8, make_drafter=make))


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", BRANCHING)
@pytest.mark.parametrize("name", ["greedy", "penalties"])
def test_trees_of_one_pass_keep_it_of_any_settings(name: str, verifier: str) -> None:
    params = SamplingParams(max_tokens=None, **SETTINGS[name])  # type: ignore[arg-type]
    for seed in range(examples(2, least=1)):
        make = functools.partial(TREES["one pass"].make, cache=slotted)
        assert_exact(Case(Pair(seed, 3, FULL_SUPPORT), 4, params, verifier, width=8, make_drafter=make))


def test_a_row_that_was_not_drawn_from_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts at the request's temperature, with the rows of temperature 1 as their probs."""
    propose = StaticDrafter.propose

    def flatter(self: StaticDrafter, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        drafts = propose(self, requests, limits)
        rows = [[request.tokens[-1], *draft.token_list] for request, draft in zip(requests, drafts, strict=True)]
        return [
            DraftTree.chain(
                draft.token_list, self._tables.log_probs(tokens[:-1]).exp().double() if draft.size else None
            )
            for draft, tokens in zip(drafts, rows, strict=True)
        ]

    case = functools.partial(
        Case, length=2, params=SamplingParams(max_tokens=None, temperature=0.4), make_drafter=static
    )
    pairs = [Pair(seed, 3, FULL_SUPPORT) for seed in range(examples(4, least=2))]
    assert max(enumerate_case(case(pair)).deviation() for pair in pairs) <= EXACT
    monkeypatch.setattr(StaticDrafter, "propose", flatter)
    assert max(enumerate_case(case(pair)).deviation() for pair in pairs) > 1e-3
