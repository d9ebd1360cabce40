"""benchmarks/results/theory.md has the figures that its script computes, and those of the kept measurement."""

from __future__ import annotations

import json
import re

import pytest
from benchmarks.theory import DRAFTS, FIGURES, MEASURED, PAGE, RESULTS, TABLES, beside, render


def test_tables_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render(page, json.loads(RESULTS.read_text(encoding="utf-8"))["seen"]) == page, "run benchmarks/theory.py"
    assert len(re.findall("<!-- table:", page)) == len(TABLES) + len(MEASURED)


@pytest.mark.slow
def test_changed_figure_is_noticed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    seen = json.loads(RESULTS.read_text(encoding="utf-8"))["seen"]
    assert render(page.replace("| 1.53 |", "| 1.54 |"), seen) == page
    with pytest.raises(AssertionError, match="no place"):
        render(page.replace("<!-- table: 4 -->", ""), seen)


def test_differing_figures_are_bold() -> None:
    assert beside(1.234, 1.23, 2) == ["1.23", "1.23"]
    assert beside(1.236, 1.23, 2) == ["1.23", "**1.24**"]


def test_figures_of_the_page_exist() -> None:
    named = re.findall(r"\]\(\S+/figures/(\S+\.svg)\)", PAGE.read_text(encoding="utf-8"))
    assert len(named) == 4
    assert all("<svg" in (FIGURES / name).read_text(encoding="utf-8") for name in named)


def test_kept_measurement_agrees_with_itself() -> None:
    """Both estimates of alpha agree within their intervals, and 1 - alpha is the mean divergence."""
    seen = json.loads(RESULTS.read_text(encoding="utf-8"))["seen"]
    assert set(seen["alpha"]) == {"0", "0.5", "1"}
    for found in seen["alpha"].values():
        overlap, accepted = found["overlap"], found["accepted"]
        assert max(overlap["low"], accepted["low"]) <= min(overlap["high"], accepted["high"])
        assert overlap["tokens"] >= 10_000
    for drafts in seen["drafts"].values():
        assert set(drafts) == set(DRAFTS)
        for each in drafts.values():
            assert each["alpha"]["mean"] == pytest.approx(1 - each["divergence"], abs=1e-9)
            assert each["rejection_sampling"] <= each["alpha"]["mean"] + 1e-9
