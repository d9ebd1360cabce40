"""Token recycling: the matrices, their salts and their memory, and the shape of the trees."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from speculant.drafting import PRIOR, NodeAcceptance, RecyclingOptions, TokenRecycling, grow, tree_shape
from speculant.drafting.lookup.token_recycling import METHOD
from speculant.errors import ConfigError
from speculant.params import SamplingParams
from speculant.types import CommittedRows, DraftTree, Request, Successors
from tests.models import make_request

V = 50


def drafter_of(**options: int) -> TokenRecycling:
    return TokenRecycling(RecyclingOptions(**{"successors": 3, **options}), V)


def begun(drafter: TokenRecycling, tokens: Sequence[int], seq_id: int = 1, cache_salt: str = "") -> Request:
    request = make_request(tokens, params=SamplingParams(temperature=0), seq_id=seq_id, cache_salt=cache_salt)
    drafter.begin(request)
    return request


def teach(drafter: TokenRecycling, request: Request, successors: Successors, gained: Sequence[int] = ()) -> None:
    drafter.observe(request, CommittedRows(0, [], gained, (), successors))


def drafted(drafter: TokenRecycling, request: Request, limit: int) -> DraftTree:
    (tree,) = drafter.propose([request], [limit])
    return tree


def test_successors_are_proposed_as_a_tree() -> None:
    drafter = drafter_of()
    request = begun(drafter, [1])
    teach(drafter, request, [(1, [2, 3, 4]), (2, [5, 1, 6]), (3, [7, 8, 9]), (5, [2, 6, 7])])
    tree = drafted(drafter, request, 6)
    # by cost: (0); (0, 0); (0, 0, 0), (1); (0, 0, 0, 0), (0, 1)
    assert tree.token_list == [2, 5, 2, 3, 5, 1]
    assert tree.parent_list == [-1, 0, 1, -1, 2, 0]


def test_the_newest_rows_count() -> None:
    drafter = drafter_of()
    request = begun(drafter, [1])
    teach(drafter, request, [(1, [2, 3, 4]), (1, [5, 6, 7])])
    assert drafted(drafter, request, 1).token_list == [5]
    teach(drafter, request, [(1, [8, 9, 10])])
    assert drafted(drafter, request, 1).token_list == [8]


def test_an_unknown_token_is_continued_as_in_the_text() -> None:
    drafter = drafter_of()
    request = begun(drafter, [1, 2, 3, 1, 4, 1])
    assert drafted(drafter, request, 3).token_list == [4, 1, 4], "the last time, and not two of it"
    assert drafted(drafter, begun(drafter, [9], seq_id=2), 3).size == 0, "another text's tokens are not known here"
    teach(drafter, request, [(1, [6, 7, 8])])
    assert drafted(drafter, request, 1).token_list == [6], "logits come first"


def test_later_requests_profit_and_other_salts_do_not() -> None:
    drafter = drafter_of()
    first = begun(drafter, [1])
    teach(drafter, first, [(1, [2, 3, 4])])
    drafter.end(first)
    assert drafted(drafter, begun(drafter, [1], 2), 1).token_list == [2]
    assert drafted(drafter, begun(drafter, [1], 3, "other"), 1).size == 0


def test_matrices_are_bounded_and_the_oldest_goes() -> None:
    drafter = drafter_of(matrices=2)
    for seq_id, salt in enumerate(("a", "b", "a", "c")):
        teach(drafter, begun(drafter, [1], seq_id, salt), [(1, [2, 3, 4])])
    assert len(drafter._matrices) == 2
    found = {salt: drafted(drafter, begun(drafter, [1], 9, salt), 1).size for salt in ("a", "c")}
    assert found == {"a": 1, "c": 1}
    assert drafted(drafter, begun(drafter, [1], 10, "b"), 1).size == 0
    assert sum(matrix.nbytes for matrix in drafter._matrices.values()) == 2 * V * 3 * 4


def test_a_sequence_s_state_is_freed() -> None:
    drafter = drafter_of()
    for seq_id in range(5):
        request = begun(drafter, [1, 2, 1], seq_id)
        drafted(drafter, request, 2)
        drafter.end(request)
    assert not drafter._sequences


@pytest.mark.parametrize("size", [1, METHOD.default_length, 12, 33, 88])
def test_shapes_are_whole_trees_of_their_size(size: int) -> None:
    shape = tree_shape(size, 8)
    assert len(shape) == size
    assert all(above < place for place, (above, _) in enumerate(shape))
    for place, (above, rank) in enumerate(shape):
        assert rank == 0 or (above, rank - 1) in shape[:place], "elder siblings stand before"
    costs = [0] * size
    for place, (above, rank) in enumerate(shape):
        costs[place] = 1 + 2 * rank + (costs[above] if above >= 0 else 0)
    assert costs == sorted(costs), "likeliest first"
    assert shape == tree_shape(88, 8)[:size], "the first nodes of a tree are the smaller tree"


def test_larger_limits_than_the_largest_tree_are_fine() -> None:
    drafter = drafter_of()
    assert drafter.needs.max_nodes is not None
    request = begun(drafter, [1])
    teach(drafter, request, [(token, [(token + i) % V for i in (1, 2, 3)]) for token in range(V)])
    assert drafted(drafter, request, 500).size == drafter.needs.max_nodes


def test_nodes_below_a_gap_are_left_out() -> None:
    rows = {1: [2, 3], 3: [4]}
    tokens, parents, ranks = grow(tree_shape(12, 3), 1, lambda token: rows.get(token, [-1]))
    assert (tokens, parents, ranks) == ([2, 3, 4], [-1, -1, 1], [0, 1, 0])


def test_acceptance_is_learned_by_depth_and_rank() -> None:
    acceptance, draft = NodeAcceptance(), DraftTree.of([5, 6, 7, 8], [-1, -1, 1, 1])
    assert acceptance.rate(1, 0) == PRIOR
    assert acceptance.rate(2, 1) == PRIOR**3
    for _ in range(2000):
        acceptance.learn(draft, [0, 1, 0, 1], [6, 8, 1])
    assert acceptance.rate(1, 0) < 0.01
    assert acceptance.rate(1, 1) > 0.99
    assert acceptance.rate(2, 0) < 0.01
    assert acceptance.rate(2, 1) > 0.99
    assert acceptance.rate(3, 0) == PRIOR, "nothing was drafted there"
    assert len(acceptance._rates) == 4


def test_nodes_below_a_rejected_one_teach_nothing() -> None:
    acceptance = NodeAcceptance()
    acceptance.learn(DraftTree.of([5, 6], [-1, 0]), [0, 0], [9])
    assert acceptance.rate(1, 0) < PRIOR
    assert acceptance.rate(2, 0) == PRIOR


def test_scores_are_the_learned_rates() -> None:
    drafter = drafter_of()
    request = begun(drafter, [1])
    teach(drafter, request, [(1, [2, 3, 4]), (2, [2, 3, 4])])
    for _ in range(500):
        tree = drafted(drafter, request, 4)
        assert tree.scores is not None
        teach(drafter, request, (), [3])
    assert (tree.token_list, tree.parent_list) == ([3, 2, 2, 2], [-1, -1, 1, 2]), "the likeliest first"
    assert tree.scores[0] > 0.95
    assert tree.scores[1] < 0.05
    assert tree.scores[2:] == [PRIOR, PRIOR]


@pytest.mark.parametrize("options", [{"successors": 0}, {"successors": 65}, {"matrices": 0}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="is not from 1"):
        RecyclingOptions(**options)
