"""Where further rows of a pass cost less, drafts become longer and trees wider: no length belongs to a processor."""

from __future__ import annotations

import heapq
from statistics import mean

import pytest

from speculant.drafting import DrafterNeeds
from speculant.lengths import LONGEST, LONGEST_ALONE, Adaptive, CostCurve, ScoredDraft, StepCosts
from speculant.scheduling import Schedule, Scheduled
from tests.models import make_request
from tests.simulation import LONG, World

# Passes by rows, in passes of one row: as measured with AVX2, and the goal of a set whose tiles have 16 rows.
AVX2 = CostCurve({1: 1.0, 5: 1.88, 8: 2.66, 16: 4.74, 32: 8.9})
TILES = CostCurve({1: 1.0, 2: 1.05, 5: 1.1, 9: 1.15, 16: 1.3, 32: 1.5})
DRAFT_S = 0.05  # of each drafted token
STEPS = 600
SCORES = (0.6, 0.2, 0.08)  # of a node's children


def policy_of(curve: CostCurve, **needs: int) -> Adaptive:
    drafts = {1: CostCurve({depth: DRAFT_S * depth for depth in (1, 2, 4, 8, 16)})}
    passes = {rows: curve.at(rows) for rows in range(1, 33)}
    return Adaptive(None, StepCosts(CostCurve(passes), {"some": drafts}), lambda method: DrafterNeeds(**needs))


def best_length(curve: CostCurve, alpha: float) -> int:
    """Return the length with the most expected tokens per second."""

    def rate(length: int) -> float:
        return sum(alpha**depth for depth in range(length + 1)) / (curve.at(1 + length) + DRAFT_S * length)

    return max(range(LONGEST + 1), key=rate)


def chosen_length(curve: CostCurve, alpha: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the mean length of drafts in the last half of a run."""
    policy, lengths = policy_of(curve), list[int]()
    choose = policy.choose

    def noted(schedule: Schedule) -> list[int]:
        lengths.extend(chosen := choose(schedule))
        return chosen

    monkeypatch.setattr(policy, "choose", noted)
    World(curve.at, DRAFT_S, lambda place: alpha, noise=0.05).run(policy, 1, STEPS)
    return mean(lengths[len(lengths) // 2 :])


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8, 0.9])
def test_chains_have_the_best_length_of_each_machine(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (chosen_length(curve, alpha, monkeypatch) for curve in (AVX2, TILES))
    assert few == pytest.approx(best_length(AVX2, alpha), rel=0.15)
    assert many == pytest.approx(best_length(TILES, alpha), rel=0.15)
    assert many > 1.8 * few


@pytest.mark.parametrize(("curve", "most", "depth"), [(AVX2, 2, 2), (TILES, 32, 7)], ids=["AVX2", "tiles"])
def test_trees_whose_nodes_have_scores_are_as_wide_as_they_pay(curve: CostCurve, most: int, depth: int) -> None:
    """Each node has three children; a draft has the likeliest nodes first."""
    heap = [(-score, number, -1, score, 1) for number, score in enumerate(SCORES)]
    scores, parents, depths = list[float](), list[int](), list[int]()
    while len(scores) < LONGEST_ALONE:
        path, _, parent, score, level = heapq.heappop(heap)
        for own in SCORES:
            heapq.heappush(heap, (path * own, len(SCORES) * (1 + len(scores)) + len(heap), len(scores), own, 1 + level))
        scores, parents, depths = [*scores, score], [*parents, parent], [*depths, level]
    policy, request = policy_of(curve), make_request([1], [], LONG, seq_id=1, method="some")
    policy.choose(Schedule([Scheduled(request, 0, 1)], None, 10**6, [], []))  # type: ignore[arg-type]
    (kept,) = policy.trim([ScoredDraft(request, scores, parents)])
    assert (kept, max(depths[:kept])) == (most, depth)


@pytest.mark.parametrize(("curve", "nodes"), [(AVX2, 0), (TILES, 16)], ids=["AVX2", "tiles"])
def test_a_tree_of_one_shape_is_drafted_where_rows_are_cheap(curve: CostCurve, nodes: int) -> None:
    request = make_request([1], [], LONG, seq_id=1, method="some")
    schedule = Schedule([Scheduled(request, 0, 1)], None, 10**6, [], [])  # type: ignore[arg-type]
    assert policy_of(curve, usual_nodes=16, tree_depth=4).choose(schedule) == [nodes]
