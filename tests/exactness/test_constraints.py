"""Constrained output has the masked target's distribution under every drafter and verifier."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from speculant.config import Limits
from speculant.drafting import (
    Drafter,
    NgramDrafter,
    NgramOptions,
    ParallelChains,
    StaticTree,
    SyntheticDrafter,
    SyntheticOptions as Rate,
)
from speculant.lab.exactness import EXACT, FULL_SUPPORT, EnumeratingChances, History, Pair, TableModel, enumeration
from speculant.params import SamplingParams
from speculant.sampling import Chances
from speculant.types import Request
from tests.automata import Automaton, AutomatonConstraint, ForcingAutomaton, ForcingConstraint
from tests.exactness.distributions import transformed
from tests.exactness.selection import slow_but
from tests.exactness.speculation import BRANCHING, LOSSLESS, MakeDrafter, draft_model, ngram, of_two_models, scripted
from tests.fakes import ROOMY, build_rig, model_drafter, slotted

AUTOMATON = Automaton(
    {
        0: {0: 1, 1: 0, 2: 2},
        1: {1: 2, 3: 0},
        2: {0: 0, 1: 1, 2: 3, 3: 4},
        3: {},  # the end: nothing may follow
        4: {2: 0},
    }
)
PAIR = Pair(2, 4, FULL_SUPPORT)


@dataclass(frozen=True)
class Case(enumeration.Case):
    """A case whose output an automaton constrains; its distribution is worked out independently."""

    make_drafter: MakeDrafter = draft_model
    automaton: Automaton = AUTOMATON

    def transformed(self, logits: Sequence[float], history: History) -> list[float]:
        """See the base."""
        allowed = self.automaton.allowed_after(history[len(self.prompt) :])
        masked = [logit if token in allowed else float("-inf") for token, logit in enumerate(logits)]
        return transformed(masked, self.params, history, len(self.prompt), self.ends)

    def is_over(self, output: History) -> bool:
        """See the base."""
        return super().is_over(output) or not self.automaton.allowed_after(output)


class Constrained:
    """A rig in an engine's place, with a constraint for every request."""

    def __init__(self, case: Case, chances: EnumeratingChances) -> None:
        drafter = case.make_drafter(case.pair, chances, case.limits)
        self._case = case
        self._rig = build_rig(
            TableModel(case.pair.target, case.pair.vocab_size),
            drafter,
            length=case.length,
            verification=case.verification,
            chances=chances,
            limits=case.limits,
            ends=case.ends,
            cache=slotted,
        )
        self.step, self.abort = self._rig.step, self._rig.abort

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str, *, source: Sequence[int] = ()
    ) -> list[Request]:
        """See `Engine.add_request`."""
        assert not source
        return self._rig.add(prompt, params, request_id, constraint=self._case.automaton.constrain)


def assert_exact(case: Case) -> float:
    found = enumeration.enumerate_case(case, functools.partial(Constrained, case))
    assert found.deviation() <= EXACT, case
    return found.mean_accepted


def synthetic(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    drafter = SyntheticDrafter(Rate(0.7), pair.vocab_size)
    drafter._scripts[(), (0, 1, 2, 0)] = [0, 1, 2, 1, 1]
    drafter.end = lambda request: None  # type: ignore[method-assign]  # else each way would draft what another said
    return drafter


@pytest.mark.parametrize("verifier", slow_but(["rejection", "traversal"], LOSSLESS))
def test_constrained_chains_of_a_draft_model(verifier: str) -> None:
    accepted = 0.0
    for seed, length in enumerate((2, 2, 3)):
        accepted += assert_exact(Case(Pair(seed, 4, FULL_SUPPORT), length, verification=verifier, width=8))
    assert accepted > 1.0


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", BRANCHING)
@pytest.mark.parametrize(
    "topology", [StaticTree.of_widths([2, 1]), ParallelChains((0, 0), 2)], ids=["static", "parallel"]
)
def test_constrained_trees(topology: StaticTree | ParallelChains, verifier: str) -> None:
    make = functools.partial(draft_model, topology=topology)
    accepted = assert_exact(Case(PAIR, 3, verification=verifier, width=8, make_drafter=make))
    assert accepted > 0.3


@pytest.mark.parametrize("verifier", slow_but(["traversal"], BRANCHING))
def test_constrained_trees_of_two_models(verifier: str) -> None:
    make = functools.partial(of_two_models, ParallelChains((0, 1), 2))
    assert_exact(Case(PAIR, 3, verification=verifier, width=8, make_drafter=make))


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize(
    "make",
    [ngram, synthetic, scripted(0, 1, 2), scripted(2, 2, 0), scripted(3, 0)],
    ids=["ngram", "synthetic", "forbidden later", "beyond the end", "forbidden at once"],
)
def test_constrained_drafts_without_a_model(make: MakeDrafter, verifier: str) -> None:
    """These drafts ignore the constraint: forbidden tokens are never accepted, and no token follows the end."""
    assert_exact(Case(PAIR, 3, verification=verifier, prompt=(0, 1, 2, 0), make_drafter=make, idle=1))


FORCING = ForcingAutomaton(
    {
        0: {0: 1, 1: 0, 2: 2},
        1: {1: 4},
        2: {0: 0, 2: 3},
        3: {},
        4: {3: 5},
        5: {0: 0, 2: 1, 3: 3},
    }
)


@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("make", [draft_model, scripted(), scripted(1, 3, 0)], ids=["model", "nothing", "chain"])
def test_forced_tokens_are_drafts(make: MakeDrafter, verifier: str) -> None:
    case = Case(PAIR, 2, verification=verifier, width=8, make_drafter=make, automaton=FORCING, idle=1)
    assert assert_exact(case) > 0.2


@pytest.mark.parametrize("verifier", BRANCHING)
def test_forced_tokens_beside_trees(verifier: str) -> None:
    make = functools.partial(draft_model, topology=StaticTree.of_widths([2, 1]))
    assert_exact(Case(PAIR, 3, verification=verifier, width=8, make_drafter=make, automaton=FORCING))


class Mistaken(ForcingConstraint):
    """Reports tokens as forced that are one choice of several, or forbidden."""

    def forced(self) -> list[int]:
        """See the base."""
        return super().forced() or [2, 2, 1]


@dataclass(frozen=True)
class MistakenAutomaton(Automaton):
    """Makes such constraints."""

    def constrain(self) -> AutomatonConstraint:
        """See the base."""
        return Mistaken(self)


@pytest.mark.parametrize("verifier", LOSSLESS)
def test_forced_tokens_are_verified(verifier: str) -> None:
    automaton = MistakenAutomaton(FORCING.edges)
    assert_exact(Case(PAIR, 2, verification=verifier, width=8, make_drafter=draft_model, automaton=automaton))


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "filters": {"temperature": 0.8, "top_k": 2},
    "bias": {"logit_bias": {0: 2.0, 1: -1.0}},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "ends": {"min_tokens": 2},
}


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("name", SETTINGS)
def test_constraints_come_before_other_settings(name: str, verifier: str) -> None:
    params = SamplingParams(max_tokens=None, **SETTINGS[name])
    ends = frozenset({3}) if params.min_tokens else frozenset()
    assert_exact(Case(PAIR, 2, params, verifier, ends=ends, width=8))


DRAFTERS: dict[str, Callable[[Pair], Drafter | None]] = {
    "none": lambda pair: None,
    "model": lambda pair: model_drafter(TableModel(pair.draft, 4), 4),
    "tree": lambda pair: model_drafter(TableModel(pair.draft, 4), 4, topology=StaticTree.of_widths([2, 2])),
    "ngram": lambda pair: NgramDrafter(NgramOptions()),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 5}, {"seed": 6, "temperature": 1.5}])
def test_speculation_changes_no_constrained_text(drafter: str, settings: dict[str, Any]) -> None:
    pair, params = Pair(4, 4, FULL_SUPPORT), SamplingParams(max_tokens=20, **settings)
    for prompt in ((0,), (1, 2), (3, 3, 1)):
        plain, request = (constrained(pair, prompt, params, name) for name in ("none", drafter))
        assert request.output == plain.output
        assert isinstance(request.constraint, AutomatonConstraint)
        assert request.constraint.taken == request.output
        assert (request.ending.reason == "stop") == request.constraint.is_done


def constrained(pair: Pair, prompt: History, params: SamplingParams, drafter: str) -> Request:
    """Run a constrained request alone."""
    rig = build_rig(TableModel(pair.target, 4), DRAFTERS[drafter](pair), length=4, limits=ROOMY)
    (request,) = rig.add(prompt, params, constraint=AUTOMATON.constrain)
    rig.finish()
    return request
