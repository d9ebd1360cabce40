"""Figures by the kind of task, where the prompts' file names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from speculant.lab.bench.acceptance import pooled
from speculant.lab.bench.measuring import Case, Spread, base_of, ratios
from speculant.lab.bench.runs import Run

GAP, PER_PASS = "itl_mean_s", "tokens_per_pass"  # figures of a run


def by_category(case: Case) -> dict[str, dict[str, Any]]:
    """Return figures by category; {} if the prompts have none.

    modes: by name the mean acceptance rate with its interval (of the first round), the tokens per pass and, over plain
    decoding, the speed between tokens. A figure that a category does not define is missing.
    """
    names = case.workload.categories
    return {
        name: _figures(case, [place for place, each in enumerate(names) if each == name])
        for name in dict.fromkeys(names)
    }


def _figures(case: Case, prompts: Sequence[int]) -> dict[str, Any]:
    samples = case.params.n
    places = [samples * prompt + sample for prompt in prompts for sample in range(samples)]
    parts = {mode: [_part(run, places) for run in runs] for mode, runs in case.runs.items()}
    return {"prompts": len(prompts), "modes": {mode: _mode(parts, mode) for mode in parts}}


def _part(run: Run, places: Sequence[int]) -> Run:
    """Return what a run tells of some of its outputs; its totals are still those of all."""
    return replace(
        run,
        outputs=[run.outputs[place] for place in places],
        timings=[run.timings[place] for place in places],
        by_request=[run.by_request[place] for place in places],
    )


def _mode(parts: Mapping[str, Sequence[Run]], mode: str) -> dict[str, Any]:
    own, base = ([run.figures() for run in parts[each]] for each in (mode, base_of(mode)))
    accepted = pooled(parts[mode][0].by_request)
    figures: dict[str, Any] = {"acceptance_rate": asdict(accepted) if accepted else None}
    if all(PER_PASS in each for each in own):
        figures[PER_PASS] = asdict(Spread.of([each[PER_PASS] for each in own]))
    if mode != base_of(mode) and (speed := ratios(base, own).get(GAP)):
        figures["speed"] = asdict(speed)
    return figures
