"""Proofs on random tables: every branch of the real step is followed, and the distributions are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speculant.lab.exactness.distributions import EXACT, Pair
from speculant.lab.exactness.drafts import TableDrafter, build_case
from speculant.lab.exactness.enumeration import TooManyWaysError
from speculant.lab.exactness.speculation import Case, enumerate_case
from speculant.params import SamplingParams
from speculant.types import Request
from speculant.verification import Verifier

Size = tuple[int, int]

# (vocabulary, nodes of a draft) -> how often a size occurs in a cycle
CHAINS = {(2, 1): 2, (2, 2): 2, (2, 3): 2, (3, 1): 2, (3, 2): 2, (3, 3): 1, (4, 1): 2, (4, 2): 1}
TREES = {(2, 2): 2, (2, 3): 3, (2, 4): 3, (3, 2): 2, (3, 3): 2, (4, 2): 2, (3, 4): 1}
WIDTH = 8  # branches followed in one batch
MOST_WAYS = 500  # branches of one case; larger cases are left out (some drafters make many draws)


@dataclass(frozen=True)
class Claim:
    """A verifier, the kinds of requests that it verifies, and the settings of its enumeration.

    lossless: whether the verifier announces that it is lossless.
    """

    verifier: str
    lossless: bool
    kinds: Sequence[str]
    params: SamplingParams
    cases: int

    def __str__(self) -> str:
        return f"Enumerating {self.verifier} on tables, for {' and '.join(self.kinds)} requests"


@dataclass(frozen=True)
class Proof:
    """The result of a claim's enumeration; `error` is the error that ended it early, if any."""

    claim: Claim
    draft: str
    sizes: Sequence[Size]
    cases: int
    mean_accepted: float
    deviation: float
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every distribution was the target's up to rounding."""
        return self.error is None and self.cases > 0 and self.deviation <= EXACT

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values for JSON."""
        return {
            "rule": self.claim.verifier,
            "announced_lossless": self.claim.lossless,
            "requests": list(self.claim.kinds),
            "draft": self.draft,
            "vocabularies": sorted({vocab_size for vocab_size, _ in self.sizes}),
            "draft_nodes": sorted({nodes for _, nodes in self.sizes}),
            "cases": self.cases,
            "mean_accepted": self.mean_accepted,
            "largest_deviation": self.deviation,
            "tolerance": EXACT,
            "error": self.error,
            "passed": self.passed,
        }


def claims(requests: Mapping[str, Request], cases: int) -> list[Claim]:
    """Return the claims to prove: one per verifier that an engine chose, with the kinds of requests that it serves.

    The first claim gets `cases`, the others a quarter. A seeded request makes the same draws as a sampled one, with
    keyed noise instead of fresh noise.
    """
    kinds: dict[tuple[str, bool], list[str]] = {}
    for kind, request in requests.items():
        kinds.setdefault((request.verifier, request.params.greedy), []).append(kind)
    made: list[Claim] = []
    for (verifier, _), of_rule in kinds.items():
        first, share = requests[of_rule[0]], 4 if made else 1
        made.append(Claim(verifier, first.metrics.lossless, of_rule, on_tables(first.params), max(1, cases // share)))
    return made


def on_tables(params: SamplingParams) -> SamplingParams:
    """Return the settings without token ids, texts and ends."""
    kept = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    return SamplingParams(max_tokens=None, **{name: getattr(params, name) for name in kept})


def prove(
    claim: Claim,
    draft: TableDrafter,
    verifiers: Mapping[str, Verifier],
    tell: Callable[[str], None] = lambda part: None,
) -> Proof:
    """Enumerate a claim over random pairs of distributions: zeros, ties, equal and disjoint supports, point masses.

    tell: called with a line before each pair, with the result of the pairs so far.
    """
    found: list[tuple[float, float]] = []
    sizes, too_large, error = set[Size](), set[Size](), None
    for case in _cases(claim, draft):
        size = (case.pair.vocab_size, case.length)
        if len(found) == claim.cases or too_large.issuperset(_sizes(draft)):
            break
        if size in too_large:
            continue
        furthest = max((deviation for deviation, _ in found), default=0.0)
        tell(f"{claim}: {len(found)} of {claim.cases} pairs, within {furthest:.0e} of the target's distribution")
        try:
            found.append(_measure(case, draft, verifiers))
            sizes.add(size)
        except TooManyWaysError:
            too_large.add(size)
        except Exception as caught:  # noqa: BLE001 - a verifier's error is a result of the check
            error = f"{type(caught).__name__}: {caught}"
            break
    deviations, accepted = [each[0] for each in found], [each[1] for each in found]
    mean = sum(accepted) / max(1, len(found))
    return Proof(claim, draft.description, sorted(sizes), len(found), mean, max(deviations, default=0.0), error)


def _sizes(draft: TableDrafter) -> Mapping[Size, int]:
    return TREES if draft.needs.emits_tree else CHAINS


def _cases(claim: Claim, draft: TableDrafter) -> Iterator[Case]:
    sizes = _sizes(draft)
    rounds = [size for turn in range(max(sizes.values())) for size, times in sizes.items() if turn < times]
    for seed, (vocab_size, nodes) in enumerate(itertools.cycle(rounds)):
        pair, prompt = Pair(seed, vocab_size), draft.prompt(vocab_size)
        idle = min(1, len(prompt) - 1)  # a longer prompt's first verification has no draft
        yield Case(pair, nodes, claim.params, claim.verifier, prompt, width=WIDTH, idle=idle)


def _measure(case: Case, draft: TableDrafter, verifiers: Mapping[str, Verifier]) -> tuple[float, float]:
    """Return the distance of the output's distribution from the target's, and the mean number of accepted drafts."""
    found = enumerate_case(case, lambda chances: build_case(case, draft.make, chances, verifiers)[0], MOST_WAYS)
    return found.deviation(), found.mean_accepted
