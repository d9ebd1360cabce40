"""The capacity, the loads that are multiples of it, and the report."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from speculant.errors import ConfigError, ServerError
from speculant.lab.bench import (
    Exchange,
    Level,
    Load,
    LoadPlan,
    LoadRun,
    conclusions,
    measure_serving,
    serving_document,
    tables,
)
from speculant.metrics import TimingMetrics
from tests.unit.lab.bench.test_report import text_of

MODES = {"plain": {"speculation": False}, "speculative": {"x": 1}}


def _exchange(number: int, sent: float, seconds: float, **rest: Any) -> Exchange:
    timing = TimingMetrics(sent)
    timing.record_tokens(sent + seconds / 2, 1)
    timing.record_tokens(sent + seconds, 1)
    values = {"status": 200, "problem": None, "tokens": 2, "text": f"text {number}", **rest}
    return Exchange(number, timing, sent, sent + seconds, **values)


class ScriptedLoad:
    """A server that answers in half a second, and in a quarter with drafts. calls: the loops that ran."""

    def __init__(self, problem: str | None = None, texts: Sequence[str] = ()) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.problem, self.texts = problem, list(texts)

    def closed_loop(self, fields: Mapping[str, Any], clients: int, seconds: float) -> LoadRun:
        self.calls.append(("closed", (dict(fields), clients, seconds)))
        each = self._seconds(fields)
        number = int(seconds / each)
        made = [_exchange(i, i * each, each, problem=self.problem) for _ in range(clients) for i in range(number)]
        return LoadRun(made, 0.0, seconds)

    def open_loop(self, fields: Mapping[str, Any], arrivals: Sequence[float]) -> LoadRun:
        self.calls.append(("open", (dict(fields), list(arrivals))))
        each = self._seconds(fields)
        made = [_exchange(i, arrival, each) for i, arrival in enumerate(arrivals)]
        if self.texts:
            made[0].text = self.texts.pop(0)
        return LoadRun(made, 0.0, arrivals[-1] + each)

    def _seconds(self, fields: Mapping[str, Any]) -> float:
        return 0.5 if "speculation" in fields else 0.25


def _measure(load: ScriptedLoad, plan: LoadPlan, modes: Mapping[str, Any] = MODES) -> dict[str, Any]:
    told: list[str] = []
    measured = measure_serving(cast(Load, load), modes, plan, told.append)
    assert len(told) == plan.num_runs(len(modes))
    return dict(json.loads(json.dumps(serving_document(measured, plan, comparable=True))))


def test_loads_are_multiples_of_the_plain_capacity() -> None:
    load = ScriptedLoad()
    value = _measure(load, LoadPlan(4, (0.5, 2.0), seconds=6.0, rounds=2))
    assert value["capacity"]["runs"]["plain"]["requests_per_s"]["median"] == 8.0
    assert value["capacity"]["runs"]["speculative"]["requests_per_s"]["median"] == 16.0
    assert value["capacity"]["ratios"]["speculative/plain"]["tokens_per_s"]["median"] == 2.0
    assert [level["request_rate"] for level in value["loads"]] == [4.0, 16.0]
    assert [level["load"] for level in value["loads"]] == [0.5, 2.0]
    for level in value["loads"]:
        assert level["ratios"]["speculative/plain"]["e2e_p50_s"]["median"] == pytest.approx(0.5)
        assert level["runs"]["plain"]["refused"]["median"] == 0
    closed = [call for kind, call in load.calls if kind == "closed"]
    assert closed[:2] == [(MODES["plain"], 4, 1.0), (MODES["speculative"], 4, 1.0)], "warm-up"
    assert closed[2:] == [(MODES[mode], 4, 6.0) for mode in ("plain", "speculative", "speculative", "plain")]


def test_modes_get_the_same_arrivals_in_turn() -> None:
    load = ScriptedLoad()
    _measure(load, LoadPlan(2, (0.5, 1.0), seconds=30.0, rounds=2))
    calls = [call for kind, call in load.calls if kind == "open"]
    first, second = calls[:4], calls[:3:-1]  # the second round runs backwards
    for calls in (first, second):
        assert [fields for fields, _ in calls] == [MODES["plain"], MODES["speculative"]] * 2
        arrivals = [times for _, times in calls]
        assert arrivals[0] == arrivals[1] != arrivals[2] == arrivals[3]
    assert first[0][1] != second[0][1], "each round draws anew"


def test_arrivals_are_a_poisson_process() -> None:
    plan = LoadPlan(1, seconds=2000.0)
    times = plan.arrivals(5.0, 1.0, 0)
    assert times == plan.arrivals(5.0, 1.0, 0)
    assert times != LoadPlan(1, seconds=2000.0, seed=1).arrivals(5.0, 1.0, 0)
    assert times[0] == 0.0
    assert times[-1] < 2000.0
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(gaps) == pytest.approx(10_000, rel=0.04)  # four standard deviations
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.04)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.06)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)  # exp(-1)
    counts = [sum(second <= time < second + 1 for time in times[:2000]) for second in range(300)]
    assert statistics.variance(counts) / statistics.mean(counts) == pytest.approx(1.0, abs=0.35)


def test_rates_are_lower_at_lower_loads() -> None:
    plan = LoadPlan(1, seconds=50.0)
    assert len(plan.arrivals(1.0, 0.5, 0)) < len(plan.arrivals(4.0, 2.0, 0))
    assert plan.arrivals(1e-9, 0.5, 0) == [0.0], "there is always one"


def test_texts_are_compared_if_both_modes_answered() -> None:
    runs = {
        "plain": [LoadRun([_exchange(0, 0.0, 1.0), _exchange(1, 0.0, 1.0), _exchange(2, 0.0, 1.0)], 0.0, 1.0)],
        "speculative": [
            LoadRun(
                [_exchange(0, 0.0, 1.0), _exchange(1, 0.0, 1.0, text="other"), _exchange(2, 0.0, 1.0, problem="dead")],
                0.0,
                1.0,
            )
        ],
    }
    assert Level(1.0, 3.0, runs).identical() == (2, 1)


def test_the_report_has_all_measurements() -> None:
    value = _measure(ScriptedLoad(texts=["other"]), LoadPlan(4, (1.0,), seconds=5.0, rounds=1))
    [level] = value["loads"]
    shown = text_of([*tables("serve", value["capacity"]), *tables("serve", level)])
    assert shown.count("refused (429)") == shown.count("first token p50 (ms)") == shown.count("ratio") == 2
    lines = list(conclusions(level))
    assert "times the tokens/s of plain" in lines[0]
    total = level["outputs"]["outputs"]
    assert level["outputs"]["identical"] == {"speculative": total - 1}
    assert f"{total - 1} of {total};" in lines[1]
    assert value["notes"] == []


def test_one_mode_alone_has_no_comparison() -> None:
    value = _measure(ScriptedLoad(), LoadPlan(4, (1.0,), rounds=1), {"plain": {}})
    assert value["loads"][0]["ratios"] == {}
    assert value["loads"][0]["outputs"]["compared"] is False
    assert list(conclusions(value["loads"][0])) == []


def test_failures_and_late_requests_are_noted() -> None:
    late = _exchange(0, 0.0, 1.0)
    late.sent = 0.2
    dead = [_exchange(1, 0.0, 1.0, problem="dead"), _exchange(2, 0.0, 1.0, problem="dead")]

    class Failing(ScriptedLoad):
        def open_loop(self, fields: Mapping[str, Any], arrivals: Sequence[float]) -> LoadRun:
            return LoadRun([late, *dead], 0.0, 1.0)

    notes = _measure(Failing(), LoadPlan(1, (1.0,), rounds=1))["notes"]
    assert notes[0] == "4 requests failed: dead"
    assert "200 ms late" in notes[1]


def test_a_server_without_answers_is_an_error() -> None:
    with pytest.raises(ServerError, match="the prompt is too long"):
        _measure(ScriptedLoad(problem="the prompt is too long"), LoadPlan(1))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"clients": 0}, "clients=0"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"rounds": -1}, "rounds=-1"),
        ({"loads": (1.0, -2.0)}, "load=-2.0"),
        ({"loads": (1.0, 1.0)}, "occurs twice"),
    ],
)
def test_an_invalid_plan_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LoadPlan(**{"clients": 1, **given})
