"""Composite drafters keep the output's distribution over several steps, with any selection, setting and constraint."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from speculant import SamplingParams
from speculant.lab.exactness import EXACT, FULL_SUPPORT, Pair, enumeration
from speculant.lengths import Fixed
from speculant.types import Request
from tests.exactness.selection import combinations
from tests.exactness.speculation import LOSSLESS, Case, MakeDrafter, assert_exact
from tests.exactness.test_constraints import Case as ConstrainedCase, Constrained
from tests.exactness.test_drafters import CHAINS
from tests.examples import examples
from tests.fakes import slotted

PROMPT = (0, 1, 2, 0)
UNKNOWN_LAST = (0, 1, 3)  # n-grams have no draft after it


def made_by(name: str) -> MakeDrafter:
    """Return a maker of a drafter."""
    return functools.partial(CHAINS[name].make, cache=slotted)


@pytest.mark.parametrize(
    ("name", "verifier"),
    combinations(
        lambda name, verifier: name == "fallback" and verifier in ("block", "match"), ["cascade", "fallback"], LOSSLESS
    ),
)
def test_composite_chains_in_two_steps(name: str, verifier: str) -> None:
    """The second step may draft with another sub-drafter than the first, since n-grams depend on the drawn tokens."""
    for seed in range(examples(2, least=1)):
        make, pair = made_by(name), Pair(60 + seed, 4)
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
        Pair(90, vocab_size), length, verification=verifier, prompt=prompt, make_drafter=made_by("fallback"),
        policy=lambda: Fickle(length), steps=steps, idle=1, width=8,
    )  # fmt: skip
    assert_exact(case)


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
        width=8, make_drafter=made_by(name),
    )  # fmt: skip
    assert_exact(case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("name", ["cascade", "fallback"])
def test_constrained_composites_keep_the_distribution(name: str, verifier: str) -> None:
    case = ConstrainedCase(
        Pair(2, 4, FULL_SUPPORT), 2, verification=verifier, prompt=PROMPT, make_drafter=made_by(name), idle=1,
        width=8,
    )  # fmt: skip
    found = enumeration.enumerate_case(case, functools.partial(Constrained, case))
    assert found.deviation() <= EXACT, case
