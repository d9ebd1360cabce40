"""Composite drafters keep the output's distribution and greedy and seeded text, beside any other drafter."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from speculant import SamplingParams
from speculant.config import Limits, SpeculativeConfig
from speculant.drafting import Drafter, Drafters
from speculant.lab.exactness import EXACT, FULL_SUPPORT, Pair, TableModel, enumeration, of_method
from speculant.lengths import Fixed
from speculant.sampling import Chances, KeyedChances
from speculant.types import Request
from tests.exactness.selection import combinations, slow_but
from tests.exactness.speculation import Case, MakeDrafter, enumerate_case
from tests.exactness.test_constraints import Case as ConstrainedCase, Constrained
from tests.examples import examples
from tests.fakes import ROOMY, MakeCache, build_rig, known_verifiers, paged, slotted

LOSSLESS = [name for name, verifier in known_verifiers().items() if verifier.lossless]
BRANCHING = [name for name in LOSSLESS if known_verifiers()[name].needs.branches]
PROMPT = (0, 1, 2, 0)
UNKNOWN_LAST = (0, 1, 3)  # n-grams have no draft after it
MIXED = ["ngram", "draft_model"]
TREES = {"method": "draft_model", "tree": [2, 1]}
CHAINS: dict[str, dict[str, Any]] = {
    "cascade": {"method": "cascade"},
    "cascade of models": {"method": "cascade", "inner": {"method": "draft_model", "model": "another"}},
    "fallback": {"method": "fallback", "members": MIXED},
    "fallback to a cascade": {"method": "fallback", "members": [{"method": "ngram", "min_order": 4}, "cascade"]},
}
TREED: dict[str, dict[str, Any]] = {
    "merge": {"method": "merge", "members": MIXED},
    "merge of lookups": {"method": "merge", "members": ["ngram", {"method": "ngram", "max_order": 2}], "model": None},
    "fallback to trees": {"method": "fallback", "members": ["ngram", TREES]},
    "cascade of trees": {"method": "cascade", "inner": {**TREES, "model": "another"}},
}


def made_by(config: dict[str, Any], cache: MakeCache = slotted) -> MakeDrafter:
    """Return a maker of the configured drafter; its models are tables."""
    spec = SpeculativeConfig.from_mapping({"model": "table", **config})

    def make(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
        return of_method(spec)(pair, chances, limits, lambda shape: cache(shape, limits))

    return make


def assert_exact(case: Case) -> float:
    found = enumerate_case(case)
    assert found.deviation() <= EXACT, case
    return found.mean_accepted


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("name", CHAINS)
def test_composite_chains_keep_the_distribution(name: str, verifier: str) -> None:
    accepted = 0.0
    for seed in range(examples(2, least=1)):
        pair, make = Pair(40 + seed, 3), made_by(CHAINS[name])
        accepted += assert_exact(
            Case(pair, 2, verification=verifier, prompt=PROMPT, make_drafter=make, idle=1, width=8)
        )
    assert accepted > 0.1


@pytest.mark.parametrize(
    ("name", "verifier"),
    combinations(
        lambda name, verifier: name == "fallback" and verifier in ("block", "match"), ["cascade", "fallback"], LOSSLESS
    ),
)
def test_composite_chains_in_two_steps(name: str, verifier: str) -> None:
    """The second step may draft with another sub-drafter than the first, since n-grams depend on the drawn tokens."""
    for seed in range(examples(2, least=1)):
        make, pair = made_by(CHAINS[name]), Pair(60 + seed, 4)
        assert_exact(
            Case(pair, 1, verification=verifier, prompt=UNKNOWN_LAST, make_drafter=make, steps=2, idle=1, width=8)
        )


class Fickle(Fixed):
    """Prefers a looked-up draft or the model's, and bounds the model's, by the committed tokens."""

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        return (sum(request.tokens) + len(scores)) % 2 == 0

    def longest_unscored(self, request: Request) -> int | None:
        return (None, 1, 2)[sum(request.tokens) % 3]


@pytest.mark.parametrize(
    ("size", "verifier"),
    combinations(
        lambda size, verifier: size[0] == 3,
        [(3, 2, 1, PROMPT), (4, 1, 2, UNKNOWN_LAST)],
        LOSSLESS,
    ),
    ids=str,
)
def test_selected_drafts_keep_the_distribution(verifier: str, size: tuple[int, int, int, tuple[int, ...]]) -> None:
    """The verified draft depends on scores and on committed tokens, and may change in every step."""
    vocab_size, length, steps, prompt = size
    case = Case(
        Pair(90, vocab_size), length, verification=verifier, prompt=prompt, make_drafter=made_by(CHAINS["fallback"]),
        policy=lambda: Fickle(length), steps=steps, idle=1, width=8,
    )  # fmt: skip
    assert_exact(case)


@pytest.mark.parametrize(
    ("name", "verifier"),
    combinations(lambda name, verifier: name != "cascade of trees" or verifier == "multi_draft", TREED, BRANCHING),
)
def test_composite_trees_keep_the_distribution(name: str, verifier: str) -> None:
    for seed in range(examples(2, least=1)):
        make, pair = made_by(TREED[name]), Pair(70 + seed, 3)
        assert_exact(Case(pair, 3, verification=verifier, prompt=PROMPT, make_drafter=make, idle=1, width=8))


@pytest.mark.parametrize(
    ("name", "params"),
    combinations(
        lambda name, params: name == "fallback" or "top_k" in params,
        ["cascade", "fallback"],
        [{"top_k": 2, "temperature": 0.7}, {"repetition_penalty": 1.4, "frequency_penalty": 0.5}],
    ),
)
def test_composite_chains_apply_every_parameter(name: str, params: dict[str, Any]) -> None:
    case = Case(
        Pair(81, 4, FULL_SUPPORT), 2, SamplingParams(max_tokens=None, **params), "block", PROMPT, idle=1,
        width=8, make_drafter=made_by(CHAINS[name]),
    )  # fmt: skip
    assert_exact(case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("name", ["cascade", "fallback"])
def test_constrained_composites_keep_the_distribution(name: str, verifier: str) -> None:
    case = ConstrainedCase(
        Pair(2, 4, FULL_SUPPORT), 2, verification=verifier, prompt=PROMPT, make_drafter=made_by(CHAINS[name]), idle=1,
        width=8,
    )  # fmt: skip
    found = enumeration.enumerate_case(case, functools.partial(Constrained, case))
    assert found.deviation() <= EXACT, case


LIMITS = Limits(max_model_len=48, max_num_seqs=4, max_num_batched_tokens=48)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "temperature": 1.4, "repetition_penalty": 1.2},
    {"seed": 5, "top_k": 2},
]
METHODS = {**CHAINS, **TREED}


def outputs(method_of: Sequence[str | None], budget: int) -> tuple[list[list[int]], int]:
    """Run requests with a method each in one engine; return their texts, and how many drafts were accepted."""
    pair, limits = Pair(5, 5, FULL_SUPPORT), ROOMY if budget == 0 else LIMITS
    made = {name: made_by(METHODS[name], paged)(pair, KeyedChances(), limits) for name in method_of if name}
    rig = build_rig(TableModel(pair.target, 5), Drafters(made), length=4, limits=limits)
    requests: list[Request] = []
    for index, name in enumerate(method_of):
        wanted = {"speculation": {"method": name}} if name else {}
        params = SamplingParams(max_tokens=14, **PARAMS[index % len(PARAMS)], **wanted)
        requests += rig.add((index % 5, 1, 2, 1, 2, index % 3), params, str(index))
    rig.finish()
    return [request.output for request in requests], sum(
        request.metrics.speculative_decoding.num_accepted_draft_tokens for request in requests
    )


@pytest.mark.parametrize("budget", slow_but([48], [48, 0]), ids=["many at a time", "alone"])
def test_composites_in_one_batch_change_no_text(budget: int) -> None:
    """Every composite beside every other one and beside requests without a draft."""
    names = [*METHODS, None] * 2
    plain, _ = outputs([None] * len(names), budget)
    drafted, accepted = outputs(names, budget)
    assert drafted == plain
    assert accepted > 30
