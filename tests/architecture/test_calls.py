"""A step makes few calls, and a request's way from its prompt to its text passes few files."""

from __future__ import annotations

from statistics import median

import pytest

from tests.architecture.calls import SETTINGS, by_name, count_calls, file_of
from tests.small_models import NATIVE

# Of the median step, and of a request. A commit that needs fewer lowers them; nothing raises them.
MOST_CALLS = {"plain": 62, "fixed": 128, "default": 188}
MOST_FILES = {"plain": 26, "fixed": 31, "default": 35}


@NATIVE
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_makes_few_calls_and_a_request_passes_few_files(setting: str) -> None:
    counted = count_calls(SETTINGS[setting])
    assert median(counted.totals) <= MOST_CALLS[setting], by_name(
        counted.usual, lambda code: f"{file_of(code)} {code.co_qualname}"
    )
    assert len(counted.files) <= MOST_FILES[setting], counted.files


@NATIVE
def test_counts_are_the_same_each_time() -> None:
    first, second = (count_calls(SETTINGS["default"], steps=10) for _ in range(2))
    assert first.totals == second.totals
    assert first.files.keys() == second.files.keys()
