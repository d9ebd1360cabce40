"""Runs requests through the real step, following every branch of its chance, with the rig's checks at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speculant.config import Limits
from speculant.drafting import Drafter
from speculant.lab.exactness import Enumerated, EnumeratingChances, History, Pair, TableModel, enumeration
from speculant.lengths import DraftLength
from speculant.sampling import Chances
from tests.exactness.distributions import transformed
from tests.fakes import MakeCache, Rig, build_rig, model_drafter, slotted

MakeDrafter = Callable[[Pair, Chances, Limits], Drafter]


def draft_model(pair: Pair, chances: Chances, limits: Limits, cache: MakeCache = slotted) -> Drafter:
    """Make the real drafter for a pair's draft distribution."""
    return model_drafter(TableModel(pair.draft, pair.vocab_size), pair.vocab_size, chances, limits, cache)


@dataclass(frozen=True)
class Case(enumeration.Case):
    """A case with any drafter, cache and draft-length policy, whose distribution is worked out independently."""

    make_drafter: MakeDrafter = draft_model
    cache: MakeCache = slotted
    policy: Callable[[], DraftLength] | None = None  # None = `length` for every draft

    def transformed(self, logits: Sequence[float], history: History) -> list[float]:
        """See the base."""
        return transformed(logits, self.params, history, len(self.prompt), self.ends)


def enumerate_case(case: Case) -> Enumerated:
    """Follow every branch of a case."""
    return enumeration.enumerate_case(case, lambda chances: _Rigged(_rig(case, chances)))


def _rig(case: Case, chances: EnumeratingChances) -> Rig:
    return build_rig(
        TableModel(case.pair.target, case.pair.vocab_size, has_source=bool(case.source)),
        case.make_drafter(case.pair, chances, case.limits),
        length=case.length,
        verification=case.verification,
        chances=chances,
        limits=case.limits,
        ends=case.ends,
        cache=case.cache,
        draft_length=case.policy() if case.policy else None,
    )


class _Rigged:
    """A rig in an engine's place."""

    def __init__(self, rig: Rig) -> None:
        self.add_request, self.step, self.abort = rig.add, rig.step, rig.abort
