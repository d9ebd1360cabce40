"""A pass returns the hidden states that enter its layers: those of transformers, with the same bits in any batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from speculant.cache.storage import paged_cache
from speculant.errors import ConfigError
from speculant.models.base import CausalLM, Hidden, SequenceInput, build_batch
from speculant.models.native.decoder import NativeDecoder
from speculant.types import DraftTree
from tests.small_models import MODELS, NATIVE, make_model
from tests.unit.models.families import Pair, make_pair, random_tokens

TAPS = (0, 2, 3, 1, 2)  # in any order, and one twice; the models here have up to 3 layers
PROMPT = random_tokens(40)
TREE = DraftTree.of([3, PROMPT[31], 9, PROMPT[32], 5], [-1, -1, 1, 1, 3])
PATH = (1, 3)  # the nodes that go on as the prompt does
CLOSE = {"atol": 1e-4, "rtol": 0, "check_dtype": False}


class Taps:
    """A model with a cache that is fed step by step and tells all hidden states, [T, hidden] each."""

    def __init__(self, model: CausalLM, taps: Sequence[int]) -> None:
        self.model, self.taps = model, taps
        self.cache = paged_cache(model.cache_shape, 64, 5)

    @torch.inference_mode()
    def feed(self, *feeds: SequenceInput) -> Hidden:
        """Run one pass."""
        return self.model.forward(build_batch(feeds, self.cache, torch.device("cpu")), self.cache.storage, self.taps)

    def extend(self, *sizes: int) -> list[Tensor]:
        """Feed the prompt to sequence 0 in chunks; return the last hidden states and the taps of all rows."""
        passes, first = list[Hidden](), 0
        for size in sizes:
            passes.append(self.feed(SequenceInput(0, PROMPT[first : first + size], DraftTree.empty())))
            first += size
        return [torch.cat(states) for states in zip(*(states_of(each) for each in passes), strict=True)]


def states_of(hidden: Hidden) -> list[Tensor]:
    return [hidden.last, *hidden.taps]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Return what loads a small Llama beside transformers' on a backend, both in float64 or ours on native."""
    wide = make_pair(tmp_path_factory.mktemp("checkpoint"), "llama", "llama3.2").in_float64()
    return functools.cache(lambda backend: wide.on_native() if backend == "native" else wide)


@pytest.fixture(params=["reference", pytest.param("native", marks=NATIVE)])
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


@torch.inference_mode()
def transformers_states(pair: Pair, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return transformers' last hidden states, and what enters each layer and leaves the last one."""
    leaving = list[Tensor]()
    hook = pair.theirs.model.norm.register_forward_pre_hook(lambda norm, inputs: leaving.append(inputs[0][0]))
    found = pair.theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    return found[-1][0], [*(states[0] for states in found[:-1]), *leaving]


def test_taps_are_transformers_hidden_states(pair: Pair) -> None:
    last, entering = transformers_states(pair, PROMPT)
    assert (pair.ours.num_layers, pair.ours.hidden_size) == (len(entering) - 1, last.shape[1])
    seen = Taps(pair.ours, TAPS).extend(3, 20, 17)
    for states, expected in zip(seen, [last, *(entering[tap] for tap in TAPS)], strict=True):
        allowed = 1e-5 * float(expected.abs().max())  # states are as large as 20, and rounding grows with the largest
        torch.testing.assert_close(states, expected, **{**CLOSE, "atol": allowed})


def test_taps_change_no_pass(pair: Pair) -> None:
    plain = Taps(pair.ours, ()).extend(40)
    assert len(plain) == 1, "nobody asked for taps"
    assert torch.equal(Taps(pair.ours, TAPS).extend(40)[0], plain[0])
    assert torch.equal(Taps(pair.ours, ()).extend(40)[0], plain[0])
    if isinstance(pair.ours, NativeDecoder):
        assert not any(op.copy for op in pair.ours.program.ops)


@pytest.mark.parametrize("tap", [-1, 4, 1000])
def test_taps_of_missing_layers_are_refused(pair: Pair, tap: int) -> None:
    with pytest.raises(ConfigError, match=rf"layer {tap} .* 3 layers"):
        Taps(pair.ours, (0, tap)).extend(1)
    Taps(pair.ours, (0, 3)).extend(1)


def test_hidden_states_outlive_the_next_pass(pair: Pair) -> None:
    session = Taps(pair.ours, TAPS)
    first = session.feed(SequenceInput(0, PROMPT[:9], DraftTree.empty()))
    before = [states.clone() for states in states_of(first)]
    session.feed(SequenceInput(0, PROMPT[9:18], DraftTree.empty()))
    assert all(torch.equal(*both) for both in zip(states_of(first), before, strict=True))


def assert_same(seen: Sequence[Tensor], expected: Sequence[Tensor], model: CausalLM) -> None:
    """Compare hidden states: bit for bit where rows are invariant, else but for float64's rounding."""
    slack = 0.0 if isinstance(model, NativeDecoder) else 1e-10
    for states, others in zip(seen, expected, strict=True):
        torch.testing.assert_close(states, others, atol=slack, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_taps_do_not_depend_on_the_batch(name: str) -> None:
    """Whole or in chunks, alone or beside others, in a chain or a tree, by one thread or two."""
    model = make_model(name)
    taps = (1, 0, 2)
    whole = Taps(make_model(name, threads=2), taps).extend(40)
    assert_same(Taps(model, taps).extend(1, 2, 13, 24), whole, model)

    session = Taps(model, taps)
    session.extend(20)
    fed = [(7, random_tokens(9, seed=7)), (0, PROMPT[20:31]), (8, random_tokens(30, seed=8))]
    hidden = session.feed(*(SequenceInput(seq_id, tokens, TREE) for seq_id, tokens in fed))
    own = slice(9 + TREE.size, 9 + TREE.size + 11 + TREE.size)  # sequence 0's rows: 11 of the chain, then the nodes
    chain_and_path = [*range(11), *(11 + node for node in PATH)]
    assert_same([states[own][chain_and_path] for states in states_of(hidden)], [each[20:33] for each in whole], model)
