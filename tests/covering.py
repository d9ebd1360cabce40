"""Covering selections of parametrized tests: the part of a large product of parameters that `make test` runs.

A test marked `covering(strength)` keeps the combinations in which every `strength`-tuple of parameter values
occurs at least once, and marks the others slow. `covering(2)` is a pairwise selection, `covering(1)` runs every
value once. Values of parametrized fixtures count, too. The selection is the same in every process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

import pytest

Tuple = tuple[tuple[str, Hashable], ...]  # some parameters and their values


def covering(cases: Sequence[dict[str, Hashable]], strength: int) -> list[int]:
    """Choose cases (parameter -> value) in which every `strength`-tuple of values occurs that occurs in any.

    Greedy: the case with the most tuples that are missing is next; of several, the first whose values were chosen
    least often, so that values take turns. Returns indices, ascending.
    """
    tuples = [_tuples(case, strength) for case in cases]
    missing, chosen, uses = set[Tuple]().union(*tuples), list[int](), Counter[tuple[str, Hashable]]()

    def gain(index: int) -> tuple[int, int]:
        return len(tuples[index] & missing), -sum(uses[value] for value in cases[index].items())

    while missing:
        best = max(range(len(cases)), key=gain)
        chosen.append(best)
        missing -= tuples[best]
        uses.update(cases[best].items())
    return sorted(chosen)


def _tuples(case: dict[str, Hashable], strength: int) -> set[Tuple]:
    """Return the tuples of a case; a case of fewer parameters is one tuple."""
    return set(combinations(sorted(case.items()), min(strength, len(case))))


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the combinations of each test with the marker `covering` that its selection leaves out."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("covering"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None
        chosen = set(covering([_values(case) for case in cases], *marker.args))
        for index in set(range(len(cases))) - chosen:
            cases[index].add_marker(pytest.mark.slow)


def _values(case: pytest.Function) -> dict[str, Hashable]:
    """Return keys of a combination's values: the identities of the objects, which all combinations share."""
    return {name: id(value) for name, value in case.callspec.params.items()}
