"""A method's own options: read from the speculative config, checked against their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from speculant.drafting import DrafterContext, no_options, read_options
from speculant.errors import ConfigError
from tests.fakes import drafter_context


@dataclass(frozen=True)
class Options:
    """One option of each type."""

    count: int = 3
    rate: float = 0.5
    exact: bool = False
    file: str | None = None


def context(**options: Any) -> DrafterContext:
    return drafter_context(10, options)


def test_given_options_replace_the_defaults() -> None:
    assert read_options(context(), Options) == Options()
    assert read_options(context(count=4, rate=1, exact=True, file="x"), Options) == Options(4, 1, True, "x")


@pytest.mark.parametrize(
    ("name", "value"), [("count", "3"), ("count", 1.5), ("count", True), ("rate", "x"), ("exact", 1)]
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(context(**{name: value}), Options)
    assert name in caught.value.problem
    assert str(getattr(Options(), name)) in caught.value.fix


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"'cuont'(?s:.*)did you mean 'count'"):
        read_options(context(cuont=3), Options)


def test_a_method_without_options_takes_none() -> None:
    no_options(context())
    with pytest.raises(ConfigError, match="'count'"):
        no_options(context(count=3))
