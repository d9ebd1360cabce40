"""The distribution of a row: equal to a plain numpy one, equal alone and in any batch, lowest ids on ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from speculant.params import SamplingParams
from speculant.sampling import Node, distribution
from tests.examples import examples
from tests.models import make_request
from tests.unit.sampling.reference import edited, is_clear_cut, reference_distribution

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ENDS = frozenset({1})

settings_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 300]),
        "top_p": st.sampled_from([1.0, 1.0, 0.01, 0.3, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.6, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.4, -1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.3, -0.2]),
        "logit_bias": st.sampled_from([{}, {}, {0: 1.5}, {0: -np.inf, 2: 0.1}]),
        "min_tokens": st.sampled_from([0, 0, 3, 6]),
    }
)
scores_strategy = st.lists(
    st.one_of(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.5]), st.floats(-8, 8, width=16), st.just(-np.inf)),
    min_size=3,
    max_size=12,
)
tokens_strategy = st.lists(st.integers(0, 2), max_size=5)


def node(
    values: dict[str, Any], prompt: Sequence[int] = (0,), output: Sequence[int] = (), drafted: Sequence[int] = ()
) -> Node:
    """Make a place in a request where a token is chosen."""
    params = SamplingParams(**values)
    return Node(make_request(prompt, output, params, end_token_ids=ENDS), drafted)


def distribution_of(logits: Tensor, place: Node) -> Tensor:
    return distribution(logits[None], [place])[0]


@given(
    values=settings_strategy,
    scores=scores_strategy,
    dtype=st.sampled_from(DTYPES),
    prompt=tokens_strategy,
    output=tokens_strategy,
    drafted=tokens_strategy,
)
def test_it_is_the_documented_distribution(
    values: dict[str, Any],
    scores: list[float],
    dtype: torch.dtype,
    prompt: list[int],
    output: list[int],
    drafted: list[int],
) -> None:
    logits, place = torch.tensor(scores, dtype=dtype), node(values, prompt, output, drafted)
    wide = logits.double().numpy() if dtype == torch.float64 else logits.float().numpy()
    said = [*output, *drafted]
    ends = ENDS if len(said) < place.params.min_tokens else frozenset()
    assume(np.isfinite(edited(wide, place.params, prompt, said, ends)).any())  # else everything is banned
    expected = reference_distribution(wide, place.params, prompt, said, ends)
    without_ends = wide.copy()
    without_ends[list(ends)] = -np.inf
    assume(is_clear_cut(without_ends, place.params, (prompt, said)))
    distribution = distribution_of(logits, place)
    assert distribution.dtype == torch.float64
    np.testing.assert_allclose(distribution.numpy(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


@settings(max_examples=examples(40))
@given(
    rows=st.lists(st.tuples(settings_strategy, tokens_strategy), min_size=2, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([5, 65, 700]),
    spread=st.sampled_from([0.0, 0.3, 4.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_row_s_distribution_depends_on_that_row_alone(
    rows: list[tuple[dict[str, Any], list[int]]], seed: int, vocab_size: int, spread: float, dtype: torch.dtype
) -> None:
    """Bit for bit, whatever the other rows ask for: greedy, plain and filtered ones, wider looks and narrower."""
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(len(rows), vocab_size, generator=generator)).to(dtype)
    places = [node(values, output=output) for values, output in rows]
    together = distribution(logits, places)
    for row, place in enumerate(places):
        assert torch.equal(together[row], distribution_of(logits[row], place))


def test_rows_of_a_wide_vocabulary_are_summed_alone_too() -> None:
    """Enough columns that a reduction over one row could be split otherwise than one over several."""
    logits = torch.randn(4, 40_000, generator=torch.Generator().manual_seed(5))
    places = [node({"top_p": top_p}) for top_p in (0.5, 0.9, 0.97, 1.0)]
    together = distribution(logits, places)
    for row, place in enumerate(places):
        assert torch.equal(together[row], distribution_of(logits[row], place))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("values", "kept"),
    [({"top_p": 0.9}, 4500), ({"min_p": 1.0}, 5000), ({"top_k": 700}, 700), ({"top_p": 0.9, "top_k": 1000}, 900)],
)
def test_a_flat_distribution_is_looked_at_as_far_as_needed(
    dtype: torch.dtype, values: dict[str, Any], kept: int
) -> None:
    distribution = distribution_of(torch.full((5000,), 1.5, dtype=dtype), node(values))
    expected = torch.zeros(5000, dtype=torch.float64)
    expected[:kept] = 1 / kept  # equal scores: the lowest ids
    torch.testing.assert_close(distribution, expected, rtol=0, atol=1e-15)


def test_a_long_tail_is_cut_at_top_p() -> None:
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for top_p in (0.2, 0.8, 0.99):
        expected = reference_distribution(scores.numpy(), SamplingParams(top_p=top_p), (), ())
        assert np.count_nonzero(expected) > 64
        np.testing.assert_allclose(
            distribution_of(scores, node({"top_p": top_p})).numpy(), expected, rtol=0, atol=1e-13
        )


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"temperature": 0}, [1]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 0]),
        ({"top_k": 4}, [1, 3, 0, 2]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.75}, [1, 3, 0]),
        ({"top_k": 5, "top_p": 0.75}, [1, 3, 0]),
    ],
)
def test_of_equals_at_the_cut_the_lowest_ids_stay(values: dict[str, Any], kept: list[int]) -> None:
    scores = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, -5.0])
    distribution = distribution_of(scores, node(values))
    assert sorted(kept) == distribution.nonzero().flatten().tolist()


@given(
    values=settings_strategy,
    scores=scores_strategy,
    output=tokens_strategy,
    drafted=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_drafted_ancestors_count_like_committed_tokens(
    values: dict[str, Any], scores: list[float], output: list[int], drafted: list[int]
) -> None:
    logits = torch.tensor(scores, dtype=torch.float64)
    assume(torch.isfinite(logits[3:]).any())  # something that no setting bans
    drafted_distribution = distribution_of(logits, node(values, output=output, drafted=drafted))
    assert torch.equal(drafted_distribution, distribution_of(logits, node(values, output=[*output, *drafted])))


def test_every_node_of_a_draft_has_a_history_of_its_own() -> None:
    logits = torch.zeros(3, 4, dtype=torch.float64)
    values = {"frequency_penalty": 1.0}
    distributions = distribution(logits, [node(values, output=[3], drafted=path) for path in ([], [0], [0, 0])])
    weights = torch.exp(torch.tensor([[0.0, 0, 0, -1], [-1, 0, 0, -1], [-2, 0, 0, -1]], dtype=torch.float64))
    torch.testing.assert_close(distributions, weights / weights.sum(-1, keepdim=True))


def test_only_the_repetition_penalty_counts_the_prompt() -> None:
    logits = torch.tensor([2.0, 2.0, 2.0, -2.0], dtype=torch.float64)
    distribution = distribution_of(logits, node({"presence_penalty": 1.0}, prompt=[0], output=[1, 1]))
    assert distribution[0] == distribution[2] > distribution[1]
    distribution = distribution_of(logits, node({"repetition_penalty": 2.0}, prompt=[0, 3], output=[1, 1]))
    expected = torch.softmax(torch.tensor([1.0, 1.0, 2.0, -4.0], dtype=torch.float64), -1)
    torch.testing.assert_close(distribution, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_are_banned_until_min_tokens(temperature: float) -> None:
    values = {"temperature": temperature, "min_tokens": 3}
    logits = torch.tensor([0.0, 5.0, 1.0])
    for output, drafted in (([], []), ([0, 0], []), ([0], [2])):
        assert distribution_of(logits, node(values, output=output, drafted=drafted))[1] == 0
    for output, drafted in (([0, 0, 0], []), ([0], [2, 2])):
        assert distribution_of(logits, node(values, output=output, drafted=drafted))[1] > 0.9


def test_logits_are_not_written_to() -> None:
    for dtype in DTYPES:
        logits = torch.randn(2, 6).to(dtype)
        before = logits.clone()
        values = {"logit_bias": {0: 3.0}, "repetition_penalty": 1.5, "presence_penalty": 1.0, "min_tokens": 4}
        distribution(logits, [node(values, output=[1, 2]), node({**values, "top_k": 2}, output=[1, 2])])
        assert torch.equal(logits, before)


@pytest.mark.parametrize("values", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}, {"top_k": 3, "top_p": 0.9}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_temperature_is_almost_greedy_and_finite(dtype: torch.dtype, values: dict[str, Any]) -> None:
    logits = torch.tensor([30.0, -20.0, 31.0, 31.0, -torch.inf]).to(dtype)
    distribution = distribution_of(logits, node({**values, "temperature": 1e-10}))
    torch.testing.assert_close(distribution, torch.tensor([0, 0, 0.5, 0.5, 0], dtype=torch.float64))


def test_a_bias_is_as_precise_as_the_logits() -> None:
    distribution = distribution_of(torch.zeros(2, dtype=torch.float64), node({"logit_bias": {0: 0.1}}))
    assert float(distribution[0]) == pytest.approx(1 / (1 + np.exp(-0.1)), rel=1e-15)


def test_a_token_can_be_banned_and_forced() -> None:
    logits = torch.tensor([3.0, 0.0, 1.0])
    for values in ({}, {"top_p": 0.9}, {"temperature": 0}):
        assert distribution_of(logits, node({**values, "logit_bias": {0: -float("inf")}}))[0] == 0
        assert distribution_of(logits, node({**values, "logit_bias": {1: 1000.0}}))[1] == 1
