"""Drives a draft-length policy through the run of a simulated machine, as `engine.step` does.

The policy sees a clock with noise and bursts of other programs; results count the true seconds and an allowance for the
policy's calls, so that few steps tell policies apart. `context_of` alone knows how a policy is built.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any
from unittest.mock import patch

import numpy as np

from speculant.drafting import DrafterNeeds
from speculant.lengths import (
    DEPTHS,
    ROWS,
    SEQUENCES,
    CostCurve,
    DraftLength,
    DraftLengthContext,
    GuardedLength,
    KeyCosts,
    Reading,
    StepCosts,
)
from speculant.metrics import StepTiming
from speculant.params import SamplingParams
from speculant.scheduling import Schedule, Scheduled
from speculant.types import DraftPrice, DraftTree, Request
from tests.models import make_request
from tests.simulation import outcome_of
from tests.unit.lengths.machines import FURTHER, MOST, Machine, Run, Work

CALL_S, CALL_SEQUENCE_S = 4e-6, 1e-6  # of each call of a policy, and for each sequence
SPARE_TOKENS = 10**6


def context_of(machine: Machine) -> DraftLengthContext:
    """Return the context of a policy: the costs that this machine measured, with no draft between passes."""
    of_passes, of_drafts = machine.errors
    passes = {rows: machine.cache * of_passes * float(machine.passes[rows]) for rows in ROWS}
    counts = [count for count in SEQUENCES if count <= machine.sequences]

    def measured(count: int, depth: int) -> float:
        search = 0.0 if machine.method == "model" else machine.floor_s * machine.ask * count
        return of_drafts * (search + (0.0 if machine.method == "lookup" else float(machine.model_s(count, depth))))

    curves = {count: CostCurve({depth: measured(count, depth) for depth in DEPTHS}) for count in counts}
    keys = KeyCosts(machine.key / machine.cache, FURTHER * machine.key / machine.cache)
    readings = {} if machine.method == "lookup" else {machine.method: Reading(machine.read * machine.floor_s, 0.0)}
    costs = StepCosts(CostCurve(passes), {machine.method: curves}, keys=keys, readings=readings)
    needs, price = DrafterNeeds(selects=machine.method == "both", stops=machine.ends), DraftPrice()
    return DraftLengthContext(8, costs=lambda: costs, needs=lambda method: needs, price=lambda method: price)


def run(machine: Machine, policy: DraftLength, price: DraftPrice | None = None) -> Run:
    """Drive a policy through a machine's run; price: of its chains."""
    simulated = SimulatedEngine(machine, policy, price or DraftPrice())
    with patch.object(time, "perf_counter", lambda: simulated.clock):
        while not simulated.is_over:
            simulated.step()
    return Run(np.array(simulated.tokens), np.cumsum(simulated.seconds), simulated.drafted, simulated.calls)


class SimulatedEngine:
    """An engine whose passes and drafts take the machine's time, by the order of calls in `engine.step`."""

    def __init__(self, machine: Machine, policy: DraftLength, price: DraftPrice) -> None:
        self._price = price
        self._machine, self._policy, self._length = machine, policy, GuardedLength(policy)
        self._texts = machine.texts.lists
        self._at, self._requests = [0] * machine.sequences, [None] * machine.sequences
        self._read: dict[int, int] = {}  # tokens that the drafter's model has read, by sequence id
        self._own_s, self._missing, self._started = 0.0, 0.0, 0
        self.clock, self.calls, self.drafted = 0.0, 0, 0
        self.tokens, self.seconds = list[int](), list[float]()

    @property
    def is_over(self) -> bool:
        """Whether all tokens are made, or a text ends."""
        size = len(self._texts.room[0]) - MOST
        return sum(self._at) >= len(self._at) * self._machine.tokens or max(self._at) >= size

    def step(self) -> None:
        """Draft, compute a pass, and commit."""
        machine, schedule, self._own_s = self._machine, self._schedule(), 0.0
        requests, started = [item.request for item in schedule.items], self.clock
        chosen = self._length.choose(schedule)
        paused, lengths = chosen is None, chosen or [0] * len(requests)
        self._count_call(not paused)
        limits = [min(length, room) for length, room in zip(lengths, self._each("room"), strict=True)]
        counts, by_model = self._drafts(requests, limits) if any(lengths) else (limits, limits)
        self._missing = 1.0 if any(by_model) else machine.lingers * self._missing
        read = sum(self._unread(request) for request, count in zip(requests, by_model, strict=True) if count)
        work = Work(
            len(requests),
            sum(counts) + sum(item.count for item in schedule.items),
            sum(len(each.tokens) * (1 + FURTHER * count) for each, count in zip(requests, counts, strict=True)),
            sum(map(bool, by_model)), max(by_model),
            sum(map(bool, limits)) * (machine.method != "model"), sum(map(bool, counts)), read,
            self._missing, sum(self._at) / (len(requests) * machine.tokens),
        )  # fmt: skip
        true_s = machine.seconds(work)
        slow = [own[len(self.tokens) % len(own)] for own in self._texts.slowness]
        draft_s, pass_s, rest_s = (float(own) * factor for own, factor in zip(true_s, slow, strict=True))
        drafted = started + self._own_s + draft_s
        timing = StepTiming(started, drafted, drafted + pass_s, rest_s)
        self.clock = timing.verified + rest_s
        outcomes = [outcome_of(*each) for each in self._commit(requests, counts, by_model) if each[1]]
        if outcomes or not paused:
            self._length.observe(outcomes, timing)
            self._count_call(True)
        self.drafted += bool(outcomes)
        self.seconds.append(float(sum(true_s)) + self._own_s)
        self.tokens.append(sum(self._at))

    def _each(self, name: str) -> list[Any]:
        """Return an array of the texts at the current positions."""
        return [own[at] for own, at in zip(getattr(self._texts, name), self._at, strict=True)]

    def _count_call(self, called: bool) -> None:
        """Count a call of the policy, which takes time."""
        seconds = called * (CALL_S + CALL_SEQUENCE_S * len(self._at))
        self.clock, self._own_s, self.calls = self.clock + seconds, self._own_s + seconds, self.calls + called

    def _schedule(self) -> Schedule:
        items, admitted, params = list[Scheduled](), list[Request](), SamplingParams(max_tokens=self._machine.request)
        for place, begins in enumerate(self._each("begins")):
            if begins:
                self._started += 1
                made = make_request([0] * self._machine.prompt, [], params, self._started, method=self._machine.method)
                self._requests[place] = made
                admitted.append(made)
            request = self._requests[place]
            size = len(request.tokens)
            items.append(Scheduled(request, 0 if begins else size - 1, size if begins else 1))
        spare = SPARE_TOKENS - sum(item.count for item in items)
        return Schedule(items, None, spare, admitted, [])  # type: ignore[arg-type]

    def _drafts(self, requests: Sequence[Request], limits: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the nodes of each draft, and of those that the model makes."""
        if self._machine.ends:
            limits = [min(pair) for pair in zip(limits, self._ends(limits), strict=True)]
        if self._machine.method == "model":
            return list(limits), list(limits)
        trees, by_model = list[DraftTree](), list[int]()
        selects = self._machine.method == "both"
        for place, (request, limit, found) in enumerate(zip(requests, limits, self._each("found"), strict=True)):
            count, at = min(limit, found), self._at[place]
            tree = DraftTree.chain([0] * count, scores=self._texts.scores[place][at : at + count])
            taken = count > 0 and (not selects or self._policy.prefers(request, tree.scores, tree.parent_list))
            most = self._policy.longest_unscored(request) if selects else None
            by_model.append(
                0 if taken or self._machine.method == "lookup" else min(limit, limit if most is None else most)
            )
            trees.append(tree if taken else DraftTree.chain([0] * by_model[-1]))
        if any(tree.size and tree.scores for tree in trees):
            trees = self._length.trim(requests, trees)
            self._count_call(True)
        return [tree.size for tree in trees], by_model

    def _ends(self, limits: Sequence[int]) -> list[int]:
        """Return how many tokens of each chain are drawn."""
        found = list[int]()
        for at, sure, limit in zip(self._at, self._texts.sure, limits, strict=True):
            paths = accumulate(sure[at : at + limit - 1], mul)
            found.append(1 + sum(path >= self._price.least for path in paths))
        return found

    def _unread(self, request: Request) -> int:
        """Return how many tokens the drafter's model reads before it drafts; those of its last draft are known."""
        unread = len(request.tokens) - self._read.get(request.seq_id, 0)
        self._read[request.seq_id] = len(request.tokens)
        return unread if unread > MOST + 1 else 0

    def _commit(
        self, requests: Sequence[Request], counts: Sequence[int], by_model: Sequence[int]
    ) -> list[tuple[Request, int, int]]:
        """Commit the accepted tokens; return each request with its draft's nodes and how many were accepted."""
        committed = []
        both = zip(self._each("kept"), self._each("found_kept"), strict=True)
        for place, (kept, found_kept) in enumerate(both):
            accepted = min(counts[place], kept if by_model[place] else found_kept)
            requests[place].extend([0] * (accepted + 1))
            self._at[place] += accepted + 1
            committed.append((requests[place], counts[place], accepted))
        return committed
