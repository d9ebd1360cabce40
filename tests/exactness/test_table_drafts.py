"""Drafts from tables, uniform drafts and drafts of one pass keep the output's distribution under every rule."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from speculant.config import Limits, SpeculativeConfig
from speculant.drafting.base import Drafter
from speculant.drafting.lookup.random import RandomDrafter
from speculant.drafting.lookup.static import StaticDrafter
from speculant.drafting.lookup.tables import BigramTables
from speculant.engine.build import build_verifiers
from speculant.lab.exactness.proofs import Claim, choose_draft, of_method, prove
from speculant.lab.exactness.tables import EXACT, FULL_SUPPORT, Pair
from speculant.lab.training.bigrams import count_bigrams
from speculant.params import SamplingParams
from speculant.sampling.chance import Chances
from speculant.types import DraftTree, Request
from tests.exactness.speculation import Case, enumerate_case
from tests.examples import examples
from tests.fakes import known_verifiers, slotted

LOSSLESS = [name for name, verifier in known_verifiers().items() if verifier.lossless]
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0},
    "filters": {"top_k": 2, "top_p": 0.8731},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {0: 1.3, 1: float("-inf")}},
}


def static(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    """Make tables of a random text; one continuation per token is kept, so that the back-off counts."""
    text = np.random.default_rng(pair.seed).integers(0, pair.vocab_size, 30).tolist()
    found = count_bigrams([text], pair.vocab_size)
    return StaticDrafter(BigramTables.of_counts(found.tokens, found.pairs, found.counts, 1), chances)


def uniform(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    return RandomDrafter(chances, pair.vocab_size, torch.device("cpu"))


def one_pass(pair: Pair, chances: Chances, limits: Limits, **options: object) -> Drafter:
    spec = SpeculativeConfig.from_mapping({"model": "table", "method": "parallel", **options})
    return of_method(spec)(pair, chances, limits, lambda shape: slotted(shape, limits))


def one_pass_trees(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    return one_pass(pair, chances, limits, tree=[2, 1])


DRAFTERS = {"static": static, "random": uniform, "one pass": one_pass}


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tables_keep_the_distribution(drafter: str, verifier: str) -> None:
    accepted = 0.0
    for vocab_size, length in ((2, 3), (3, 2), (4, 2)):
        for seed in range(examples(6, least=2)):
            case = Case(Pair(seed, vocab_size), length, verification=verifier, width=8, make_drafter=DRAFTERS[drafter])
            found = enumerate_case(case)
            assert found.deviation() <= EXACT, case
            accepted += found.mean_accepted
    assert accepted > 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tables_keep_the_distribution_of_any_settings(drafter: str, name: str, verifier: str) -> None:
    params = SamplingParams(max_tokens=None, **SETTINGS[name])  # type: ignore[arg-type]
    for seed in range(examples(2, least=1)):
        case = Case(Pair(seed, 3, FULL_SUPPORT), 2, params, verifier, width=8, make_drafter=DRAFTERS[drafter])
        assert enumerate_case(case).deviation() <= EXACT, case


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", [name for name in LOSSLESS if known_verifiers()[name].needs.branches])
@pytest.mark.parametrize("name", ["plain", "greedy", "penalties"])
def test_trees_of_one_pass_keep_the_distribution(name: str, verifier: str) -> None:
    params = SamplingParams(max_tokens=None, **SETTINGS[name])  # type: ignore[arg-type]
    for seed in range(examples(2, least=1)):
        case = Case(Pair(seed, 3, FULL_SUPPORT), 4, params, verifier, width=8, make_drafter=one_pass_trees)
        assert enumerate_case(case).deviation() <= EXACT, case


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


@pytest.mark.parametrize("method", ["random", "token_recycling"])
def test_check_lossless_proves_the_drafter_itself(method: str) -> None:
    """A drafter that learns must not carry what it saw from one branch to the next."""
    spec = SpeculativeConfig(method=method)
    verifiers, _ = build_verifiers(spec)
    draft = choose_draft(spec, verifiers)
    assert draft.description == f"{method}, around tables"
    found = prove(Claim("match", True, ["sampled"], SamplingParams(max_tokens=None), 12), draft, verifiers)
    assert found.error is None
    assert found.passed
    assert found.mean_accepted > 0.3
