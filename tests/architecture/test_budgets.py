"""Functions stay short."""

from __future__ import annotations

from tests.architecture.figures import measure, over_budget, report
from tests.architecture.source import Module, load_package


def _function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def test_package_keeps_its_budgets() -> None:
    figures = measure(load_package())
    assert over_budget(figures) == [], report(figures)


def test_lengths_count_from_def_to_the_end() -> None:
    figures = measure([Module("m", "@decorator\n" + _function("f", 4))])
    assert figures.longest_function == (4, "m:2 f")
    assert figures.median_function == 4


def test_methods_and_nested_functions_count() -> None:
    text = "class A:\n    def f(self):\n        def g():\n            pass\n"
    assert measure([Module("m", text)]).num_functions == 2


def test_nine_in_ten_is_the_smallest_length_that_covers_them() -> None:
    modules = [Module("m", "".join(_function("f", 2) for _ in range(9)) + _function("g", 50))]
    assert measure(modules).nine_in_ten == 2
    modules = [Module("m", "".join(_function("f", 2) for _ in range(8)) + 2 * _function("g", 50))]
    assert measure(modules).nine_in_ten == 50


def test_each_budget_can_be_exceeded() -> None:
    many_short = "".join(_function("f", 2) for _ in range(20))
    assert over_budget(measure([Module("m", many_short)])) == []
    assert over_budget(measure([Module("m", _function("f", 9))])) == ["median function has 9 lines"]
    assert over_budget(measure([Module("m", many_short + 3 * _function("f", 30))])) == [
        "nine in ten functions have up to 30 lines"
    ]
    assert over_budget(measure([Module("m", many_short + _function("long", 61))])) == ["m:41 long has 61 lines"]
