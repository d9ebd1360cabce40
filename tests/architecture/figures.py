"""How long functions are. `python -m tests.architecture.figures` prints it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from tests.architecture.source import Module, functions, load_package, num_lines

MEDIAN_FUNCTION = 9  # lines; exclusive
NINE_IN_TEN_FUNCTIONS = 30  # lines; exclusive
LONGEST_FUNCTION = 60  # lines; inclusive


@dataclass(frozen=True)
class Figures:
    """The lengths that have a budget, in lines."""

    num_modules: int
    num_lines: int
    num_functions: int
    median_function: float
    nine_in_ten: float
    longest_function: tuple[int, str]


def measure(modules: Iterable[Module]) -> Figures:
    """Measure functions; there must be at least one."""
    modules = list(modules)
    lengths = [(num_lines(f), f"{module.at(f)} {f.name}") for module in modules for f in functions(module)]
    ordered = sorted(length for length, _ in lengths)
    return Figures(
        num_modules=len(modules),
        num_lines=sum(module.num_lines for module in modules),
        num_functions=len(ordered),
        median_function=statistics.median(ordered),
        nine_in_ten=ordered[-(-9 * len(ordered) // 10) - 1],
        longest_function=max(lengths),
    )


def over_budget(figures: Figures) -> list[str]:
    """Say which budgets are exceeded."""
    checks = {
        f"median function has {figures.median_function} lines": figures.median_function < MEDIAN_FUNCTION,
        f"nine in ten functions have up to {figures.nine_in_ten} lines": figures.nine_in_ten < NINE_IN_TEN_FUNCTIONS,
        f"{figures.longest_function[1]} has {figures.longest_function[0]} lines": (
            figures.longest_function[0] <= LONGEST_FUNCTION
        ),
    }
    return [message for message, holds in checks.items() if not holds]


def report(figures: Figures) -> str:
    """Lay the figures out for a terminal, each with its budget."""
    function_length, function_name = figures.longest_function
    return "\n".join(
        [
            f"{figures.num_modules} modules, {figures.num_lines} lines, {figures.num_functions} functions",
            f"  median function    {figures.median_function:5.1f} lines  (under {MEDIAN_FUNCTION})",
            f"  nine in ten up to  {figures.nine_in_ten:5.0f} lines  (under {NINE_IN_TEN_FUNCTIONS})",
            f"  longest function   {function_length:5d} lines  (at most {LONGEST_FUNCTION})  {function_name}",
        ]
    )


if __name__ == "__main__":
    print(report(measure(load_package())))
