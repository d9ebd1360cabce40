"""The selections of parameter combinations that `make test` and `make test-all` run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable
from itertools import combinations, product

import pytest

from tests.covering import EVERY, covering

SIZES = {"isa": 5, "weights": 4, "cache": 2, "noise": 3}
CASES: list[dict[str, Hashable]] = [
    dict(zip(SIZES, values, strict=True)) for values in product(*map(range, SIZES.values()))
]


def tuples(cases: list[dict[str, Hashable]], strength: int) -> set[object]:
    return {some for case in cases for some in combinations(case.items(), strength)}


@pytest.mark.parametrize(("strength", "least", "most"), [(1, 5, 5), (2, 20, 26), (3, 60, 84), (4, 120, 120)])
def test_a_covering_selection_has_every_tuple(strength: int, least: int, most: int) -> None:
    chosen = [CASES[index] for index in covering(CASES, strength)]
    assert tuples(chosen, strength) == tuples(CASES, strength)
    assert least <= len(chosen) <= most


def test_a_covering_selection_is_of_existing_combinations() -> None:
    cases: list[dict[str, Hashable]] = [{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 1}]
    assert covering(cases, 1) == [0, 2]
    assert covering(cases, 2) == [0, 1, 2]
    assert covering([{"a": value} for value in range(4)], 2) == [0, 1, 2, 3]
    assert covering([], 2) == []


def test_a_larger_selection_has_the_smaller_one() -> None:
    few = covering(CASES, 1)
    more = covering(CASES, 2, few)
    assert set(few) < set(more)
    assert tuples([CASES[index] for index in more], 2) == tuples(CASES, 2)
    assert len(more) <= 26


def test_a_selection_from_thousands_takes_a_moment() -> None:
    cases: list[dict[str, Hashable]] = [
        dict(zip("abcde", values, strict=True)) for values in product(*map(range, (12, 10, 6, 5, 3)))
    ]
    before = time.process_time()
    assert 720 <= len(covering(cases, 3)) <= 800
    assert time.process_time() - before < 5


def test_values_of_a_selection_take_turns() -> None:
    cases: list[dict[str, Hashable]] = [{"model": model, "size": size} for model in range(12) for size in range(3)]
    assert Counter(cases[index]["size"] for index in covering(cases, 1)) == {0: 4, 1: 4, 2: 4}


@pytest.fixture
def selecting(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a project whose tests are selected as this project's are."""
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    covering\n")
    pytester.makeconftest(
        "import pytest\nfrom tests.covering import add_option as pytest_addoption, leave_combinations_out\n"
        "@pytest.hookimpl(trylast=True)\ndef pytest_generate_tests(metafunc):\n    leave_combinations_out(metafunc)\n"
    )
    return pytester


@pytest.mark.parametrize(("strength", "quick", "slow"), [(1, 5, 10), (2, 15, 15), (3, 30, 0)])
def test_a_selection_is_quick_and_a_larger_one_slow(
    selecting: pytest.Pytester, strength: int, quick: int, slow: int
) -> None:
    """The combinations beyond both are run on request only."""
    selecting.makepyfile(
        "import pytest\n@pytest.fixture(params='abc')\ndef letter(request): ...\n"
        f"@pytest.mark.covering({strength})\n"
        "@pytest.mark.parametrize('n', range(5))\n@pytest.mark.parametrize('m', range(2))\n"
        "def test_it(m, n, letter): ..."
    )
    selecting.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=quick)
    selecting.runpytest_inprocess("-m", "slow").assert_outcomes(passed=slow, deselected=quick)
    selecting.runpytest_inprocess().assert_outcomes(passed=quick + slow)
    selecting.runpytest_inprocess(EVERY, "-m", "slow").assert_outcomes(passed=30 - quick, deselected=quick)


def test_a_selection_is_of_combinations_that_are_not_slow(selecting: pytest.Pytester) -> None:
    """Each `m` and `l` occurs beside the only `n` that is quick; beside others, in pairs."""
    selecting.makepyfile(
        "import pytest\npytestmark = [pytest.mark.covering(1), pytest.mark.parametrize('m', range(2))]\n"
        "SLOW = [pytest.param(0, marks=pytest.mark.slow), 1]\n"
        "@pytest.mark.parametrize('n', SLOW)\n@pytest.mark.parametrize('l', range(2))\n"
        "def test_partly(m, n, l):\n    assert n\n"
        "@pytest.mark.slow\n@pytest.mark.parametrize('n', range(2))\n@pytest.mark.parametrize('l', range(2))\n"
        "def test_slow(m, n, l): ...\n"
    )
    selecting.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=2, deselected=1)
    selecting.runpytest_inprocess("-m", "slow").assert_outcomes(failed=2, passed=6, deselected=2)


def test_fields_of_named_tuples_are_values(selecting: pytest.Pytester) -> None:
    selecting.makepyfile(
        "import pytest, typing\nclass Pair(typing.NamedTuple):\n    n: int\n    m: int\n"
        "@pytest.mark.covering(1)\n@pytest.mark.parametrize('k', range(2))\n"
        "@pytest.mark.parametrize('pair', [Pair(n, m) for n in range(3) for m in range(3)])\n"
        "def test_it(pair, k): ..."
    )
    selecting.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=3)
    selecting.runpytest_inprocess().assert_outcomes(passed=10)


def test_a_run_without_slow_tests_makes_none_of_them(selecting: pytest.Pytester) -> None:
    """One item is left of a test that is slow with all parameters, so that it is not run without any."""
    selecting.makepyfile(
        "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(5))\ndef test_slow(n): ...\n"
        "@pytest.mark.parametrize('n', [pytest.param(0, marks=pytest.mark.slow), 1, 2])\ndef test_partly(n): ...\n"
        "SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in range(3)]\n"
        "@pytest.mark.parametrize('n', SLOW)\ndef test_each_slow(n): ...\n@pytest.mark.slow\ndef test_one(): ...\n"
    )
    selecting.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=2, deselected=3)
    selecting.runpytest_inprocess().assert_outcomes(passed=12)
