"""Checks of settings: one for each kind of value, and rules for arguments that only other programs have.

A check takes the name of a setting and its value. It raises ConfigError with the fix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

from speculant.errors import ConfigError, suggest

Check = Callable[[str, Any], None]


class Rule(NamedTuple):
    """The values of an argument that change nothing; None = all. Others are refused, with a reason and a fix."""

    harmless: tuple[Any, ...] | None = None
    why: str = ""
    fix: str = "leave it out."

    def check(self, name: str, value: object) -> None:
        """Raise ConfigError for a value that would change something."""
        if self.harmless is not None and value not in self.harmless:
            raise ConfigError(f"{name}={value!r} is not supported: {self.why}", self.fix)


def is_whole(given: object) -> TypeGuard[int]:
    """Whether a value is a whole number: neither a truth value nor a number with a fraction, even of zero."""
    return isinstance(given, int) and not isinstance(given, bool)


def check_fields(values: object, checks: Mapping[str, Check]) -> None:
    """Check the attributes of an object, by their names."""
    for name, check in checks.items():
        check(name, getattr(values, name))


def kind(holds: Callable[[Any], bool], problem: str, fix: str) -> Check:
    """Return the check of a kind of value. problem: of another value. fix: may have {name}."""

    def check(name: str, value: object) -> None:
        if not holds(value):
            raise ConfigError(f"{name}={value!r} {problem}", fix.replace("{name}", name))

    return check


def optional(check: Check) -> Check:
    """Return a check that None passes, too."""

    def checked(name: str, value: object) -> None:
        if value is not None:
            check(name, value)

    return checked


def one_of(choices: tuple[str, ...]) -> Check:
    """Return the check for one of some texts."""

    def check(name: str, value: object) -> None:
        if value not in choices:
            raise ConfigError(f"{name}={value!r} is unknown", suggest(str(value), choices))

    return check


def number_from(low: float, high: float) -> Check:
    """Return the check for numbers within a range."""
    return kind(
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high,
        f"is not a number from {low} to {high}",
        "set {name} within that range.",
    )


def whole_from(low: int, high: int) -> Check:
    """Return the check for whole numbers within a range."""
    within = number_from(low, high)

    def check(name: str, value: object) -> None:
        within(name, value)
        check_whole(name, value)

    return check


check_flag = kind(lambda value: isinstance(value, bool), "is not a truth value", "set {name} to True or False.")
check_whole = kind(is_whole, "is not a whole number", "set {name} to a whole number.")
check_positive = kind(
    lambda value: is_whole(value) and value > 0, "is not a whole number above 0", "set {name} to 1 or more."
)
check_name = kind(
    lambda value: isinstance(value, str) and value != "", "is not a name", "set {name} to text that is not empty."
)


def check_place(name: str, value: object) -> None:
    """Check for a name or a path."""
    if not isinstance(value, os.PathLike):
        check_name(name, value)
