"""A draft-length policy on a hundred simulated machines, beside plain decoding and the best fixed choice.

The machines are those of tests/unit/lengths/groups.py; times are simulated, so that every run gives the same figures.
`over_plain` is the policy's speed over that of plain decoding after the first 64 tokens of each sequence. `regret` is
1 - its speed over that of the best fixed choice after its first 200 steps: a length from 0 to 16, and with lookups the
longest one and its least score too, which are best for the same tokens. A policy that follows the text can be faster;
its regret is then negative. The same
figures for the whole run come after them. Each figure is the median of a group, and its worst machine's. The goals are
those of groups.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `tests`, however the script is started

from speculant import plugins
from speculant.lab.bench.runner import Benchmark, markdown
from tests.unit.lengths.groups import PolicyScore, by_group, judge, make_machines

FIGURES = ("over_plain", "regret", "whole_over_plain", "whole_regret")


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Judge the policy on the machines of the named groups."""
    build = plugins.load("speculant.lengths", arguments.policy).build
    machines = make_machines()
    groups = {machine.group for machine in machines}
    if unknown := set(arguments.groups) - groups:
        raise SystemExit(f"no groups: {', '.join(sorted(unknown))}; there are: {', '.join(sorted(groups))}")
    chosen = [each for each in machines if not arguments.groups or each.group in arguments.groups]
    scores = [judge(machine, build) for machine in chosen]
    yield {"policy": arguments.policy, "groups": by_group(scores), "machines": [figures(score) for score in scores]}


def figures(score: PolicyScore) -> dict[str, Any]:
    """Return a machine's figures."""
    own = {name: value for name, value in vars(score).items() if name != "machine"}
    return {"group": score.machine.group, "name": score.machine.name, "reaches_goals": score.reaches_goals, **own}


def show(found: Mapping[str, Any]) -> str:
    """Return the table of groups, and the machine of the lowest speed and of the highest regret in each."""
    rows = []
    for group, own in found["groups"].items():
        machines = [machine for machine in found["machines"] if machine["group"] == group]
        slowest, worst = (
            min(machines, key=lambda each: each["over_plain"]),
            max(machines, key=lambda each: each["regret"]),
        )
        pairs = [f"{own[name]:.3f}, {own[f'worst_{name}']:.3f}" for name in FIGURES]
        rows.append([group, f"{own['reaching_goals']} of {own['machines']}", *pairs, slowest["name"], worst["name"]])
    header = ["group", "reach the goals", *(name.replace("_", " ") for name in FIGURES), "slowest", "highest regret"]
    return markdown(header, rows)


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Over plain at least 0.97 on every machine; regret at most 0.03, and 0.05 where costs or texts change.",
    measure=measure, options={"policy": "adaptive", "groups": {"nargs": "+", "default": []}}, show=show,
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
