"""Drafts that end after an unlikely token."""

from __future__ import annotations

from typing import Any

import pytest

from speculant.errors import ConfigError
from speculant.lengths import LONGEST, Confidence, DraftLengthContext, ScoredDraft, build, stop_below
from speculant.types import DraftRules
from tests.models import make_request
from tests.unit.scheduling.driver import Driver, slots


def kept(scores: list[float], parents: list[int] | None = None, threshold: float = 0.5) -> int:
    chain = list(range(-1, len(scores) - 1))
    draft = ScoredDraft(make_request([1]), scores, chain if parents is None else parents)
    return Confidence(8, threshold).trim([draft])[0]


@pytest.mark.parametrize(
    ("scores", "count"), [([0.9, 0.8, 0.7], 3), ([0.9, 0.4, 0.7], 2), ([0.1, 0.9], 1), ([0.5, 0.5], 2), ([], 0)]
)
def test_a_chain_ends_after_the_first_unsure_node(scores: list[float], count: int) -> None:
    assert kept(scores) == count


@pytest.mark.parametrize(
    ("scores", "count"),
    [([0.9, 0.1, 0.8, 0.9], 4), ([0.1, 0.9, 0.8, 0.9], 2), ([0.9, 0.1, 0.1, 0.9], 3), ([0.1, 0.1, 0.9, 0.9], 2)],
)
def test_a_tree_ends_after_the_last_node_below_sure_ones(scores: list[float], count: int) -> None:
    assert kept(scores, parents=[-1, -1, 0, 2]) == count


@pytest.mark.parametrize("threshold", [0, -0.1, 1.1, "0.4", True, None])
def test_a_threshold_outside_of_0_to_1_is_refused(threshold: Any) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        stop_below({"threshold": threshold})
    with pytest.raises(ConfigError, match="threshold"):
        build(DraftLengthContext(4, {"threshold": threshold}))


@pytest.mark.parametrize(("configured", "wanted", "expected"), [(None, None, LONGEST), (7, None, 7), (7, 3, 3)])
def test_length_is_long_unless_a_number_is_set(configured: int | None, wanted: int | None, expected: int) -> None:
    driver = Driver(slots(4))
    driver.add(3).drafts = DraftRules(num_tokens=wanted)
    assert build(DraftLengthContext(5, {}, configured)).choose(driver.step()) == [expected]
