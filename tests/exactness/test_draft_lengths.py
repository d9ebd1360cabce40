"""A length that learns keeps the output's distribution: every branch of the real step is followed.

Each branch has a policy of its own, which learns from that branch alone, and all steps take the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from speculant.config import Limits
from speculant.drafting import Drafter, DrafterNeeds, FallbackDrafter, NgramDrafter, NgramOptions, SubDrafter
from speculant.lab.exactness import Pair
from speculant.lengths import (
    Adaptive,
    Confidence,
    CostCurve,
    DraftLength,
    DraftOutcome,
    ScoredDraft,
    StepCosts,
    adaptive as adaptive_length,
)
from speculant.metrics import StepTiming
from speculant.params import SamplingParams
from speculant.sampling import Chances
from speculant.scheduling import Schedule
from speculant.types import Request
from tests.exactness.speculation import Case, assert_exact, draft_model
from tests.examples import examples, sizes

TIMING = StepTiming(0.0, 0.5, 1.5)  # about what `adaptive` expects
Policy = Adaptive | Confidence


class Apart(DraftLength):
    """A policy for each request. `lengths` counts the choices, `cut` the drafts that were cut."""

    def __init__(self, make: Callable[[], Policy], lengths: Counter[int], cut: Counter[bool]) -> None:
        self._make, self._lengths, self._cut = make, lengths, cut
        self._own: dict[int, Policy] = {}
        self.preferred = Counter[bool]()

    def choose(self, schedule: Schedule) -> list[int]:
        chosen = list[int]()
        for item in schedule.items:
            own = self._own.setdefault(item.request.seq_id, self._make())
            chosen += own.choose(replace(schedule, items=[item]))
        self._lengths.update(chosen)
        return [min(length, 3) for length in chosen]

    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        counts = [count for draft in drafts for count in self._own[draft.request.seq_id].trim([draft])]
        self._cut.update(count < len(draft.scores) for count, draft in zip(counts, drafts, strict=True))
        return counts

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        preferred = self._adaptive(request).prefers(request, scores, parents)
        self.preferred[preferred] += 1
        return preferred

    def longest_unscored(self, request: Request) -> int | None:
        return self._adaptive(request).longest_unscored(request)

    def _adaptive(self, request: Request) -> Adaptive:
        own = self._own[request.seq_id]
        assert isinstance(own, Adaptive)
        return own

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        for outcome in outcomes:
            self._own[outcome.request.seq_id].observe([outcome], TIMING)


def adaptive(token_s: float, selects: bool = False) -> Adaptive:
    """Make an adaptive length; `token_s` is the cost of a drafted token, in passes."""
    drafts = CostCurve({1: token_s, 8: 8 * token_s})
    return Adaptive(
        3,
        StepCosts(CostCurve({1: 1.0, 8: 1.2}), {"default": {1: drafts}}),
        lambda method: DrafterNeeds(selects=selects),
    )


def ngram(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    """Make a drafter of deterministic drafts with scores."""
    return NgramDrafter(NgramOptions(max_order=2))


def check(case: Case, make: Callable[[], Policy]) -> tuple[Counter[int], Counter[bool]]:
    lengths, cut = Counter[int](), Counter[bool]()
    assert_exact(replace(case, policy=lambda: Apart(make, lengths, cut)))
    return lengths, cut


@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
def test_adaptive_lengths_keep_the_distribution(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice is made before every step, from what was accepted in the branch."""
    monkeypatch.setattr(adaptive_length, "HOLDS", 1)
    lengths = Counter[int]()
    for seed in range(2):
        case = Case(Pair(seed, 2), 3, verification=verifier, steps=2, idle=2, width=8)
        lengths += check(case, lambda: adaptive(0.25))[0]
    assert len(lengths) > 2, "the length hardly changed"


@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
@pytest.mark.parametrize("make", [lambda: adaptive(0.02), lambda: Confidence(3, 0.6)], ids=["adaptive", "confidence"])
def test_cut_drafts_keep_the_distribution(make: Callable[[], Policy], verifier: str) -> None:
    cut = Counter[bool]()
    for seed in range(examples(3, least=1)):
        params = SamplingParams(max_tokens=None, temperature=0.7)
        case = Case(
            Pair(seed, 3), 3, params, verifier, prompt=(0, 1, 2, 0, 2, 0, 1), steps=2, idle=2, width=8,
            make_drafter=ngram,
        )  # fmt: skip
        cut += check(case, make)[1]
    assert cut[True], "no draft was cut"


@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
@pytest.mark.parametrize("vocab_size", sizes(2, 3))
def test_selection_keeps_the_distribution(vocab_size: int, verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked-up and drawn drafts compete in every step, by what was accepted in the branch."""
    monkeypatch.setattr(adaptive_length, "HOLDS", 1)
    preferred = Counter[bool]()

    def make(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
        looked_up, drawn = ngram(pair, chances, limits), draft_model(pair, chances, limits)
        sub_drafters = [SubDrafter("ngram", looked_up, 3), SubDrafter("model", drawn, 3)]
        return FallbackDrafter(sub_drafters, pair.vocab_size)

    def policy() -> Apart:
        selector = Apart(lambda: adaptive(0.4, selects=True), Counter[int](), Counter[bool]())
        selector.preferred = preferred
        return selector

    prompt = (0, 1, 2, 0, 2, 0, 1) if vocab_size > 2 else (0, 1, 1, 0, 1, 0, 0, 1)
    case = Case(
        Pair(0, vocab_size), 3, verification=verifier, prompt=prompt, steps=2, idle=1, width=8,
        make_drafter=make, policy=policy,
    )  # fmt: skip
    assert_exact(case)
    assert preferred[True], "no looked-up draft was ever preferred"
    assert preferred[False], "none was ever passed over"
