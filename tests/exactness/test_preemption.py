"""Where memory is short, requests are preempted and resumed: they write and report the same as alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from speculant.config import POLICIES, Limits
from speculant.drafting import Drafter, DrafterNeeds
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from speculant.scheduling import scheduler as scheduler_module
from speculant.types import ANYONE, Client, CommittedRows, DraftTree, Request
from tests.fakes import Rig, ScriptedDrafter, build_rig, few_blocks, model_drafter

V = 4
PAIR = Pair(6, V, FULL_SUPPORT)
LIMITS = Limits(max_model_len=28, max_num_seqs=4, max_num_batched_tokens=16)
TIGHT = few_blocks(8)  # one sequence needs up to seven


def fan(request: Request) -> DraftTree:
    return DraftTree(torch.tensor([0, 1, 2, 3, 1]), torch.tensor([-1, -1, 1, 1, 2]))


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: model_drafter(TableModel(PAIR.draft, V), V, limits=LIMITS),
    "starved model": lambda: model_drafter(TableModel(PAIR.draft, V), V, limits=LIMITS, cache=TIGHT),
    "target": lambda: model_drafter(TableModel(PAIR.target, V), V, limits=LIMITS, cache=TIGHT),
    "tree": lambda: ScriptedDrafter(fan, DrafterNeeds(emits_tree=True)),
}
PROMPTS = [(0, 1, 2), (1,) * 9, (2, 3), (3, 0, 3, 0, 1, 1, 2, 2, 3, 3, 1), (0, 1, 2, 2, 1)]
DISTRIBUTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 4, "presence_penalty": 0.4},
    {"seed": 5, "n": 3},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"seed": 6, "temperature": 0.7, "top_k": 3},
]


def add_all(rig: Rig) -> list[Request]:
    requests = []
    for index, (prompt, distribution) in enumerate(zip(PROMPTS, DISTRIBUTIONS, strict=True)):
        params = SamplingParams(max_tokens=16, logprobs=1, prompt_logprobs=1, **distribution)
        requests += rig.add(prompt, params, str(index))
    return requests


def said(request: Request) -> tuple[list[int], Sequence[Any], Sequence[Any]]:
    return request.output, request.logprobs, request.prompt_logprobs


@functools.cache
def all_alone() -> Sequence[Any]:
    """Return each request's text and figures without drafts, one at a time, with memory for everything."""
    rig = build_rig(TableModel(PAIR.target, V), limits=Limits(28, 1, 64))
    requests = add_all(rig)
    rig.finish()
    assert sum(request.metrics.num_preemptions for request in requests) == 0
    return [said(request) for request in requests]


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_preempted_request_writes_the_same_text(drafter: str, policy: str) -> None:
    limits = Limits(28, 4, 16, scheduling_policy=policy)
    rig = build_rig(TableModel(PAIR.target, V), DRAFTERS[drafter](), length=5, limits=limits, cache=TIGHT)
    requests = add_all(rig)
    rig.finish()
    assert [said(request) for request in requests] == all_alone()
    assert sum(request.metrics.num_preemptions for request in requests) == rig.engine.metrics.preemptions > 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_do_not_depend_on_the_clients(drafter: str, beams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take places from each other, at any time and by turns of two tokens; drafts differ, texts do not."""
    monkeypatch.setattr(scheduler_module, "TURN", 2)
    monkeypatch.setattr("time.perf_counter", itertools.count(0.0, 2**-10).__next__)  # clients pay for time
    limits = Limits(28, 2, 16)

    def written(places: int, clients: Sequence[Client]) -> tuple[list[Any], int]:
        rig = build_rig(
            TableModel(PAIR.target, V),
            DRAFTERS[drafter]() if places == 2 else None,
            length=5,
            limits=replace(limits, max_num_seqs=places),
            cache=few_blocks(21),
        )
        requests = []
        for index, (prompt, distribution) in enumerate(zip(PROMPTS, DISTRIBUTIONS, strict=True)):
            kind = {"beam_width": 2, "n": 2} if beams and index % 2 == 0 else distribution
            params, client = SamplingParams(max_tokens=16, **kind), clients[index % len(clients)]
            requests += rig.add(prompt, params, str(index), client=client)
            rig.step()
        rig.finish()
        return [request.output for request in requests], rig.engine.metrics.preemptions

    alone, _ = written(1, [ANYONE])
    mixed, preemptions = written(2, [Client("one"), Client("two", 2.0), Client("three")])
    assert mixed == alone
    assert preemptions  # a drafter that is always right writes a text in three passes, so few clients meet


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_samples_that_give_way_write_the_same_texts(drafter: str) -> None:
    """Memory suffices for all; requests come one after the other and take the places of seven samples."""

    def written(places: int) -> tuple[list[Any], int]:
        limits = Limits(28, places, 16)
        rig = build_rig(
            TableModel(PAIR.target, V),
            DRAFTERS[drafter]() if places > 1 else None,
            length=5,
            limits=limits,
            cache=few_blocks(28),
        )
        requests = rig.add(PROMPTS[0], SamplingParams(n=7, seed=3, max_tokens=16, logprobs=1), "many")
        for index, prompt in enumerate(PROMPTS):
            rig.step()
            rig.step()
            params = SamplingParams(max_tokens=5, logprobs=1, **({"temperature": 0} if index % 2 else {"seed": index}))
            requests += rig.add(prompt, params, str(index))
        rig.finish()
        return [said(request) for request in requests], rig.engine.metrics.preemptions

    (alone, never), (together, often) = written(1), written(4)
    assert together == alone
    assert never == 0
    assert often > 2


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_preemption_within_a_prompt_is_reported_once(drafter: str) -> None:
    """The second prompt is fed in parts while the first one's text grows into its memory."""
    limits, params = Limits(28, 2, 2), SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1)
    rig = build_rig(TableModel(PAIR.target, V), DRAFTERS[drafter](), length=2, limits=limits, cache=few_blocks(7))
    rig.add((0, 1), params, "grows")
    (late,) = rig.add(PROMPTS[3] + PROMPTS[0], params, "late")
    for _ in range(30):
        rig.step()
        if late.metrics.num_preemptions:
            break
    assert 0 < len(late.prompt_logprobs) < len(late.prompt) - 1, "it was not in the middle of its prompt"
    rig.finish()
    calm = build_rig(TableModel(PAIR.target, V), limits=LIMITS)
    (alone,) = calm.add(late.prompt, params)
    calm.finish()
    assert said(late) == said(alone)


@pytest.mark.parametrize("length", [1, 3, 8])
def test_drafts_preempt_no_request(length: int) -> None:
    """Memory holds two whole texts and nothing else: drafts get only the memory that they leave."""
    drafter = model_drafter(TableModel(PAIR.target, V), V, limits=LIMITS)
    rig = build_rig(TableModel(PAIR.target, V), drafter, length=length, limits=LIMITS, cache=few_blocks(8))
    requests = [rig.add((index,), SamplingParams(seed=index, max_tokens=16), str(index))[0] for index in range(2)]
    rig.finish()
    assert rig.engine.metrics.preemptions == 0
    assert all(request.metrics.speculative_decoding.num_accepted_draft_tokens > 0 for request in requests)


class Diary(ScriptedDrafter):
    """Notes each event of a sequence."""

    def __init__(self) -> None:
        super().__init__(lambda request: [1, 2])
        self.events: list[tuple[str, int]] = []

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self.events.append(("begin", request.seq_id))

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        self.events += [("propose", request.seq_id) for request in requests]
        return super().propose(requests, limits)

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`."""
        self.events.append(("observe", request.seq_id))

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        self.events.append(("end", request.seq_id))


def test_a_drafter_begins_and_ends_every_request() -> None:
    """Each stay of a sequence, the first one and later ones after preemption, has a beginning, an end and no gap."""
    drafter = Diary()
    rig = build_rig(TableModel(PAIR.target, V), drafter, length=2, limits=LIMITS, cache=TIGHT)
    requests = add_all(rig)
    rig.finish()
    for request in requests:
        events = [event for event, seq_id in drafter.events if seq_id == request.seq_id]
        stays = "".join({"begin": "(", "end": ")"}.get(event, ".") for event in events).split(")")
        assert stays.pop() == ""
        assert len(stays) == request.metrics.num_preemptions + 1
        assert all(stay[0] == "(" and set(stay[1:]) <= {"."} for stay in stays)
    assert rig.engine.metrics.preemptions > 0
