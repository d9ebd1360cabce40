"""Requests are drawn as asked, or read from a trace."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from speculant.errors import ConfigError
from speculant.lab.fleet import Arrival, TrafficConfig, arrivals, read_trace


def test_means_and_variations_are_those_asked_for() -> None:
    config = TrafficConfig(5, 20_000, 300, 0.5, 100, 1.0, prefixes=10, prefix_tokens=200, zipf=1.0)
    found = arrivals(config, "")
    assert found[-1].seconds == pytest.approx(4000, rel=0.03)
    assert sum(each.prompt - 200 for each in found) / len(found) == pytest.approx(100, rel=0.02)
    answers = [each.answer for each in found]
    mean = sum(answers) / len(found)
    assert mean == pytest.approx(100, rel=0.03)
    assert (sum((each - mean) ** 2 for each in answers) / len(found)) ** 0.5 == pytest.approx(100, rel=0.1)
    drawn = Counter(each.prefix for each in found)
    assert drawn[0] / drawn[4] == pytest.approx(5, rel=0.15)


def test_a_surge_changes_the_rate() -> None:
    found = arrivals(TrafficConfig(5, 5000, surge_at=200, surge_rate=50), "")
    before = sum(each.seconds < 200 for each in found)
    assert before == pytest.approx(1000, rel=0.1)
    assert (len(found) - before) / (found[-1].seconds - 200) == pytest.approx(50, rel=0.06)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"seconds": 2, "prompt_tokens": 30, "answer_tokens": 4}\n\n'
        '{"seconds": 0.5, "prompt_tokens": 300, "prefix": "a", "prefix_tokens": 256, "answer_tokens": 64}\n'
    )
    assert read_trace(path) == [Arrival(0.5, 300, 64, "a", 256), Arrival(2.0, 30, 4)]


@pytest.mark.parametrize(
    "line", ["", "[]", "{", '{"seconds": 1}', '{"seconds": -1, "prompt_tokens": 1, "answer_tokens": 1}',
             '{"seconds": 1, "prompt_tokens": 1, "answer_tokens": 1, "user": 3}']
)  # fmt: skip
def test_other_lines_are_errors(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        read_trace(path)
