"""Drafters by method: drafts are checked, errors are counted, and each request has the drafter that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from speculant.config import Limits
from speculant.drafting import (
    DrafterNeeds,
    DrafterReads,
    Drafters,
    StatelessDrafter,
    check_draft,
    check_extends,
    complete,
)
from speculant.errors import ConfigError, DraftError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.lengths import Fixed, ScoredDraft
from speculant.params import SamplingParams
from speculant.scheduling import Schedule
from speculant.types import CommittedRows, DraftTree, Request
from tests.fakes import Rig, ScriptedDrafter, build_rig, few_blocks

V = 6
LIMITS = Limits(max_model_len=32, max_num_seqs=3, max_num_batched_tokens=48)
PAIR = Pair(3, V, FULL_SUPPORT)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def changed(tree: DraftTree, name: str, values: list[int]) -> DraftTree:
    """Change a tree after it was made, as code that keeps its lists could."""
    getattr(tree, name)[:] = values
    return tree


BAD: dict[str, Callable[[], Any]] = {
    "a token beyond the vocabulary": lambda: DraftTree.chain([10**9]),
    "a negative token": lambda: DraftTree.chain([-5]),
    "too many nodes": lambda: DraftTree.chain([1] * 700),
    "a parent behind its child": lambda: DraftTree.of([1, 2], [1, -1]),
    "a node that is its own parent": lambda: DraftTree.of([1, 2], [-1, 1]),
    "a parent below -1": lambda: DraftTree.of([1, 2], [-1, -2]),
    "more tokens than parents": lambda: DraftTree.of([1, 2], [-1]),
    "branches that were not announced": lambda: DraftTree.of([1, 2], [-1, -1]),
    "probs of another size": lambda: DraftTree.chain([1], torch.ones(1, V - 1)),
    "probs that are not numbers": lambda: DraftTree.chain([1], torch.full((1, V), float("nan"))),
    "infinite probs": lambda: DraftTree.chain([1], torch.full((1, V), float("inf"))),
    "probs of integers": lambda: DraftTree.chain([1], torch.eye(V, dtype=torch.int64)[1:2]),
    "probs that sum to more than 1": lambda: DraftTree.chain([1], torch.ones(1, V)),
    "probs that sum to less than 1": lambda: DraftTree.chain([1], torch.full((1, V), 0.9 / V)),
    "negative probs": lambda: DraftTree.chain([1], torch.tensor([[-1.0, 2.0, *[0.0] * (V - 2)]])),
    "a token of probability 0": lambda: DraftTree.chain([1], torch.eye(V)[2:3]),
    "too few scores": lambda: DraftTree.chain([1, 2], scores=[0.5]),
    "scores that are not numbers": lambda: DraftTree.chain([1], scores=[float("nan")]),
    "fractions": lambda: DraftTree(torch.tensor([1.5]), torch.tensor([float("nan")])),
    "no tree": lambda: [1, 2],
    "a chain whose parents were changed": lambda: changed(DraftTree.chain([1, 2]), "parent_list", [1, 5]),
    "a draft that grew": lambda: changed(DraftTree.chain([1]), "token_list", [1, 2]),
    "an empty draft that grew": lambda: changed(DraftTree.chain([]), "token_list", [1, 2]),
}


class Careless(StatelessDrafter):
    """Proposes the same thing to everybody, whatever the limit."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        return [self._make() for _ in requests]


def finished(rig: Rig, prompts: Sequence[Sequence[int]] = ((0,), (1, 2), (3, 3))) -> list[list[int]]:
    rig.drafter_may_fail = True
    requests = [rig.add(prompt, GREEDY, str(index))[0] for index, prompt in enumerate(prompts)]
    rig.finish()
    assert {request.ending.reason for request in requests} == {"length"}
    return [request.output for request in requests]


@pytest.mark.parametrize("bad", BAD)
def test_drafters_bad_draft_costs_the_draft_alone(bad: str) -> None:
    expected = finished(build_rig(TableModel(PAIR.target, V), limits=LIMITS))
    rig = build_rig(TableModel(PAIR.target, V), Careless(BAD[bad]), length=4, limits=LIMITS)
    assert finished(rig) == expected
    assert rig.engine.metrics.drafter_errors > 0
    assert rig.engine.metrics.failed == rig.engine.metrics.repeated_steps == 0


def test_drafters_wrong_number_of_drafts_is_an_error() -> None:
    class Lazy(StatelessDrafter):
        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            return []

    rig = build_rig(TableModel(PAIR.target, V), Lazy(), length=4, limits=LIMITS)
    finished(rig)
    assert rig.engine.metrics.drafter_errors > 0


def test_drafters_check_passes_legal_drafts() -> None:
    for tree in (
        DraftTree.empty(),
        DraftTree.of([1, 5, 0], [-1, -1, 0]),
        DraftTree.chain([2], torch.full((1, V), 1 / V)),
    ):
        check_draft(tree, 3, V, branches=True)


def test_drafters_beam_draft_extends_live_hypotheses() -> None:
    live = DraftTree.of([1, 2], [-1, 0])
    check_extends(DraftTree.of([1, 2, 3], [-1, 0, 1]), live)
    check_extends(DraftTree.empty(), live)
    with pytest.raises(DraftError, match="live hypotheses"):
        check_extends(DraftTree.of([2, 1, 3], [-1, 0, 1]), live)


def test_drafters_failing_end_leaves_the_engine_intact() -> None:
    class Clinging(ScriptedDrafter):
        def end(self, request: Request) -> None:
            raise RuntimeError("no")

    rig = build_rig(TableModel(PAIR.target, V), Clinging(lambda request: [1, 2]), length=2, limits=LIMITS)
    finished(rig)
    assert rig.engine.metrics.drafter_errors == 3
    assert rig.cache.free_tokens() == rig.cache.num_blocks * rig.cache.block_size


def test_complete_adds_the_calls_that_are_missing() -> None:
    class Minimal:
        needs = DrafterNeeds()

        def __init__(self) -> None:
            self.heard: list[Request] = []

        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            return [DraftTree.empty() for _ in requests]

        def begin(self, request: Request) -> None:
            self.heard.append(request)

    minimal = Minimal()
    rig = build_rig(TableModel(PAIR.target, V), complete(minimal), length=2, limits=LIMITS)
    rig.add((0,), GREEDY)
    rig.finish()
    assert len(minimal.heard) == 1


class Announcing(StatelessDrafter):
    def __init__(self, needs: DrafterNeeds) -> None:
        self.needs = needs

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.empty() for _ in requests]


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        (DrafterNeeds(hidden_layers=(0, 9)), "with 2 layers"),
        (DrafterNeeds(hidden_layers=(-1,)), "with 2 layers"),
    ],
)
def test_complete_refuses_impossible_needs(needs: DrafterNeeds, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        complete(Announcing(needs), num_layers=2)
    with pytest.raises(ConfigError, match="lacks `propose`"):
        complete(object())


def test_complete_refuses_caches_that_are_not_announced() -> None:
    drafter = Announcing(DrafterNeeds())
    drafter.caches = (object(),)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="own_cache"):
        complete(drafter)


def test_drafters_serve_each_request_by_its_method() -> None:
    """One engine, several drafters: a request names one, has the default, or has none."""
    asked: dict[str, set[str]] = {"one": set(), "two": set()}

    def noting(name: str) -> ScriptedDrafter:
        return ScriptedDrafter(lambda request: asked[name].add(request.request_id) or [1, 2])

    rig = build_rig(TableModel(PAIR.target, V), Drafters({"one": noting("one"), "two": noting("two")}, "one"), length=3)
    wanted = {"default": None, "other": {"method": "two", "num_speculative_tokens": 2}, "none": False}
    requests = {
        name: rig.add((0,), SamplingParams(temperature=0, max_tokens=8, speculation=speculation), name)[0]
        for name, speculation in wanted.items()
    }
    rig.finish()
    assert asked == {"one": {"default"}, "two": {"other"}}
    assert len({tuple(request.output) for request in requests.values()}) == 1
    assert requests["none"].metrics.speculative_decoding.num_draft_tokens == 0
    assert max(requests["other"].metrics.speculative_decoding.acceptance_histogram) >= 0


def test_drafters_unknown_method_is_refused() -> None:
    def make(method: str) -> Any:
        raise ConfigError(f"there is no {method}", "use another.")

    rig = build_rig(TableModel(PAIR.target, V), Drafters({}, None, make), length=3)
    with pytest.raises(ConfigError, match="there is no magic"):
        rig.add((0,), SamplingParams(speculation={"method": "magic"}))
    assert not rig.engine.has_unfinished()


class Halves(StatelessDrafter):
    """Answers with a fraction of a position."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain([1][:limit]) for limit in limits]

    def match_prefix(self, request: Request) -> int:
        answer: Any = len(request.tokens) / 2
        return answer  # type: ignore[no-any-return]


def test_drafters_prefix_of_another_type_fails_no_request() -> None:
    finished(rig := build_rig(TableModel(PAIR.target, V), Halves(), length=2, limits=LIMITS))
    assert rig.engine.metrics.drafter_errors == 3


def test_drafters_panic_fails_no_request() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def propose(request: Request) -> list[int]:
        raise panic

    finished(rig := build_rig(TableModel(PAIR.target, V), ScriptedDrafter(propose), length=2, limits=LIMITS))
    assert rig.engine.metrics.drafter_errors > 0


def test_drafters_failing_catch_up_restarts_one_sequence() -> None:
    class Slow(ScriptedDrafter):
        def __init__(self) -> None:
            super().__init__(lambda request: [1])
            self.begun: list[int] = []

        def begin(self, request: Request) -> None:
            self.begun.append(request.prompt[0])

        def catch_up(self, requests: Sequence[Request]) -> None:
            if any(request.prompt[0] == 3 for request in requests):
                raise RuntimeError("no")

    drafter = Slow()
    rig = build_rig(TableModel(PAIR.target, V), drafter, limits=LIMITS, draft_length=KeepsUp())
    finished(rig)
    assert drafter.begun.count(3) > 1
    assert drafter.begun.count(0) == drafter.begun.count(1) == 1


class KeepsUp(Fixed):
    """Drafts nothing and keeps drafters up."""

    keeps_up = True

    def __init__(self) -> None:
        super().__init__(0)


class Rests(Fixed):
    """Drafts in every seventh step, and rests in the others."""

    def __init__(self) -> None:
        super().__init__(1)
        self._chosen = 0

    def choose(self, schedule: Schedule) -> list[int]:
        self._chosen += 1
        return [self._chosen % 2] * len(schedule.items)

    def pause(self) -> int:
        return 5


class Listener(StatelessDrafter):
    """Keeps the rows that it observes, by sequence."""

    def __init__(self, top_k: int = 0) -> None:
        self.needs = DrafterNeeds(reads=DrafterReads(top_k=top_k))
        self.seen, self.calls = dict[int, list[int]](), 0

    def begin(self, request: Request) -> None:
        self.seen[request.seq_id] = []

    def observe(self, request: Request, rows: CommittedRows) -> None:
        seen, end = self.seen[request.seq_id], rows.start + len(rows.tokens)
        assert len(seen) == rows.start, "rows are missing, or came twice"
        assert list(rows.tokens) == request.tokens[rows.start : end]
        assert list(rows.gained) == request.tokens[len(request.tokens) - len(rows.gained) :]
        seen += rows.tokens
        self.calls += 1

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain([1] * limit) for limit in limits]


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("top_k", [0, 2])
def test_drafters_that_listen_observe_every_step_of_a_rest(top_k: int, aborts: bool) -> None:
    drafter = Listener(top_k)
    rig = build_rig(TableModel(PAIR.target, V), drafter, limits=LIMITS, draft_length=Rests())
    requests = [*rig.add((0, 1), SamplingParams(temperature=0, max_tokens=25), "a")]
    requests += rig.add((2, 3, 1), SamplingParams(temperature=1, seed=1, max_tokens=20), "b")
    for _ in range(11):
        rig.step()
    if aborts:
        rig.engine.abort("a")
    rig.finish()
    assert rig.engine.metrics.drafter_errors == 0
    assert [drafter.seen[each.seq_id] for each in requests] == [each.tokens[:-1] for each in requests]


def test_drafters_without_observe_are_not_called_in_a_rest() -> None:
    class Reader(StatelessDrafter):
        calls = 0

        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            self.calls += 1
            return [DraftTree.empty()] * len(requests)

    drafter, steps = Reader(), 0
    rig = build_rig(TableModel(PAIR.target, V), drafter, limits=LIMITS, draft_length=Rests())
    rig.add((0, 1), SamplingParams(temperature=0, max_tokens=25), "a")
    while rig.engine.has_unfinished():
        rig.step()
        steps += 1
    assert not drafter.listens
    assert 0 < drafter.calls <= steps / 7 + 1


def test_drafters_beam_draft_without_a_limit_is_not_run() -> None:
    class Live(StatelessDrafter):
        needs = DrafterNeeds(nodes_per_beam=1)

        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            return [each.search.beams.live_tree if each.search else DraftTree.empty() for each in requests]

    search, texts = SamplingParams(temperature=0, max_tokens=10, beam_width=3, n=3), []
    small = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=6)
    for drafter in (None, Live()):
        rig = build_rig(TableModel(PAIR.target, V), drafter, length=3, limits=small, cache=few_blocks(12, False))
        found = rig.add((0, 1, 2, 3, 1, 2, 1), search, "search")
        for index in range(3):
            rig.add((index, 1), SamplingParams(temperature=0, max_tokens=20), f"other {index}", priority=-1)
        rig.finish()
        texts.append([request.output for request in found])
    assert texts[0] == texts[1]


def test_drafters_beam_draft_is_not_cut_by_its_scores() -> None:
    class Scored(StatelessDrafter):
        needs = DrafterNeeds(nodes_per_beam=1)

        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            return [self._draft(each) for each in requests]

        def _draft(self, request: Request) -> DraftTree:
            live = request.search.beams.live_tree if request.search else DraftTree.empty()
            return DraftTree.of(live.token_list, live.parent_list, scores=[0.0] * live.size)

    class CutsShort(Fixed):
        def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
            return [1] * len(drafts)

    texts = []
    for drafter in (None, Scored()):
        rig = build_rig(TableModel(PAIR.target, V), drafter, limits=LIMITS, draft_length=CutsShort(2))
        found = rig.add((0, 1), SamplingParams(temperature=0, max_tokens=8, beam_width=3, n=3), "search")
        rig.finish()
        texts.append([request.output for request in found])
    assert texts[0] == texts[1]
