"""Runs requests through the real step, following every branch of its chance, with the rig's checks at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from speculant.config import Limits
from speculant.drafting import (
    Drafter,
    DraftModelRunner,
    NgramDrafter,
    NgramOptions,
    ParallelChains,
    SpecInfer,
    TreeTopology,
)
from speculant.lab.exactness import EXACT, Enumerated, EnumeratingChances, History, Pair, TableModel, enumeration
from speculant.lengths import DraftLength
from speculant.sampling import Chances
from tests.exactness.distributions import transformed
from tests.fakes import MakeCache, Rig, ScriptedDrafter, build_rig, known_verifiers, model_drafter, slotted

MakeDrafter = Callable[[Pair, Chances, Limits], Drafter]
LOSSLESS = [name for name, verifier in known_verifiers().items() if verifier.lossless]
BRANCHING = [name for name in LOSSLESS if known_verifiers()[name].needs.branches]


def draft_model(
    pair: Pair, chances: Chances, limits: Limits, cache: MakeCache = slotted, topology: TreeTopology | None = None
) -> Drafter:
    """Make the real drafter for a pair's draft distribution; topology None = chains."""
    return model_drafter(TableModel(pair.draft, pair.vocab_size), pair.vocab_size, chances, limits, cache, topology)


def of_two_models(
    draws: ParallelChains,
    pair: Pair,
    chances: Chances,
    limits: Limits,
    cache: MakeCache = slotted,
    budget: int | None = None,
) -> Drafter:
    """Draft with the pair's draft and with an unrelated one."""
    sources = []
    for table in (pair.draft, Pair(pair.seed + 100, pair.vocab_size).draft):
        model = TableModel(table, pair.vocab_size)
        made = cache(model.cache_shape, limits)
        sources.append(DraftModelRunner(model, made, chances, budget or limits.max_num_batched_tokens))
    return SpecInfer(sources, draws, pair.vocab_size)


def ngram(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    """Make a drafter of deterministic drafts."""
    return NgramDrafter(NgramOptions())


def scripted(*tokens: int) -> MakeDrafter:
    """Propose the same chain everywhere."""
    return lambda pair, chances, limits: ScriptedDrafter(lambda request: tokens)


@dataclass(frozen=True)
class Case(enumeration.Case):
    """A case with any drafter, cache and draft-length policy, whose distribution is worked out independently."""

    make_drafter: MakeDrafter = draft_model
    cache: MakeCache = slotted
    policy: Callable[[], DraftLength] | None = None  # None = `length` for every draft
    has_states: bool = False  # the target's distribution depends on a state

    @override
    def transformed(self, logits: Sequence[float], history: History) -> list[float]:
        return transformed(logits, self.params, history, len(self.prompt), self.ends)


def enumerate_case(case: Case) -> Enumerated:
    """Follow every branch of a case."""
    return enumeration.enumerate_case(case, lambda chances: _Rigged(_rig(case, chances)))


def assert_exact(case: Case) -> float:
    """Assert that a case has the target's distribution; return the expected number of accepted tokens."""
    found = enumerate_case(case)
    assert found.deviation() <= EXACT, case
    return found.mean_accepted


def _rig(case: Case, chances: EnumeratingChances) -> Rig:
    return build_rig(
        TableModel(case.pair.target, case.pair.vocab_size, has_source=bool(case.source), has_states=case.has_states),
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
