"""Edits of single logits: no pass over the history, the same bits on the native kernels, masks of any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from speculant.constraints import unpacked
from speculant.errors import RequestError
from speculant.kernels import REFERENCE, NativeEdits, NativeSampler, Sampler, edit, open_kernels, usable_sets
from speculant.params import SamplingParams
from speculant.sampling import Node, distribution, edits_of, sampling_settings
from speculant.types import Request
from tests.automata import bitset
from tests.examples import examples
from tests.models import make_request

V = 70
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}


class Unread(list[int]):
    """A list that must not be iterated."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the history was read")

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("the history was read")


class Masked:
    """A constraint with one mask."""

    is_done = False

    def __init__(self, mask: Any) -> None:
        self._mask = mask

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        return self._mask  # type: ignore[no-any-return]

    def advance(self, tokens: Sequence[int]) -> None: ...

    def rollback(self, n: int) -> None: ...


def masked(mask: Any) -> Request:
    return make_request([1, 2], params=SamplingParams(temperature=1.0), constraint=Masked(mask))


def native(isa: str) -> NativeSampler:
    kernels = open_kernels(isa, 1)
    assert kernels is not None
    return NativeSampler(kernels)


SAMPLERS: list[Sampler] = [REFERENCE, *map(native, usable_sets())]
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=["reference", *usable_sets()])


@every_sampler
def test_penalties_do_not_read_the_history(sampler: Sampler) -> None:
    request = make_request([1, 2, 3], [3, 3, 4], SamplingParams(**PENALTIES))  # type: ignore[arg-type]
    nodes, logits = [Node(request, (3, 5)[:n]) for n in range(3)], torch.linspace(-2, 2, V).repeat(3, 1)
    expected = distribution(logits, nodes, sampler)
    request.tokens = Unread(request.tokens)
    assert torch.equal(distribution(logits, nodes, sampler), expected)


few = st.lists(st.integers(0, V - 1), max_size=12)


@settings(max_examples=examples(60))
@given(
    values=st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
            "presence_penalty": st.sampled_from([0.0, 0.37, -1.1]),
            "frequency_penalty": st.sampled_from([0.0, 0.21, -0.3]),
            "logit_bias": st.dictionaries(st.integers(0, V - 1), st.sampled_from([0.1, -7.3, -float("inf")])),
            "min_tokens": st.sampled_from([0, 3, 20]),
            "max_tokens": st.just(30),
        }
    ),
    prompt=few,
    output=few,
    drafted=few,
    allowed=st.one_of(st.none(), st.sets(st.integers(0, V + 40))),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("isa", usable_sets())
def test_native_edits_have_the_reference_bits(
    isa: str,
    values: dict[str, Any],
    prompt: list[int],
    output: list[int],
    drafted: list[int],
    allowed: set[int] | None,
    seed: int,
) -> None:
    constraint = None if allowed is None else Masked(bitset(allowed))
    ends = frozenset({3, 64})
    request = make_request(prompt, output, SamplingParams(**values), constraint=constraint, end_token_ids=ends)
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(seed))
    expected, found, node = logits[1].clone(), logits.clone(), Node(request, drafted)
    edit(expected, edits_of(node))
    nodes = [Node(make_request([1])), node]
    edits = NativeEdits([None, edits_of(node)])
    native(isa).kernels.probs(found, [sampling_settings(each.params) for each in nodes], edits.address)
    assert torch.equal(found[1], expected)
    assert torch.equal(found[0], logits[0]), "a neighbour's row was edited"


@every_sampler
@pytest.mark.parametrize("allowed", [[0], [31, 32], [5, 69], [1, 100], range(V), []])
def test_masks_forbid_all_but_their_tokens(sampler: Sampler, allowed: Sequence[int]) -> None:
    """A mask may have fewer words than the vocabulary, and more."""
    (row,) = distribution(torch.zeros(1, V), [Node(masked(bitset(allowed)))], sampler)
    assert row.nonzero().flatten().tolist() == [token for token in allowed if token < V]
    (free,) = distribution(torch.zeros(1, V), [Node(masked(None))], sampler)
    assert bool((free > 0).all())


def test_unpacked_masks_have_the_size_of_the_vocabulary() -> None:
    for size in (1, 31, 32, 33, 100):
        assert unpacked(bitset([0, 31, 40]), size).nonzero().flatten().tolist() == [
            token for token in (0, 31, 40) if token < size
        ]


@pytest.mark.parametrize("mask", [torch.zeros(3), torch.zeros(1, 3, dtype=torch.int32), [1, 2], 7])
def test_an_invalid_mask_is_refused(mask: Any) -> None:
    with pytest.raises(RequestError, match="a constraint's mask is"):
        distribution(torch.zeros(1, V), [Node(masked(mask))])
