"""A hundred simulated machines in groups, and a policy's score on each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from speculant.lengths import DraftLength, DraftLengthContext
from tests.unit.lengths.machines import FixedChoice, Machine, fixed_choices, fixed_run
from tests.unit.lengths.simulated import context_of, run

FIRST_TOKENS, FIRST_STEPS = 64, 200  # of each sequence that a policy may lose, and of a run that it may learn in
LEAST_OVER_PLAIN, MOST_REGRET, MOST_REGRET_IN_CHANGE = 0.97, 0.03, 0.05  # the goals of a policy on every machine
CHANGING = ("drifting costs", "switching text")
SMALL = {
    "tokens": 1500,
    "floor_s": 4e-4,
    "rests": (1.5e-4, 1e-4, 2e-5, 1.5e-5),
    "fixed": 0.3,
    "token": 0.25,
    "slope": 0.06,
}
READ = {"request": 96, "prompt": 60, "read": 0.02, "knee": 4000, "alpha": 0.75, "tokens": 1200}
EIGHT = {"sequences": 8, "tokens": 450, "spread": 0.1, "knee": 16}
MANY = {"sequences": 32, "tokens": 320, "spread": 0.1, "knee": 32, "slope": 0.02}


def of_group(group: str, settings: Iterable[dict[str, Any]], **common: Any) -> Iterator[Machine]:
    """Make a group's machines; each is named after its own settings and has its own texts."""
    for place, own in enumerate(settings):
        name = ", ".join(f"{key} {value}" for key, value in own.items())
        yield Machine(group, name, seed=place, **{**common, **own})


def grid(**values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Return all combinations of values."""
    return (dict(zip(values, each, strict=True)) for each in product(*values.values()))


def make_machines() -> list[Machine]:
    """Make all machines."""
    found = list[Machine]()
    for alpha, tokens in [(0.0, 800), (0.3, 800), (0.55, 1000), (0.75, 1500), (0.9, 2500), (0.98, 4000)]:
        found += of_group(f"alpha {alpha}", grid(token=(0.03, 0.1, 0.33)), alpha=alpha, tokens=tokens)
    stationary = [
        {"decay": 0.9, "alpha": 0.8}, {"decay": 0.8, "alpha": 0.9}, {"cliffs": ((5, 0.4),)}, {"cliffs": ((9, 0.5),)},
        {"near": 0.1}, {"knee": 2, "slope": 0.2, "near": 0.0}, {"sequences": 2}, {"sequences": 4, "spread": 0.1},
    ]  # fmt: skip
    found += of_group("stationary", stationary)
    errors = [(0.7, 1.4), (1.4, 0.7), (1.0, 1.4), (1.0, 0.7), (1.4, 1.0), (0.7, 1.0)]
    found += of_group("wrong costs", grid(errors=errors, alpha=(0.55, 0.8)), token=0.15)
    found += of_group("wrong costs, short requests", grid(errors=((1.0, 3.0), (1.0, 5.0)), token=(0.15, 0.25)), **READ)
    drifts = [(1.6, 1.0), (1.0, 2.5), (1.0, 0.4), (0.6, 1.0)]
    found += of_group("drifting costs", grid(drifts=drifts, jumps=(False, True)), token=0.15, tokens=1600)
    # 1.3: of the tokens of Qwen2.5-Coder 0.5B, 0.78 are accepted by the 1.5B, and their mean score is 0.73.
    ends = grid(alpha=(0.3, 0.55, 0.75, 0.9), token=(0.1, 0.25), modesty=(1.0, 1.3))
    found += of_group("chains that end", [*ends, {"alpha": 0.75, "modesty": 1.3, **EIGHT}], ends=True, knee=4)
    decays = grid(decay=(0.6, 0.8), alpha=(0.6, 0.9), token=(0.03, 0.1))
    found += of_group("decaying acceptance", decays, tokens=1500)
    switches = [(0.9, 0.1), (0.7, 0.4), (0.1, 0.9)]
    texts = [{"alpha": first, "other": other, "switch": length} for first, other in switches for length in (60, 200)]
    found += of_group("switching text", [*texts, {"alpha": 0.9, "other": 0.1, "switch": 750}], tokens=1500)
    found += of_group("noisy clock", grid(noise=(0.15, 0.3), alpha=(0.3, 0.55, 0.75)), token=0.15)
    found += of_group("bursts", grid(bursts=(0.1, 0.3), alpha=(0.3, 0.55, 0.75)), token=0.15)
    found += of_group("batch of 8", grid(alpha=(0.3, 0.55, 0.75, 0.9), token=(0.05, 0.2)), **EIGHT)
    found += of_group("batch of 32", grid(alpha=(0.3, 0.55, 0.75), token=(0.05, 0.2)), **MANY)
    found += of_group("small models", grid(alpha=(0.3, 0.6, 0.85), cache=(0.75, 1.0)), **SMALL)
    found += of_group("small, batch of 8", grid(alpha=(0.3, 0.6, 0.85), cache=(0.75, 1.0)), **{**SMALL, **EIGHT})
    found += of_group("small, batch of 32", grid(alpha=(0.3, 0.85), cache=(0.75, 1.0)), **{**SMALL, **MANY})
    found += of_group("cheap drafts", grid(token=(0.002, 0.01), alpha=(0.05, 0.3, 0.7)), fixed=0.0)
    found += of_group("expensive drafts", grid(token=(0.6, 1.0), alpha=(0.55, 0.9)))
    found += of_group("short requests", grid(alpha=(0.3, 0.55, 0.8), sequences=(1, 4)), request=48, spread=0.1)
    short = grid(alpha=(0.3, 0.8), read=(0.002, 0.01))
    found += of_group("short answers", short, prompt=1000, request=32, tokens=1500, knee=4000)
    found += of_group("cache share", grid(cache=(0.7, 0.85), alpha=(0.4, 0.6, 0.8)))
    found += of_group("long texts", grid(alpha=(0.3, 0.7)), prompt=2000, key=3e-4, knee=4000)
    lookups = [
        *grid(copied=(0.05, 0.4, 0.9)),
        {"copied": 0.05, "ask": 0.03},
        *grid(copied=(0.05, 0.4), vain=(0.4, -0.6)),
    ]
    found += of_group("lookups", [*lookups, {"copied": 0.4, **EIGHT}], method="lookup", tokens=1500)
    models = [*grid(copied=(0.05, 0.4, 0.8), alpha=(0.3, 0.7)), {"copied": 0.4, "vain": 0.4}, {"copied": 0.4, **EIGHT}]
    found += of_group("lookups and a model", models, method="both", tokens=1200)
    return found


@dataclass(frozen=True)
class PolicyScore:
    """A policy's speed on a machine.

    best: the fixed choice that is fastest after FIRST_STEPS steps of the policy. over_plain: speed over that of plain
    decoding after FIRST_TOKENS tokens of each sequence. regret: 1 - speed over that of `best`, after FIRST_STEPS steps.
    whole_over_plain, whole_regret: the same over the whole run, with the choice that is fastest there.
    drafted, calls: shares of the steps that had drafts, and calls of the policy for each step.
    """

    machine: Machine
    best: FixedChoice
    over_plain: float
    regret: float
    whole_over_plain: float
    whole_regret: float
    drafted: float
    calls: float

    @property
    def reaches_goals(self) -> bool:
        """Whether the policy is fast enough on this machine."""
        most = MOST_REGRET_IN_CHANGE if self.machine.group in CHANGING else MOST_REGRET
        return self.over_plain >= LEAST_OVER_PLAIN and self.regret <= most


def judge(machine: Machine, build: Callable[[DraftLengthContext], DraftLength]) -> PolicyScore:
    """Run a policy on a machine beside every fixed choice."""
    context, choices = context_of(machine), fixed_choices(machine.method, machine.ends)
    own = run(machine, build(context), context.price("model"))
    fixed = [fixed_run(machine, choice) for choice in choices]
    steps, last = len(own.tokens), min(each.tokens[-1] for each in [own, *fixed])
    start = FIRST_TOKENS * machine.sequences
    learnt = min(own.tokens[min(FIRST_STEPS, steps // 2)], last - 1)
    later_s, whole_s = ([each.seconds_between(first, last) for each in fixed] for first in (learnt, 0))
    over = partial(own.seconds_between, last=last)
    return PolicyScore(
        machine, choices[later_s.index(min(later_s))],
        over_plain=fixed[0].seconds_between(start, last) / over(start), regret=1 - min(later_s) / over(learnt),
        whole_over_plain=whole_s[0] / over(0), whole_regret=1 - min(whole_s) / over(0),
        drafted=own.drafted / steps, calls=own.calls / steps,
    )  # fmt: skip


def by_group(scores: Iterable[PolicyScore]) -> dict[str, dict[str, float]]:
    """Return for each group the median and the worst of each figure."""
    groups: dict[str, list[PolicyScore]] = {}
    for score in scores:
        groups.setdefault(score.machine.group, []).append(score)
    found: dict[str, dict[str, float]] = {}
    for group, own in groups.items():
        found[group] = {"machines": len(own), "reaching_goals": sum(score.reaches_goals for score in own)}
        for name, worst in (("over_plain", min), ("regret", max), ("whole_over_plain", min), ("whole_regret", max)):
            values = [getattr(score, name) for score in own]
            found[group] |= {name: median(values), f"worst_{name}": worst(values)}
    return found
