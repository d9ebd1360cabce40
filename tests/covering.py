"""Covering selections of parametrized tests: the part of a large product of parameters that `make test` runs.

A test marked `covering(strength)` keeps the combinations in which every `strength`-tuple of parameter values
occurs at least once, and marks the others slow. `covering(2)` is a pairwise selection, `covering(1)` runs every
value once. Values of parametrized fixtures count, too; combinations that are slow by themselves do not. The selection
is the same in every process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

WITHOUT_SLOW = "not slow"  # what `make test` gives to -m

Tuple = tuple[tuple[str, Hashable], ...]  # some parameters and their values


def covering(cases: Sequence[dict[str, Hashable]], strength: int) -> list[int]:
    """Choose cases (parameter -> value) in which every `strength`-tuple of values occurs that occurs in any.

    Greedy: the case with the most tuples that are missing is next; of several, the first whose values were chosen
    least often, so that values take turns. Returns indices, ascending.
    """
    tuples = [_tuples(case, strength) for case in cases]
    missing, chosen, uses = set[Tuple]().union(*tuples), list[int](), Counter[tuple[str, Hashable]]()
    while missing:
        gains = [len(own & missing) for own in tuples]
        most = max(gains)
        of_most = (index for index, gain in enumerate(gains) if gain == most)
        best = min(of_most, key=lambda index: sum(uses[value] for value in cases[index].items()))
        chosen.append(best)
        missing -= tuples[best]
        uses.update(cases[best].items())
    return sorted(chosen)


def _tuples(case: dict[str, Hashable], strength: int) -> set[Tuple]:
    """Return the tuples of a case; a case of fewer parameters is one tuple."""
    return set(combinations(sorted(case.items()), min(strength, len(case))))


def leave_combinations_out(metafunc: pytest.Metafunc) -> None:
    """Mark as slow the combinations that the selection of a test with the marker `covering` leaves out.

    A run that deselects slow tests makes no items of slow combinations: there are more of them than of others, and
    each takes time in every process. One is left of a test whose combinations are all slow.
    """
    calls = metafunc._calls
    marker = metafunc.definition.get_closest_marker("covering")
    if marker:
        quick = [call for call in calls if not _is_slow(call.marks)]
        chosen = covering([_values(call.params) for call in quick], *marker.args)
        for index in set(range(len(quick))).difference(chosen):
            quick[index].marks.append(pytest.mark.slow.mark)
    if metafunc.config.option.markexpr == WITHOUT_SLOW:
        is_quick = metafunc.definition.get_closest_marker("slow") is None
        quick = [call for call in calls if is_quick and not _is_slow(call.marks)]
        calls[:] = quick or calls[:1]


def _is_slow(marks: Iterable[pytest.Mark | pytest.MarkDecorator]) -> bool:
    return any(mark.name == "slow" for mark in marks)


def _values(params: Mapping[str, object]) -> dict[str, Hashable]:
    """Return keys of a combination's values: the identities of the objects, which all combinations share."""
    return {name: id(value) for name, value in params.items()}
