"""Covering selections of parametrized tests: the part of a large product of parameters that `make test` runs.

The combinations of a test marked `covering(strength)` have three parts. `make test` runs some in which every
`strength`-tuple of parameter values occurs. `make test-all` also runs, as slow tests, some in which every tuple of
`strength + 1` values occurs. The others are tests only with the option `--every-combination`. So `covering(1)` runs
every value in `make test`, and every pair of values in `make test-all`. Values of parametrized fixtures count, too.
Combinations that are slow by themselves are in the second part or the third. The parts are the same in every process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

WITHOUT_SLOW = "not slow"  # what `make test` gives to -m
EVERY = "--every-combination"


def add_option(parser: pytest.Parser) -> None:
    """Add the option that runs all combinations of parameters."""
    parser.addoption(EVERY, action="store_true", help="run the combinations that no covering selection has, too")


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int, chosen: Iterable[int] = ()) -> list[int]:
    """Choose cases (parameter -> value) in which every `strength`-tuple of values occurs that occurs in any.

    Greedy: the case with the most tuples that are missing is next; of several, the first whose values were chosen
    least often, so that values take turns. The cases that are `chosen` already stay. Returns indices, ascending.
    """
    import numpy as np  # here: the process that only distributes tests does without

    if not cases:
        return []
    values = np.array(_numbered([list(case.items()) for case in cases]))
    tuples = np.array(_numbered([list(combinations(row, min(strength, len(row)))) for row in values.tolist()]))
    missing, selected = np.ones(tuples.max() + 1, bool), [*chosen]
    missing[tuples[selected]] = False
    while missing.any():
        gains = missing[tuples].sum(1)
        most = np.flatnonzero(gains == gains.max())
        uses = np.bincount(values[selected].ravel(), minlength=values.max() + 1)
        best = int(most[uses[values[most]].sum(1).argmin()])
        selected.append(best)
        missing[tuples[best]] = False
    return sorted(selected)


def _numbered(rows: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Return a number for each element of rows, equal ones for equal elements."""
    numbers: dict[Hashable, int] = {}
    return [[numbers.setdefault(each, len(numbers)) for each in row] for row in rows]


def leave_combinations_out(metafunc: pytest.Metafunc) -> None:
    """Leave out combinations of a test with the marker `covering` that are in neither selection.

    A run that deselects slow tests makes no items of slow combinations: there are more of them than of others, and
    each takes time in every process. One is left of a test whose combinations are all slow.
    """
    calls, options, definition = metafunc._calls, metafunc.config.option, metafunc.definition
    is_slow = definition.get_closest_marker("slow") is not None
    quick = [index for index, call in enumerate(calls) if not is_slow and not _is_slow(call.marks)]
    kept = [*range(len(calls))]
    if marker := definition.get_closest_marker("covering"):
        cases, strength = [_values(call.params) for call in calls], marker.args[0]
        quick = [quick[index] for index in covering([cases[index] for index in quick], strength)]
        if options.markexpr != WITHOUT_SLOW and not options.every_combination:
            kept = covering(cases, strength + 1, quick)
        for index in set(kept).difference(quick):
            calls[index].marks.append(pytest.mark.slow.mark)
    if options.markexpr == WITHOUT_SLOW:
        kept = quick or kept[:1]
    calls[:] = [calls[index] for index in kept]


def _is_slow(marks: Iterable[pytest.Mark | pytest.MarkDecorator]) -> bool:
    return any(mark.name == "slow" for mark in marks)


def _values(params: Mapping[str, object]) -> dict[str, Hashable]:
    """Return keys of a combination's values: the identities of the objects, which all combinations share.

    A named tuple is as many values as it has fields.
    """
    found = dict[str, Hashable]()
    for name, value in params.items():
        fields = value._asdict() if hasattr(value, "_asdict") else {"": value}
        found |= {f"{name}.{field}": id(each) for field, each in fields.items()}
    return found
