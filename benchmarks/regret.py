"""A draft-length policy on more than a hundred simulated machines, beside plain decoding and the best fixed choice.

The machines are those of tests/unit/lengths/groups.py; times are simulated, so that every run gives the same figures.
`over_plain` is the policy's speed over that of plain decoding after the first 64 tokens of each sequence. `regret` is
1 - its speed over that of the best fixed choice for the same tokens, after its first 200 steps. A choice is a length
from 0 to 16; with lookups it has their longest length and least score too, and where chains end by their scores, the
chance below which they do. A policy that follows the text can be faster; its regret is then negative. The same figures
for the whole run come after them. Each figure is the median of a group, and its worst machine's. The goals are those of
groups.py.

With --ablate, each constant of the adaptive policy is halved and doubled, alone, on every third machine: how many
reach the goals, their mean and highest regret, and the lowest speed over plain decoding. A memory is a weight that is
left to earlier tests, so that its distance to 1 is halved and doubled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1]))  # for `tests`, however the script is started

from speculant import plugins
from speculant.lab.bench import Benchmark, markdown
from speculant.lengths import adaptive, costs
from tests.unit.lengths.groups import PolicyScore, by_group, judge, make_machines
from tests.unit.lengths.machines import Machine

FIGURES = ("over_plain", "regret", "whole_over_plain", "whole_regret")


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Judge the policy on the machines of the named groups."""
    if arguments.ablate:
        yield from ablate(arguments.every)
        return
    build = plugins.load("speculant.lengths", arguments.policy).build
    machines = make_machines()
    groups = {machine.group for machine in machines}
    if unknown := set(arguments.groups) - groups:
        raise SystemExit(f"no groups: {', '.join(sorted(unknown))}; there are: {', '.join(sorted(groups))}")
    chosen = [each for each in machines if not arguments.groups or each.group in arguments.groups]
    scores = [judge(machine, build) for machine in chosen]
    yield {"policy": arguments.policy, "groups": by_group(scores), "machines": [figures(score) for score in scores]}


CONSTANTS = {
    adaptive: (
        *("PROBE", "PLAIN_STEPS", "HOLDS", "RESTS", "LOOKUP_MEMORY", "BUDGET"),
        *("PRIOR", "PRIOR_TESTS", "DEPTH_PRIOR_TESTS", "METHOD_MEMORY", "SEQUENCE_MEMORY", "SEQUENCE_PRIOR_TESTS"),
        *("SCORE_PRIOR_TESTS", "BUCKETS"),
    ),
    costs: ("DRIFT", "OUTLIER", "LEARNT", "COMPARED", "NEAR", "ROW_SHARE", "LEAST_BACKLOG"),
}
DISTANCES = ("METHOD_MEMORY", "SEQUENCE_MEMORY")  # constants that are a little below 1


def ablate(every: int) -> Iterator[dict[str, Any]]:
    """Judge the policy with each constant halved and doubled."""
    machines = make_machines()[::every]
    found = {"as it is": summary(machines)}
    for module, names in CONSTANTS.items():
        for name in names:
            value = vars(module)[name]
            for factor in (0.5, 2):
                changed = 1 - (1 - value) * factor if name in DISTANCES else type(value)(value * factor)
                if changed != value and changed:
                    with ExitStack() as stack:
                        for user in CONSTANTS:  # a module may import it
                            if name in vars(user):
                                stack.enter_context(patch.object(user, name, changed))
                        found[f"{name} {changed:g} instead of {value:g}"] = summary(machines)
            yield {"ablated": found}


def summary(machines: Sequence[Machine]) -> dict[str, float]:
    """Return the policy's figures over some machines."""
    scores = [judge(machine, adaptive.build) for machine in machines]
    return {
        "machines": len(scores),
        "reaching_goals": sum(score.reaches_goals for score in scores),
        "mean_regret": mean(score.regret for score in scores),
        "worst_regret": max(score.regret for score in scores),
        "worst_over_plain": min(score.over_plain for score in scores),
    }


def figures(score: PolicyScore) -> dict[str, Any]:
    """Return a machine's figures."""
    own = {name: value for name, value in vars(score).items() if name != "machine"}
    return {"group": score.machine.group, "name": score.machine.name, "reaches_goals": score.reaches_goals, **own}


def show(found: Mapping[str, Any]) -> str:
    """Return the table of groups, and the machine of the lowest speed and of the highest regret in each."""
    if "ablated" in found:
        names = ("reaching_goals", "mean_regret", "worst_regret", "worst_over_plain")
        table = [[name, *(f"{own[each]:.4g}" for each in names)] for name, own in found["ablated"].items()]
        return markdown(["constant", *(name.replace("_", " ") for name in names)], table)
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
    measure=measure, show=show,
    options={
        "policy": "adaptive", "groups": {"nargs": "+", "default": []}, "ablate": {"action": "store_true"}, "every": 3,
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
