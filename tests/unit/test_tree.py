"""A draft tree is the same whether it was made of tensors or of integers."""

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch

from speculant.tree import ancestors_of
from speculant.types import DraftTree

TOKENS, PARENTS = [7, 5, 7, 6, 9], [-1, -1, 1, 1, 3]
FACTS = ("size", "token_list", "parent_list", "is_chain", "depths")


@pytest.mark.parametrize(("tokens", "parents"), [(TOKENS, PARENTS), (TOKENS, [-1, 0, 1, 2, 3]), ([], [])])
def test_integers_and_tensors_make_the_same_tree(tokens: list[int], parents: list[int]) -> None:
    distributions = torch.rand(len(tokens), 10)
    made, given = (
        DraftTree.of(tokens, parents, distributions),
        DraftTree(torch.tensor(tokens), torch.tensor(parents), distributions),
    )
    for fact in FACTS:
        assert getattr(made, fact) == getattr(given, fact)
    assert torch.equal(ancestors_of(made.parent_list), ancestors_of(given.parent_list))
    assert made.tokens.dtype == made.parents.dtype == torch.int64
    assert (made.tokens.tolist(), made.parents.tolist()) == (tokens, parents)
    assert made.tokens is made.tokens
    assert made.probs is distributions


def test_child_tokens_are_those_below_a_node() -> None:
    tree, chain = DraftTree.of(TOKENS, PARENTS), DraftTree.chain(TOKENS)
    assert [tree.child_tokens(node) for node in (-1, 1, 3, 4)] == [[7, 5], [7, 6], [9], []]
    assert [chain.child_tokens(node) for node in (-1, 3, 4)] == [[7], [9], []]


def test_some_nodes_are_a_tree_in_their_order() -> None:
    probs = torch.rand(len(TOKENS), 10)
    some = DraftTree.of(TOKENS, PARENTS, probs, [0.5, 0.4, 0.3, 0.2, 0.1]).only([1, 3, 0, 4])
    assert (some.token_list, some.parent_list, some.scores) == ([5, 6, 7, 9], [-1, 0, -1, 1], [0.4, 0.2, 0.5, 0.1])
    assert some.probs is not None
    assert torch.equal(some.probs, probs[[1, 3, 0, 4]])


def test_a_chain_is_a_tree_of_integers() -> None:
    chain = DraftTree.chain(TOKENS)
    assert (chain.is_chain, chain.parents.tolist(), chain.probs) == (True, [-1, 0, 1, 2, 3], None)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, dataclasses.replace, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_copies_are_whole(copied: Callable[[DraftTree], DraftTree]) -> None:
    tree = copied(DraftTree.of(TOKENS, PARENTS))
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths) == (TOKENS, PARENTS, [1, 1, 2, 2, 3])


def test_a_tree_keeps_its_tokens_when_the_list_changes() -> None:
    tokens = [1, 2, 3]
    tree = DraftTree.chain(tokens)
    tokens.append(4)
    assert (tree.token_list, tree.tokens.tolist()) == ([1, 2, 3], [1, 2, 3])


def test_tokens_are_integers() -> None:
    assert all(type(token) is int for token in DraftTree.chain(list(torch.tensor([1, 2]))).token_list)
    with pytest.raises(TypeError):
        DraftTree.chain([1.5])  # type: ignore[list-item]


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="colour"):
        DraftTree.chain([1]).colour  # noqa: B018
