"""The comparison as values for JSON, and as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peers.base import DEFAULT, plain_value
from benchmarks.peers.compare import CaseResult, Entry, Run

from speculant.lab.bench.scripts import markdown, quartiles

MOST_SPREAD = 1.5  # largest over smallest round; for rounds that differ more, no median is printed
FIGURES: Mapping[str, Callable[[Run, int], float]] = {
    "first_s": lambda run, tokens: run.measured.first_s,
    "tokens_per_s": lambda run, tokens: run.measured.tokens_per_s,
    "seconds": lambda run, tokens: run.measured.seconds(tokens),
    "read_gb_per_s": lambda run, tokens: run.read_gb_per_s,
}
HEADER = (
    *("prompt", "at once", "precision", "engine", "drafts", "first token, s", "tokens/s", "whole, s", "tokens a pass"),
    *("accepted", "threads", "memory, GB/s", "same text", "Speculant's speed over it", "of the whole"),
)
BEST_HEADER = ("prompt", "at once", "precision", "engine", "its best", "Speculant's best", "tokens/s", "of the whole")


def case_value(result: CaseResult, own: str, tokens: int, threads: int) -> dict[str, Any]:
    """Return a case for JSON. own: the peer that others are compared with. tokens: new ones for each prompt.

    Ratios are of speeds, `own` over the peer, taken in each round: above 1 `own` is faster. `equal`: same mode, same
    precision, same draft length. `best`: of each peer the mode and format with the least time for the whole.
    """
    texts = _reference(result, own)
    wanted = tokens * result.case.batch
    rows = [
        {
            **asdict(entry),
            "threads": threads,
            **_figures(runs, wanted, texts),
            "equal": _equal(result, own, entry, wanted),
        }
        for entry, runs in result.runs.items()
    ]
    return {**asdict(result.case), "rows": rows, "best": list(_bests(result, own, wanted)), "notes": list(result.notes)}


def _figures(runs: Sequence[Run], wanted: int, texts: Sequence[Sequence[str]] | None) -> dict[str, Any]:
    measured = [run.measured for run in runs]
    figures = {name: _quartiles([of(run, wanted) for run in runs]) for name, of in FIGURES.items()}
    drafted = None if any(each.drafted is None for each in measured) else sum(each.drafted or 0 for each in measured)
    accepted = sum(each.accepted for each in measured)
    return {
        **figures,
        "tokens_per_pass": sum(each.tokens for each in measured) / sum(each.passes for each in measured),
        "acceptance": accepted / drafted if drafted else None,
        "same_text": None if texts is None else _same(runs, texts),
        "rounds": [plain_value(each) for each in measured],
    }


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quartiles of the rounds, and the smallest and the largest."""
    return {**quartiles(values), "low": min(values), "high": max(values)}


def _reference(result: CaseResult, own: str) -> Sequence[Sequence[str]] | None:
    """Return the texts of the first entry of the peer that others are compared with, by round."""
    runs = next((runs for entry, runs in result.runs.items() if entry.peer == own), [])
    texts = [run.texts for run in runs if run.texts is not None]
    return texts or None


def _same(runs: Sequence[Run], texts: Sequence[Sequence[str]]) -> float | None:
    """Return the mean share of characters before the first difference of the texts."""
    if any(run.texts is None for run in runs):
        return None
    pairs = [
        pair
        for run, reference in zip(runs, texts, strict=True)
        for pair in zip(run.texts or (), reference, strict=True)
    ]
    return statistics.mean(_same_start(*pair) / max(1, len(pair[1])) for pair in pairs)


def _same_start(text: str, other: str) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(text), len(other)))


def _equal(result: CaseResult, own: str, entry: Entry, wanted: int) -> dict[str, Any] | None:
    """Compare an entry with the same mode of the other peer; defaults of two peers are not equal settings."""
    if entry.peer == own or entry.mode == DEFAULT:
        return None
    other = next((each for each in result.runs if each.peer == own and each.mode == entry.mode), None)
    return None if other is None else _ratios(result.runs[other], result.runs[entry], wanted)


def _ratios(own: Sequence[Run], other: Sequence[Run], wanted: int) -> dict[str, Any]:
    """Return the quartiles of two ratios, round by round: tokens per second, and speed of the whole."""
    pairs = [(a.measured, b.measured) for a, b in zip(own, other, strict=True)]
    return {
        "tokens_per_s": _quartiles([a.tokens_per_s / b.tokens_per_s for a, b in pairs]),
        "whole": _quartiles([b.seconds(wanted) / a.seconds(wanted) for a, b in pairs]),
    }


def _bests(result: CaseResult, own: str, wanted: int) -> Iterator[dict[str, Any]]:
    bests = {
        peer: min(
            (entry for entry in result.runs if entry.peer == peer),
            key=lambda entry: statistics.median(run.measured.seconds(wanted) for run in result.runs[entry]),
        )
        for peer in dict.fromkeys(entry.peer for entry in result.runs)
    }
    for peer, entry in bests.items():
        if peer != own and own in bests:
            ratios = _ratios(result.runs[bests[own]], result.runs[entry], wanted)
            yield {**asdict(entry), "own_mode": bests[own].mode, **ratios}


def tables(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all cases and the one of each peer's best, in Markdown.

    A figure is the median with the quartiles in brackets, see `_spread`.
    """
    rows = [_line(case, row) for case in cases for row in case["rows"]]
    bests = [_best_line(case, best) for case in cases for best in case["best"]]
    table = markdown(HEADER, rows)
    if bests:
        table += f"\n\nEach at its best, Speculant's speed over the other's:\n\n{markdown(BEST_HEADER, bests)}"
    return table


def _line(case: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    return [
        *_place(case),
        f"{row['peer']}, {row['format']}",
        row["mode"],
        _spread(row["first_s"]),
        _spread(row["tokens_per_s"]),
        _spread(row["seconds"]),
        f"{row['tokens_per_pass']:.2f}",
        _share(row["acceptance"]),
        str(row["threads"]),
        f"{row['read_gb_per_s']['median']:.1f}",
        _share(row["same_text"]),
        *(_spread(row["equal"][name]) if row["equal"] else "" for name in ("tokens_per_s", "whole")),
    ]


def _best_line(case: Mapping[str, Any], best: Mapping[str, Any]) -> list[str]:
    name = f"{best['mode']}, {best['format']}"
    return [*_place(case), best["peer"], name, best["own_mode"], _spread(best["tokens_per_s"]), _spread(best["whole"])]


def _place(case: Mapping[str, Any]) -> list[str]:
    return [f"{case['prompt_tokens']:,}", str(case["batch"]), case["precision"]]


def _spread(value: Mapping[str, float]) -> str:
    """Return the median with the quartiles; for rounds that differ by more than MOST_SPREAD, the extremes."""
    if value["high"] > MOST_SPREAD * value["low"]:
        return f"unsteady: {_number(value['low'])} to {_number(value['high'])}"
    return f"{_number(value['median'])} ({_number(value['q1'])} to {_number(value['q3'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
