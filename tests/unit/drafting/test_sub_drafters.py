"""Sub-drafters: their names, their combined needs, and errors of one that leave the others alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from speculant import LLM, SamplingParams, plugins
from speculant.config import Limits
from speculant.drafting import (
    CompositeDrafter,
    Drafter,
    DrafterContext,
    DrafterNeeds,
    Drafters,
    FallbackDrafter,
    Method,
    StatelessDrafter,
    SubDrafter,
    bound,
    build_sub_drafter,
    build_sub_drafters,
    combine,
    methods,
)
from speculant.errors import ConfigError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.metrics import EngineMetrics
from speculant.types import CommittedRows, DraftTree, Request
from tests.fakes import Rig, ScriptedDrafter, build_rig, drafter_context
from tests.models import Checkpoints, make_request

V = 6
PAIR = Pair(3, V, FULL_SUPPORT)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
LIMITS = Limits(max_model_len=32, max_num_seqs=3, max_num_batched_tokens=48)


def context(model: str | None = None) -> DrafterContext:
    return drafter_context(V, model=model)


def sub_drafter(drafter: Drafter, usual: int = 4, method: str = "scripted") -> SubDrafter:
    return SubDrafter(method, drafter, usual)


def announcing(**needs: Any) -> SubDrafter:
    return sub_drafter(ScriptedDrafter(lambda request: [1, 2], DrafterNeeds(**needs)))


def test_sub_drafters_are_named_or_mapped_with_their_options() -> None:
    built = build_sub_drafters(context(), ["ngram", {"method": "ngram", "max_order": 2, "min_order": 2}])
    assert [each.method for each in built] == ["ngram", "ngram"]
    readers = [each.drafter._make(make_request([1])) for each in built]  # type: ignore[attr-defined]
    assert [reader._longest for reader in readers] == [3, 1]
    assert [each.usual_nodes for each in built] == [4, 4]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("ngram", "is not a list"),
        ([], "is not a list"),
        ({"method": "ngram"}, "is not a list"),
        ([3], "is not a drafting method"),
        ([{"max_order": 3}], "is not a drafting method"),
        (["ngrm"], "did you mean 'ngram'"),
        ([{"method": "ngram", "max_ordr": 3}], "did you mean 'max_order'"),
        ([{"method": "ngram", "model": "demo"}], "unknown speculative_config key 'model'"),
        (["draft_model"], "drafts with a model and none is named"),
    ],
)
def test_sub_drafters_that_can_not_be_built_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_sub_drafters(context(), given)


def test_sub_drafters_must_use_a_model_that_is_named() -> None:
    with pytest.raises(ConfigError, match="none of the listed methods"):
        build_sub_drafters(context("demo"), ["ngram"])


def usual(installed: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], list[str]]:
    """Return the methods that are built by default where these are installed, by the model that is named."""
    built = ScriptedDrafter(lambda request: [])

    class Plugin:
        def __init__(self, name: str) -> None:
            self.METHOD, self.build = Method(4, uses_model=name == methods.WITH_MODEL), lambda given: built

    monkeypatch.setattr(plugins, "names", lambda kind: list(installed))
    monkeypatch.setattr(plugins, "load", lambda kind, name: Plugin(name))
    return lambda model: [each.method for each in build_sub_drafters(context(model), None)]


def test_usual_sub_drafters_are_the_lookups_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    by_model = usual(["another", "draft_model", "prompt_lookup", "suffix"], monkeypatch)
    assert by_model(None) == ["suffix", "prompt_lookup"]
    assert by_model("a model") == ["suffix", "prompt_lookup", "draft_model"]
    assert build_sub_drafter(context(), None).method == "suffix"


def test_usual_sub_drafters_leave_out_missing_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usual(["another", "prompt_lookup", "draft_model"], monkeypatch)("a model") == [
        "prompt_lookup",
        "draft_model",
    ]
    with pytest.raises(ConfigError, match="no installed drafting method"):
        usual(["another"], monkeypatch)(None)


def test_combined_needs_are_enough_for_every_sub_drafter() -> None:
    needs = combine(
        [
            announcing(max_nodes=3, hidden_layers=(2, 0), max_positions=20),
            announcing(
                max_nodes=7,
                hidden_layers=(1, 2),
                max_positions=30,
                emits_tree=True,
                nodes_per_beam=2,
            ),
            announcing(max_nodes=5, max_positions=10, emits_probs=True, own_cache=True),
        ]
    )
    assert needs == DrafterNeeds(
        max_nodes=7, emits_probs=True, emits_tree=True, usual_nodes=4, own_cache=True,
        hidden_layers=(0, 1, 2), max_positions=30, nodes_per_beam=2,
    )  # fmt: skip
    unbounded = combine([announcing(max_nodes=3, max_positions=9), announcing()])
    assert (unbounded.max_nodes, unbounded.max_positions, unbounded.nodes_per_beam) == (None, None, None)


@pytest.mark.parametrize(
    ("needs", "limit", "expected"),
    [
        (DrafterNeeds(), 9, 9),
        (DrafterNeeds(max_nodes=3), 9, 3),
        (DrafterNeeds(max_positions=15), 9, 4),
        (DrafterNeeds(max_positions=11), 9, 0),
        (DrafterNeeds(max_positions=5), 9, 0),
        (DrafterNeeds(max_nodes=3, max_positions=15), 2, 2),
    ],
)
def test_sub_drafters_propose_within_their_own_bounds(needs: DrafterNeeds, limit: int, expected: int) -> None:
    assert bound(needs, make_request(range(10)), limit) == expected


class Watching(StatelessDrafter):
    """Notes the calls that it gets."""

    def __init__(self, layers: tuple[int, ...] = (), adopts: int = 99) -> None:
        self.needs = DrafterNeeds(hidden_layers=layers)
        self.calls: list[str] = []
        self.hidden: list[tuple[torch.Tensor, ...]] = []
        self._adopts = adopts

    def begin(self, request: Request) -> None:
        self.calls.append("begin")

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        self.calls.append("propose")
        return [DraftTree.empty() for _ in requests]

    def catch_up(self, requests: Sequence[Request]) -> None:
        self.calls.append("catch_up")

    def observe(self, request: Request, rows: CommittedRows) -> None:
        self.calls.append("observe")
        self.hidden.append(rows.hidden)

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        self.calls.append(f"roll back {list(dropped)}")

    def match_prefix(self, request: Request) -> int:
        return self._adopts

    def end(self, request: Request) -> None:
        self.calls.append("end")


def test_composite_passes_every_call_to_every_sub_drafter() -> None:
    one, two = Watching((1,), adopts=5), Watching((0, 2), adopts=3)
    composite, request = CompositeDrafter([sub_drafter(one), sub_drafter(two)], V), make_request(range(8))
    composite.begin(request)
    composite.catch_up([request])
    layers = tuple(torch.full((2, 1), float(layer)) for layer in composite.needs.hidden_layers)
    composite.observe(request, CommittedRows(0, [0, 1], (), layers))
    composite.roll_back(request, [4, 5])
    assert composite.match_prefix(request) == 3
    composite.end(request)
    for each in (one, two):
        assert each.calls == ["begin", "catch_up", "observe", "roll back [4, 5]", "end"]
    assert [float(states[0]) for states in one.hidden[0]] == [1.0]
    assert [float(states[0]) for states in two.hidden[0]] == [0.0, 2.0]


class Troubled(Watching):
    """Raises in one of its calls, the first `times` times."""

    def __init__(self, call: str, times: int = 99) -> None:
        super().__init__()
        self._left = times
        self._working = getattr(self, call)
        setattr(self, call, self._fail)

    def _fail(self, *arguments: Any) -> Any:
        if self._left <= 0:
            return self._working(*arguments)
        self._left -= 1
        raise RuntimeError("no luck")


def run(drafter: Drafter | None) -> tuple[Rig, list[list[int]], int]:
    rig = build_rig(TableModel(PAIR.target, V), drafter, length=3, limits=LIMITS)
    rig.drafter_may_fail = True
    requests = [rig.add(prompt, GREEDY, str(index))[0] for index, prompt in enumerate(((0,), (1, 2), (3, 3)))]
    rig.finish()
    drafted = sum(request.metrics.speculative_decoding.num_draft_tokens for request in requests)
    return rig, [request.output for request in requests], drafted


@pytest.mark.parametrize("call", ["begin", "propose", "observe", "match_prefix", "end"])
def test_sub_drafters_errors_cost_their_own_drafts_alone(call: str) -> None:
    """The other sub-drafter drafts as if it were alone; every error is counted once by the engine."""
    _, plain, _ = run(None)
    _, _, expected = run(FallbackDrafter([sub_drafter(ScriptedDrafter(lambda request: [1, 2]))], V))
    good = ScriptedDrafter(lambda request: [1, 2])
    composite = FallbackDrafter([sub_drafter(Troubled(call), method="bad"), sub_drafter(good, method="good")], V)
    rig, texts, drafted = run(composite)
    assert texts == plain
    assert drafted == expected > 0
    assert rig.engine.metrics.drafter_errors == composite.errors > 0


def test_a_sub_drafter_s_invalid_draft_is_not_passed_on() -> None:
    careless = ScriptedDrafter(lambda request: DraftTree.chain([10**6]))
    composite = FallbackDrafter([sub_drafter(careless), sub_drafter(ScriptedDrafter(lambda request: [1]))], V)
    rig, texts, drafted = run(composite)
    assert texts == run(None)[1]
    assert drafted > 0
    assert rig.engine.metrics.drafter_errors > 0


def test_a_sub_drafter_that_failed_begins_again() -> None:
    troubled = Troubled("propose", times=1)
    composite, request = FallbackDrafter([sub_drafter(troubled)], V), make_request([1, 2])
    composite.begin(request)
    for _ in range(2):
        composite.propose([request], [3])
    assert troubled.calls == ["begin", "end", "begin", "propose"]
    assert composite.errors == 1


def test_nested_errors_are_counted_once() -> None:
    inner = FallbackDrafter([sub_drafter(Troubled("propose", times=2))], V)
    outer = FallbackDrafter([sub_drafter(inner)], V)
    drafters, request = Drafters.of(outer), make_request([1, 2], method="default")
    drafters.attach(V, EngineMetrics())
    drafters.begin(request)
    for _ in range(3):
        drafters.propose([request], [3])
    assert (inner.errors, outer.errors, drafters.metrics.drafter_errors) == (2, 2, 2)


def test_roll_back_lets_a_drafter_begin_anew_by_default() -> None:
    class Counting(StatelessDrafter):
        seen = 0

        def begin(self, request: Request) -> None:
            self.seen = 0

        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            self.seen = len(requests[0].tokens)
            return [DraftTree.empty()]

    counting, request = Counting(), make_request([1, 2], [3, 4])
    counting.begin(request)
    counting.propose([request], [1])
    request.shorten(3)
    counting.roll_back(request, [4])
    assert counting.seen == 0


def test_composites_serve_requests_of_one_llm(checkpoints: Checkpoints) -> None:
    """Methods per request, with the draft model that the engine was given; a composite may be made on demand."""
    texts = ["def read(path):", "hello world " * 3, "class A:", "a = a + a + a", "x = x + x + x"]
    params = {"temperature": 0.7, "seed": 4, "max_tokens": 20}
    plain = LLM(checkpoints.target, dtype="float64").generate(texts, SamplingParams(**params))
    methods = ["cascade", "fallback", "draft_model", "merge", None]
    llm = LLM(
        checkpoints.target,
        dtype="float64",
        draft_model=checkpoints.near,
        speculative_config={"method": "draft_model", "methods": ["cascade", "fallback"], "draft_length": "fixed"},
    )
    wanted = [SamplingParams(**params, speculation={"method": name} if name else False) for name in methods]
    results = llm.generate(texts, wanted)
    assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in plain]
    drafted = [each.metrics.speculative_decoding.num_draft_tokens for each in results]
    assert all(drafted[:4])
    assert not drafted[4]
    assert llm.engine.metrics.drafter_errors == 0
    llm.engine.check()


@pytest.mark.slow  # the exactness suite has beams of every drafter that announces them
def test_fallback_drafts_for_beam_searches(checkpoints: Checkpoints) -> None:
    """Only sub-drafters that announce it draft for them; the beams are those of plain decoding."""
    params = SamplingParams(beam_width=3, n=3, max_tokens=12)
    (plain,) = LLM(checkpoints.target, dtype="float64").generate("class A:", params)
    llm = LLM(
        checkpoints.target, dtype="float64", draft_model=checkpoints.near, speculative_config={"method": "fallback"}
    )
    (result,) = llm.generate("class A:", params)
    assert [beam.token_ids for beam in result.outputs] == [beam.token_ids for beam in plain.outputs]
    assert result.metrics.speculative_decoding.num_draft_tokens > 0
    assert llm.engine.metrics.drafter_errors == 0


def test_a_model_may_be_named_for_a_composite(checkpoints: Checkpoints) -> None:
    llm = LLM(checkpoints.target, draft_model=checkpoints.near, speculative_config={"method": "fallback"})
    assert "(method fallback)" in llm.speculation
    own = {"method": "draft_model", "model": checkpoints.near}
    llm = LLM(checkpoints.target, speculative_config={"method": "fallback", "members": ["ngram", own]})
    (result,) = llm.generate("abc", SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True))
    assert result.metrics.verification == "block"
    with pytest.raises(ConfigError, match="uses no model"):
        LLM(checkpoints.target, draft_model=checkpoints.near, speculative_config={"method": "ngram"})
