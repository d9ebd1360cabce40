"""The option `tree` of a draft model: its forms, and refused values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant import LLM, SamplingParams
from speculant.drafting import ParallelChains, StaticTree, read_tree
from speculant.errors import ConfigError

DISTRIBUTION = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)


def likeliest(distribution: Tensor) -> int:
    return int(distribution.argmax())


def test_widths_and_ranks_name_the_same_shape() -> None:
    assert read_tree(None) is None
    assert read_tree([2, 1]) == read_tree([[0], [1], [0, 0], [1, 0]])
    assert read_tree((3,)) == StaticTree(frozenset({(0,), (1,), (2,)}))


@pytest.mark.parametrize(
    "given", [[], 3, "3,2", [0], [-1], [True], [2, "1"], [[]], [[0], [2]], [[0, 0]], [[0], [0, 1]], [[-1]], [["a"]]]
)
def test_other_shapes_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="is not the shape of a tree"):
        read_tree(given)


def test_children_are_drawn_without_replacement_with_probs() -> None:
    first, second = StaticTree.of_widths([2]).children((), [DISTRIBUTION], likeliest, distinct=False)
    assert (first[0], second[0]) == (1, 2)
    assert torch.equal(first[2], DISTRIBUTION)
    assert torch.allclose(second[2], torch.tensor([1 / 6, 0, 1 / 2, 1 / 3], dtype=torch.float64))
    assert StaticTree.of_widths([2]).children(first[1], [DISTRIBUTION], likeliest, distinct=False) == []


def test_a_distribution_with_too_few_tokens_has_fewer_children() -> None:
    certain = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert [token for token, *_ in StaticTree.of_widths([3]).children((), [certain], likeliest, distinct=False)] == [1]


def test_draws_that_agree_are_one_child() -> None:
    said = iter([2, 1, 2])
    draws = ParallelChains((0, 0, 0), 2)
    children = draws.children(draws.root, [DISTRIBUTION], lambda distribution: next(said), distinct=False)
    assert [(token, node) for token, node, _ in children] == [(2, ((0, 0), 1)), (1, ((0,), 1))]
    assert draws.children(((0, 0), 2), [DISTRIBUTION], likeliest, distinct=False) == []


def test_models_that_agree_share_a_child_and_laggards_add_none() -> None:
    draws, other = ParallelChains((0, 1, 1), 1), torch.tensor([0.5, 0.4, 0.1, 0.0], dtype=torch.float64)
    children = draws.children(draws.root, [DISTRIBUTION, other], likeliest, distinct=True)
    assert [(token, node) for token, node, _ in children] == [(1, ((0, 1), 1)), (0, ((1,), 1))]
    children = draws.children(draws.root, [None, other], likeliest, distinct=True)
    assert [token for token, *_ in children] == [0, 1]


def test_a_tree_is_drafted_through_the_public_door() -> None:
    config = {"method": "draft_model", "model": "demo", "tree": [2, 1], "draft_length": "fixed"}
    llm = LLM("demo", speculative_config=config, max_model_len=128)
    plain = LLM("demo", max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (out,), (expected,) = (each.generate(["def read(path):"], params) for each in (llm, plain))
    assert out.outputs[0].token_ids == expected.outputs[0].token_ids
    figures = out.metrics.speculative_decoding
    assert figures.num_draft_tokens > 3 * figures.num_spec_steps, "four nodes a step, but for the last ones"
    (sampled,) = llm.generate(["def read(path):"], SamplingParams(max_tokens=16))
    assert sampled.metrics.verification == "traversal"
    with pytest.raises(ConfigError, match="understands chains"):
        LLM("demo", speculative_config={**config, "verification": "block"})


@pytest.mark.parametrize("widths", [[3, 2, 1], [1, 1, 1, 1], [4, 3], [2, 2, 2, 2]])
def test_static_tree_has_a_shape_for_every_size(widths: list[int]) -> None:
    whole = StaticTree.of_widths(widths)
    shapes = [whole.within(size) for size in range(1, whole.most_nodes + 1)]
    for size, shape in enumerate(shapes, start=1):
        assert shape.most_nodes == size
        assert shape.is_whole()
    for smaller, larger in itertools.pairwise(shapes):
        assert smaller.paths < larger.paths
    assert shapes[-1] == whole


def test_static_tree_prefers_the_likeliest_nodes() -> None:
    """Five of nine nodes: the chain of first choices comes before a third choice."""
    assert StaticTree.of_widths([3, 2, 1]).within(4).paths == {(0,), (0, 0), (0, 0, 0), (1,)}
