"""Decoders with random states and gated attention on native kernels: the logits of the reference, and equal bits."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from speculant.cache import MOST_PENDING, KVCache, paged_cache
from speculant.drafting import grow_chains
from speculant.kernels import NativeSampler
from speculant.models import (
    CausalLM,
    Chain,
    DecoderConfig,
    Layer,
    NativeDecoder,
    Norm,
    Segment,
    SequenceInput,
    State,
    build_batch,
)
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances, MostLikely
from speculant.types import DraftTree
from tests.contracts.test_native_descriptions import TOKENS, make_models, random_description
from tests.examples import examples
from tests.models import make_request
from tests.native import SETS, needs_kernels

pytestmark = needs_kernels
OTHERS = [(5 * i * i + i + 2) % 53 for i in range(90)]  # drafted tokens, most of them wrong


def random_state(random: Random) -> State:
    bias, conv_bias = random.random() < 0.5, random.random() < 0.5
    if random.random() < 0.3:
        return State(random.choice([36, 50]), random.choice([1, 3]), bias=bias, conv_bias=conv_bias)
    key_heads, key_dim, head_dim = random.choice([1, 2]), random.choice([4, 9]), random.choice([8, 20])
    heads = key_heads * random.choice([1, 3])
    width, norm = 2 * key_heads * key_dim + heads * head_dim, Norm(1e-6) if random.random() < 0.7 else None
    conv, steps = random.choice([2, 4]), random.choice([None, (0.0, math.inf), (0.2, 1.0)])
    return State(width, conv, heads, key_heads, key_dim, head_dim, norm, bias, conv_bias, steps)


def describe(seed: int) -> DecoderConfig:
    """Describe a decoder of three layers, of which one has gated attention and at least one a state."""
    random, config = Random(seed), random_description(seed)
    gated, with_state = random.sample(range(3), 2)

    def change(index: int, layer: Layer) -> Layer:
        if index == gated:
            return layer.attending(gated=True)
        stated = index == with_state or random.random() < 0.5
        return replace(layer, attention=None, state=random_state(random)) if stated else layer

    return replace(config, layers=tuple(change(*each) for each in enumerate(config.layers)))


def cache_of(model: CausalLM) -> KVCache:
    return paged_cache(model.cache_shape, 60, 5)


def forward(model: CausalLM, cache: KVCache, *inputs: tuple[int, list[int], list[int]]) -> list[Tensor]:
    """Return the logits of a pass over tokens and drafted tokens of sequences."""
    fed = [SequenceInput(seq_id, tokens, DraftTree.chain(drafted)) for seq_id, tokens, drafted in inputs]
    batch = build_batch(fed, cache, torch.device("cpu"))
    logits = model.logits(model.forward(batch, cache.storage).last)
    return [*logits.split(list(map(rows_of, batch.segments)))]


def rows_of(segment: Segment) -> int:
    return segment.num_rows


def passes(model: CausalLM, *chunks: int) -> Tensor:
    cache, first, found = cache_of(model), 0, list[Tensor]()
    for chunk in chunks:
        found += forward(model, cache, (0, TOKENS[first : first + chunk], []))
        first += chunk
    found += forward(model, cache, (0, TOKENS[first : first + 2], TOKENS[first + 2 : first + 7]))
    return torch.cat(found)


@torch.inference_mode()
@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("isa", SETS)
def test_any_states_have_the_logits_of_the_reference(isa: str, seed: int) -> None:
    reference, native = make_models(describe(seed), isa)
    expected, found = passes(reference, 40, 30), passes(native, 40, 30)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(passes(native, 1, 5, 33, 2, 29), found), "a row's result depends on the rows beside it"


@torch.inference_mode()
@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("isa", SETS)
def test_drafts_that_are_rejected_change_no_bit(isa: str, seed: int) -> None:
    """Three sequences in each pass, of which each accepts any number of its drafted tokens."""
    random, (_, native) = Random(seed), make_models(describe(seed), isa, random_threads(seed))
    cache, at_once = cache_of(native), forward(native, cache_of(native), (0, TOKENS, []))[0]
    lengths = [0, 0, 0]
    while min(lengths) < len(TOKENS) - MOST_PENDING:
        inputs = list[tuple[int, list[int], list[int]]]()
        rights = list[int]()
        for seq_id, length in enumerate(lengths):
            most = len(TOKENS) - length - MOST_PENDING
            count = random.choice([1, 1, 1, 2, 9]) if most >= 9 else 1
            drafted, right = random.choice([0, 1, 4, MOST_PENDING - 1]), random.choice([0, 1, 3, MOST_PENDING])
            first = length + count
            text = [*TOKENS[first : first + right], *OTHERS[first + right :]][:drafted]
            rights.append(count + min(right, drafted))
            inputs.append((seq_id, TOKENS[length : length + count], text))
        for seq_id, logits in enumerate(forward(native, cache, *inputs)):
            kept = min(rights[seq_id], len(TOKENS) - lengths[seq_id])
            assert torch.equal(logits[:kept], at_once[lengths[seq_id] : lengths[seq_id] + kept])
            lengths[seq_id] = min(lengths[seq_id] + kept, len(TOKENS) - 1 - MOST_PENDING % 7)
            cache.truncate_to(seq_id, lengths[seq_id])
        cache.check()


def random_threads(seed: int) -> int:
    return 1 + seed % 2


def drawn(model: NativeDecoder, seed: int) -> list[tuple[list[int], Tensor | None]]:
    """Draft for three texts, twice after each other, with some of the first drafts accepted."""
    cache, found = cache_of(model), list[tuple[list[int], Tensor | None]]()
    chances = KeyedChances(NativeSampler(model.kernels))
    texts = [TOKENS[: 20 + 3 * seq_id] for seq_id in range(3)]
    forward(model, cache, *((seq_id, text[:-3], []) for seq_id, text in enumerate(texts)))
    for accepted in (2, 0):
        chains = list[Chain]()
        for seq_id, text in enumerate(texts):
            start = cache.length(seq_id)
            request = make_request(text, params=SamplingParams(temperature=seq_id / 2), seq_id=seq_id)
            chance = chances.draft(request) if seq_id else MostLikely()
            certain = len(text) - start - (1 if seq_id == 2 else 0)
            chains.append(Chain(request, text[start:], 6 - seq_id, chance, certain=certain))
        grow_chains(model, chains, cache, model.vocab_size, NativeSampler(model.kernels))
        found += [(list(chain.tokens), chain.probs) for chain in chains]
        for seq_id, chain in enumerate(chains):
            kept = cache.length(seq_id) if seq_id == 2 and not accepted else len(texts[seq_id]) + accepted
            cache.truncate_to(seq_id, min(kept, cache.length(seq_id)))
            texts[seq_id] = [*texts[seq_id], *chain.tokens[: accepted + 1]]
        cache.check()
    return found


@torch.inference_mode()
@settings(max_examples=examples(30, least=5))
@given(seed=st.integers(0, 10**6))
def test_a_draft_in_one_call_is_its_passes(seed: int) -> None:
    _, native = make_models(describe(seed), SETS[0])
    at_once = drawn(native, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeDecoder, "grow", lambda _, chains, *rest: chains)
        stepwise = drawn(native, seed)
    for (tokens, probs), (others, theirs) in zip(at_once, stepwise, strict=True):
        assert tokens == others
        assert (probs is None) == (theirs is None)
        if probs is not None and theirs is not None:
            assert torch.equal(probs, theirs)


@pytest.mark.parametrize(
    "state",
    [
        State(3 * 513, 4, 1, 1, 513, 513),
        State(36, 17),
        State(24, 4, 1, 1, 8, 8, Norm(1e-6, "layer")),
        State(24, 4, 1, 1, 8, 8, Norm(1e-6, bias=True)),
    ],
)
def test_states_that_the_kernels_do_not_have_are_refused(state: State) -> None:
    config = describe(0)
    layers = (replace(config.layers[0], attention=None, state=state), *config.layers[1:])
    assert NativeDecoder.why_not(config) is None
    assert "state" in (NativeDecoder.why_not(replace(config, layers=layers)) or "")
