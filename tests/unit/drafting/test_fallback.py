"""Fallback: per sequence and step, the first sub-drafter that has a draft."""

from __future__ import annotations

from collections.abc import Sequence

from speculant.drafting import DrafterNeeds, FallbackDrafter, Selector, StatelessDrafter, SubDrafter
from speculant.types import CommittedRows, DraftTree, Request
from tests.fakes import ScriptedDrafter
from tests.models import make_request

V = 20


class Knowing(ScriptedDrafter):
    """Has a draft for some sequences; notes the sequences and limits of each call."""

    def __init__(self, drafts: dict[int, list[int]], needs: DrafterNeeds | None = None) -> None:
        super().__init__(lambda request: drafts.get(request.seq_id, []), needs)
        self.asked: list[list[tuple[int, int]]] = []

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        self.asked.append([(request.seq_id, limit) for request, limit in zip(requests, limits, strict=True)])
        return super().propose(requests, limits)


def fallback(*sub_drafters: ScriptedDrafter) -> FallbackDrafter:
    return FallbackDrafter([SubDrafter("scripted", each, 4) for each in sub_drafters], V)


def proposed(drafter: FallbackDrafter, limits: Sequence[int], selector: Selector | None = None) -> list[list[int]]:
    requests = [make_request([1, 2], seq_id=seq_id) for seq_id in range(1, len(limits) + 1)]
    for request in requests:
        drafter.begin(request)
    return [tree.token_list for tree in drafter.propose_selected(requests, limits, selector)]


def test_fallback_takes_the_first_draft_of_each_sequence() -> None:
    """One call per member, over the sequences that have no draft yet and may have one."""
    first, second = Knowing({1: [5], 3: [6, 7]}), Knowing({1: [8], 2: [9, 10], 4: [11]})
    assert proposed(fallback(first, second), [3, 1, 2, 0, 4]) == [[5], [9], [6, 7], [], []]
    assert first.asked == [[(1, 3), (2, 1), (3, 2), (5, 4)]]
    assert second.asked == [[(2, 1), (5, 4)]]


def test_fallback_stops_when_all_have_drafts() -> None:
    first, second = Knowing({1: [5]}), Knowing({1: [6]})
    assert proposed(fallback(first, second), [2]) == [[5]]
    assert second.asked == []


def test_fallback_keeps_each_sub_drafter_within_its_limit() -> None:
    first, second = Knowing({1: [5, 6, 7]}, DrafterNeeds(max_nodes=2)), Knowing({}, DrafterNeeds(max_nodes=9))
    drafter = fallback(first, second)
    assert drafter.needs.max_nodes == 9
    assert proposed(drafter, [5]) == [[5, 6]]


def test_fallback_leaves_trees_as_they_are() -> None:
    tree = DraftTree.of([5, 6], [-1, -1], scores=[0.7, 0.2])
    drafter = fallback(ScriptedDrafter(lambda request: tree, DrafterNeeds(emits_tree=True)))
    request = make_request([1, 2])
    drafter.begin(request)
    assert drafter.propose([request], [4]) == [tree]


class Scripted:
    """Prefers drafts whose first score is at least `least`, and bounds the model's drafts."""

    def __init__(self, least: float, longest: int | None) -> None:
        self.least, self.longest = least, longest

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        return scores[0] >= self.least

    def longest_unscored(self, request: Request) -> int | None:
        return self.longest


MODEL = DrafterNeeds(own_cache=True)


def lookup(scores: Sequence[float], needs: DrafterNeeds | None = None) -> ScriptedDrafter:
    tree = DraftTree.chain([5] * len(scores), scores=scores)
    return ScriptedDrafter(lambda request: tree, needs)


def selected(selector: Scripted, *sub_drafters: ScriptedDrafter) -> list[list[int]]:
    return proposed(fallback(*sub_drafters), [4], selector)


def test_fallback_uses_a_model_where_the_selector_prefers_it() -> None:
    model = Knowing({1: [8, 9]}, MODEL)
    assert selected(Scripted(0.5, 2), lookup([0.4, 0.4]), model) == [[8, 9]]
    assert model.asked == [[(1, 2)]], "the selector bounds it"
    assert selected(Scripted(0.4, 2), lookup([0.4, 0.4]), model) == [[5, 5]]
    assert selected(Scripted(0.5, 0), lookup([0.4, 0.4]), model) == [[]], "the selector wants no draft"


def test_fallback_selects_only_before_a_model() -> None:
    """The first draft is taken where no model follows."""
    first, second = lookup([0.1]), lookup([0.9])
    assert selected(Scripted(0.5, 0), first, second) == [[5]]
    model = Knowing({}, MODEL)
    assert selected(Scripted(0.5, 0), model, first) == [[5]]


def test_fallback_announces_that_the_policy_selects() -> None:
    model = Knowing({}, MODEL)
    assert fallback(lookup([0.1]), model).needs.selects
    assert not fallback(model, lookup([0.1])).needs.selects
    assert not fallback(lookup([0.1]), lookup([0.9])).needs.selects


def test_fallback_takes_drafts_without_scores() -> None:
    first = Knowing({1: [6]})
    assert selected(Scripted(2.0, 0), first, Knowing({1: [8]}, MODEL)) == [[6]]


def test_a_composite_listens_if_it_or_a_part_of_it_does() -> None:
    class Watching(FallbackDrafter):
        def observe(self, request: Request, rows: CommittedRows) -> None:
            """Watch."""

    class Part(StatelessDrafter):
        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            return [DraftTree.empty()] * len(requests)

    class WatchingPart(Part):
        def observe(self, request: Request, rows: CommittedRows) -> None:
            """Watch."""

    quiet, watching = [SubDrafter("part", Part(), 1)], [SubDrafter("part", WatchingPart(), 1)]
    assert not FallbackDrafter(quiet, 4).listens
    assert FallbackDrafter(watching, 4).listens
    assert Watching(quiet, 4).listens
