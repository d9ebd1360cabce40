"""The output's distribution is the target's: every branch of the real step is followed and summed up.

The engine, the scheduler, `ModelDrafter`, the caches, `distribution` and the rules are those that
ship; the models are tables and chance enumerates. The joint distribution of all tokens of a speculative step,
completed by the target, equals the target's own to 1e-12.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import pytest
import torch

from speculant.config import Limits
from speculant.drafting import (
    Drafter,
    DrafterNeeds,
    LookupDrafter,
    LookupOptions,
    ModelDrafter,
    SuffixDrafter,
    SuffixOptions,
)
from speculant.lab.exactness import EXACT, FULL_SUPPORT, NODE_KINDS, Pair, TableModel
from speculant.params import SamplingParams
from speculant.sampling import Chances
from speculant.types import DraftTree, Request
from tests.exactness import speculation
from tests.exactness.distributions import mean_accepted
from tests.exactness.speculation import Case, MakeDrafter, draft_model, enumerate_case, ngram
from tests.examples import examples
from tests.fakes import ScriptedDrafter, few_blocks, model_drafter, slotted
from tests.models import make_request

# (vocabulary, draft length) -> random pairs; together at least 500
SIZES = {(2, 1): 60, (2, 2): 60, (2, 3): 60, (3, 1): 70, (3, 2): 90, (3, 3): 40, (4, 1): 60, (4, 2): 60, (4, 3): 20}

TRANSFORMS = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "greedy": {"temperature": 0},
    "top_k": {"top_k": 2},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.7431},
    "min_p": {"min_p": 0.3137},
    "repetition": {"repetition_penalty": 1.6},
    "reward for repetition": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.6},
    "reward for frequency": {"frequency_penalty": -0.9},
    "bias": {"logit_bias": {0: 1.3, 2: -0.9}},
    "ban": {"logit_bias": {1: float("-inf")}},
    "min_tokens": {"min_tokens": 2},
    "top_k, then top_p": {"top_k": 3, "top_p": 0.6173, "temperature": 1.3},
    "top_p, then min_p": {"top_p": 0.8919, "min_p": 0.4177},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7},
    "penalties and filters": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "temperature": 0.8, "top_k": 3},
    "everything": {
        "logit_bias": {1: 0.7},
        "min_tokens": 2,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "temperature": 0.9,
        "top_k": 3,
        "top_p": 0.9377,
        "min_p": 0.0713,
    },
}


def assert_exact(case: Case) -> None:
    """Enumerate a case; its distribution must be the target's, and its mean acceptance that of theory."""
    found = enumerate_case(case)
    assert found.deviation() <= EXACT, case
    if case.prompt == (0,) and not case.ends and case.steps == 1:
        agree = min if case.verification == "rejection" else operator.mul
        expected = mean_accepted(
            case.distribution, case.distribution_of(case.pair.draft), case.prompt, case.length, agree
        )
        assert found.mean_accepted == pytest.approx(expected, abs=EXACT), case


def test_there_are_enough_pairs() -> None:
    assert sum(SIZES.values()) >= 500


@pytest.mark.parametrize(("verifier", "share"), [("rejection", 1), ("match", 4)])
@pytest.mark.parametrize(("vocab_size", "length"), SIZES)
def test_chains_keep_the_distribution(vocab_size: int, length: int, verifier: str, share: int) -> None:
    for seed in range(examples(SIZES[vocab_size, length] // share, least=1)):
        assert_exact(Case(Pair(seed, vocab_size), length, verification=verifier, width=8))


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", ["rejection", "match"])
@pytest.mark.parametrize("kind", NODE_KINDS)
def test_every_kind_of_distributions_alone(kind: str, verifier: str) -> None:
    for seed in range(examples(4, least=2)):
        assert_exact(Case(Pair(seed, 3, (kind,)), 2, verification=verifier, width=8))


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", ["rejection", "match"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_keeps_the_distribution(name: str, verifier: str) -> None:
    params = SamplingParams(max_tokens=None, **TRANSFORMS[name])
    ends = frozenset({2}) if params.min_tokens else frozenset()
    for seed, vocab_size in enumerate((3, 4, 3, 4)[: examples(4, least=1)]):
        pair = Pair(100 + seed, vocab_size, FULL_SUPPORT)
        assert_exact(Case(pair, 2, params, verifier, prompt=(seed % 3,), ends=ends, width=8))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_distributions_with_zeros(name: str) -> None:
    values = {key: value for key, value in TRANSFORMS[name].items() if key not in ("logit_bias", "min_tokens")}
    for seed in range(examples(3, least=1)):
        assert_exact(Case(Pair(seed, 4), 2, SamplingParams(max_tokens=None, **values), width=8))


@pytest.mark.parametrize("verifier", ["rejection", "match"])
@pytest.mark.parametrize(("vocab_size", "length", "steps"), [(2, 1, 2), (3, 1, 2), (2, 2, 2), (2, 1, 3)])
def test_several_steps_in_a_row(vocab_size: int, length: int, steps: int, verifier: str) -> None:
    for seed in range(examples(6, least=1)):
        assert_exact(Case(Pair(seed, vocab_size), length, verification=verifier, steps=steps, width=8))


def test_several_steps_with_penalties() -> None:
    params = SamplingParams(max_tokens=None, repetition_penalty=1.4, frequency_penalty=0.5, top_p=0.9173)
    for seed in range(examples(6, least=2)):
        assert_exact(Case(Pair(seed, 3, FULL_SUPPORT), 1, params, steps=2, width=8))


def unsure(pair: Pair, chances: Chances, limits: Limits, sizes: set[int] | None = None) -> Drafter:
    """Make the real drafter; its drafts end with a token of a probability below 0.6. Their sizes go to `sizes`."""
    draft = TableModel(pair.draft, pair.vocab_size)
    drafter = model_drafter(draft, pair.vocab_size, chances, limits, slotted, stop_below=0.6)
    if sizes is None:
        return drafter

    def propose(requests: Sequence[Request], lengths: Sequence[int]) -> list[DraftTree]:
        drafts = ModelDrafter.propose(drafter, requests, lengths)
        sizes.update(draft.size for draft in drafts)
        return drafts

    drafter.propose = propose  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
def test_drafts_that_end_with_an_unsure_token(verifier: str, temperature: float) -> None:
    params, sizes = SamplingParams(max_tokens=None, temperature=temperature), set[int]()
    make = functools.partial(unsure, sizes=sizes)
    for seed, vocab_size in enumerate((2, 3, 3, 4, 4)):
        case = Case(Pair(seed, vocab_size), 3, params, verifier, width=8, make_drafter=make)
        speculation.assert_exact(case)
    assert sizes >= {1, 2, 3}


@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
def test_several_steps_that_end_with_an_unsure_token(verifier: str) -> None:
    for seed in range(3):
        case = Case(Pair(seed, 2), 2, verification=verifier, steps=2, width=8, make_drafter=unsure)
        speculation.assert_exact(case)


@pytest.mark.parametrize("budget", [2, 3, 5])
def test_prompts_in_chunks(budget: int) -> None:
    params = SamplingParams(max_tokens=None, presence_penalty=0.6)
    for seed in range(examples(4, least=1)):
        assert_exact(Case(Pair(seed, 2), 1, prompt=(0, 1, 1, 0, 1), budget=budget))
        assert_exact(Case(Pair(seed, 2, FULL_SUPPORT), 1, params, prompt=(0, 1, 1, 0, 1), budget=budget))


def test_distributions_over_a_cache_of_blocks() -> None:
    """Drafts reach over the ends of blocks, and are rolled back over them."""
    blocks = few_blocks(24, keep_prefixes=False)
    drafter = functools.partial(draft_model, cache=blocks)
    for seed in range(examples(3, least=1)):
        assert_exact(Case(Pair(seed, 2), 2, steps=3, width=8, make_drafter=drafter, cache=blocks))


def test_ends_within_a_draft() -> None:
    for seed in range(examples(12, least=2)):
        assert_exact(Case(Pair(seed, 3), 3, prompt=(1,), ends=frozenset({2}), width=8))


def test_max_tokens_within_a_draft() -> None:
    for seed in range(8):
        for limit in (1, 2, 3):
            case = Case(Pair(seed, 3), 3, SamplingParams(max_tokens=limit), width=8)
            found = enumerate_case(case)
            assert max(len(output) for output in found.tokens) <= limit
            assert found.deviation() <= EXACT


def lookup(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    return LookupDrafter(LookupOptions())


def suffix(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    """Draft from the own text and from a finished request's, whose text goes on differently."""
    drafter, taught = SuffixDrafter(SuffixOptions()), make_request((0, 1), (0, 0, 1, 1, 0), reason="stop")
    drafter.begin(taught)
    drafter.end(taught)
    return drafter


@pytest.mark.parametrize("make", [ngram, lookup, suffix])
@pytest.mark.parametrize("verifier", ["auto", "rejection"])
def test_copied_drafts_in_two_steps(verifier: str, make: MakeDrafter) -> None:
    for seed in range(examples(5, least=2)):
        speculation.assert_exact(
            Case(Pair(seed, 2), 2, verification=verifier, prompt=(0, 1, 0), steps=2, make_drafter=make)
        )


# Shapes whose siblings have different tokens: (tokens, parents).
TREES = [
    ([0, 1], [-1, -1]),
    ([0, 1, 2], [-1, -1, -1]),
    ([1, 0, 2, 1], [-1, 0, 0, -1]),
    ([0, 2, 1, 0, 2, 1], [-1, -1, 1, 1, 0, 0]),
    ([2, 0, 1, 0, 1, 2, 1], [-1, -1, -1, 1, 1, 1, 0]),
]


def tree_drafter(index: int) -> Drafter:
    tokens, parents = TREES[index]

    def propose(request: Request) -> DraftTree:
        return DraftTree(torch.tensor(tokens), torch.tensor(parents))

    return ScriptedDrafter(propose, DrafterNeeds(emits_tree=True))


@pytest.mark.parametrize("index", range(len(TREES)))
def test_one_hot_trees(index: int) -> None:
    for seed in range(examples(6, least=1)):
        for steps in (1, 2):
            case = Case(
                Pair(seed, 3),
                len(TREES[index][0]),
                verification="match",
                steps=steps,
                make_drafter=lambda pair, chances, limits: tree_drafter(index),
                width=8,
            )
            speculation.assert_exact(case)
