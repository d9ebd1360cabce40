"""Fewer examples where the profile is not the full one."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.examples import examples


@pytest.mark.parametrize(("drawn", "numbers"), [(100, [5, 15, 40, 400]), (25, [5, 8, 10, 100])])
def test_examples_are_in_proportion_to_the_profile(drawn: int, numbers: list[int]) -> None:
    usual = settings.default
    try:
        settings.register_profile("tried", max_examples=drawn)
        settings.load_profile("tried")
        assert [examples(full) for full in (5, 15, 40, 400)] == numbers
    finally:
        settings.register_profile("usual", usual)
        settings.load_profile("usual")
