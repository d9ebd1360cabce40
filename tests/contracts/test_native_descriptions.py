"""Decoders of random descriptions on the native kernels: the reference's logits, and the same bits for any rows."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from speculant.cache import KVCache, paged_cache
from speculant.drafting import grow_chains
from speculant.kernels import NativeSampler
from speculant.models import (
    ACTIVATIONS,
    NORMS,
    Attention,
    CausalLM,
    Chain,
    Decoder,
    DecoderConfig,
    Embedding,
    Head,
    HeadConfig,
    HeadDecoder,
    Layer,
    Mlp,
    NativeDecoder,
    Norm,
    Rope,
    SequenceInput,
    StateEntry,
    attach,
    build_batch,
)
from speculant.models.families import gemma4_text
from speculant.params import SamplingParams
from speculant.sampling import MostLikely
from speculant.types import DraftTree
from tests.examples import examples
from tests.models import make_request
from tests.native import SETS, needs_kernels, on
from tests.stored_weights import ModuleWeights
from tests.unit.models.families import FULL, GEMMA4, SLIDES, SMALL

pytestmark = needs_kernels
TREE = DraftTree(torch.tensor([3, 9, 4, 3, 17]), torch.tensor([-1, -1, 0, 0, 2]))
TOKENS = [(7 * i * i + 3 * i) % 53 for i in range(90)]


def random_norm(random: Random) -> Norm:
    return Norm(
        random.choice([1e-6, 1e-3]), random.choice(NORMS), random.random() < 0.5, random.choice([0.0, 1.0])
    )  # fmt: skip


def random_heads(random: Random) -> tuple[int, int, int]:
    kv_heads = random.choice([1, 2])
    return kv_heads * random.choice([1, 3]), kv_heads, random.choice([6, 8, 20])


def random_attention(random: Random, heads: int, kv_heads: int, head_dim: int) -> Attention:
    def maybe() -> bool:
        return random.random() < 0.5

    ropes = (
        None, Rope(10000.0), Rope(500.0, dims=2), Rope(100.0, "linear", factor=4.0, scale=1.2),
        Rope(1000.0, query_beta=0.3, original_max_positions=16),
    )  # fmt: skip
    norm = random_norm(random) if maybe() else None
    return Attention(
        heads, kv_heads, head_dim, random.choice(ropes), window=random.choice([None, 1, 20]), qk_norm=norm,
        bias=maybe(), output_bias=maybe(), norm_all_heads=norm is not None and maybe(),
        scale=random.choice([None, 0.3]), softcap=random.choice([None, 2.0]), sinks=maybe(),
    )  # fmt: skip


def random_layer(random: Random, attention: Attention) -> Layer:
    norms = [random_norm(random) if random.random() < 0.6 else None for _ in range(4)]
    mlp = Mlp(random.choice([30, 64]), random.random() < 0.5, random.random() < 0.5, random.choice(ACTIVATIONS))
    return Layer(attention, mlp, *norms, parallel=random.random() < 0.5, residual_scale=random.choice([1.0, 0.4]))


def random_description(seed: int) -> DecoderConfig:
    """Return a description whose optional parts are each there or not, in each of three layers, whose heads differ."""
    random = Random(seed)
    layers = [random_layer(random, random_attention(random, *random_heads(random))) for _ in range(3)]
    tied = random.random() < 0.5
    return DecoderConfig(
        embedding=Embedding(53, 36, random.choice([1.0, 3.0]), random.choice([None, 128])),
        layers=tuple(layers),
        norm=random_norm(random),
        head=Head(
            tied, () if tied else random.choice([(), tuple(range(0, 53, 2))]), random.choice([1.0, 0.3]),
            random.choice([None, 3.0]),
        ),
        max_positions=128,
    )  # fmt: skip


def make_models(config: DecoderConfig, isa: str, threads: int = 2) -> tuple[Decoder, NativeDecoder]:
    """Return random weights on the reference in float64 and on the native kernels."""
    torch.manual_seed(3)
    decoder = Decoder(config).requires_grad_(False).eval()
    for name, parameter in decoder.named_parameters():
        norm = "norm" in name and name.endswith("weight")
        parameter.copy_((1.0 if norm else 0.0) + (0.2 if parameter.dim() < 2 else 0.15) * torch.randn(parameter.shape))
    decoder.tie_head()
    native = NativeDecoder(config, ModuleWeights(decoder), torch.float32, on(isa, threads))
    return decoder.double(), native


def forward(model: CausalLM, cache: KVCache, tokens: list[int], tree: DraftTree | None = None) -> tuple[Tensor, ...]:
    """Return the logits of the next rows of a sequence, and the input of each layer and the last one's output."""
    batch = build_batch([SequenceInput(0, tokens, tree or DraftTree.empty())], cache, torch.device("cpu"))
    hidden = model.forward(batch, cache.storage, (3, 0, 1, 2))
    return (model.logits(hidden.last), *hidden.taps)


def passes(model: CausalLM, *chunks: int) -> list[Tensor]:
    """Return the logits and taps of a text that is fed in chunks, with a tree at its end."""
    cache, first, found = paged_cache(model.cache_shape, 24, 5), 0, []
    for chunk in chunks:
        found.append(forward(model, cache, TOKENS[first : first + chunk]))
        first += chunk
    found.append(forward(model, cache, TOKENS[first : first + 2], TREE))
    return [torch.cat(of_one) for of_one in zip(*found, strict=True)]


@torch.inference_mode()
@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("isa", SETS)
def test_any_description_has_the_logits_of_the_reference(isa: str, seed: int) -> None:
    reference, native = make_models(random_description(seed), isa)
    expected, found = passes(reference, 40, 30), passes(native, 40, 30)
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-4)
    for one, other in zip(found, passes(native, 1, 5, 33, 2, 29), strict=True):
        assert torch.equal(one, other), "a row's result depends on the rows beside it"


@torch.inference_mode()
@settings(max_examples=examples(30, least=5))
@given(seed=st.integers(0, 10**6))
def test_a_draft_of_any_description_is_its_passes(seed: int) -> None:
    """One call that draws several tokens, against a pass for each."""
    _, native = make_models(random_description(seed), SETS[0])
    caches = [paged_cache(native.cache_shape, 24, 5) for _ in range(2)]
    for cache in caches:
        forward(native, cache, TOKENS[:21])
    request = make_request([*TOKENS[:24]], params=SamplingParams(temperature=0.0), seq_id=0)
    chain = Chain(request, TOKENS[21:24], 6, MostLikely())
    grow_chains(native, [chain], caches[0], native.vocab_size, NativeSampler(native.kernels))
    rows, expected = TOKENS[21:24], list[int]()
    for _ in range(6):
        expected.append(int(forward(native, caches[1], rows)[0][-1].argmax()))
        rows = expected[-1:]
    assert [*chain.tokens] == expected


@torch.inference_mode()
def test_a_truncated_model_has_the_tables_of_its_own_ropes() -> None:
    config = random_description(1)
    layers = [
        replace(layer, attention=replace(layer.attention, rope=rope, window=None))
        for layer, rope in zip(config.layers, (None, Rope(50.0), Rope(1000.0)), strict=True)
    ]
    reference, native = make_models(replace(config, layers=tuple(layers)), SETS[0])
    cache, other = (paged_cache(native.cache_shape, 24, 5) for _ in range(2))
    for length in (1, 2):
        model, theirs = native.truncated(length), reference.truncated(length)
        batch = build_batch([SequenceInput(length, TOKENS[:30], DraftTree.empty())], cache, torch.device("cpu"))
        found = model.logits(model.forward(batch, cache.storage).last)
        other = paged_cache(theirs.cache_shape, 24, 5)
        batch = build_batch([SequenceInput(length, TOKENS[:30], DraftTree.empty())], other, torch.device("cpu"))
        expected = theirs.logits(theirs.forward(batch, other.storage).last)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


HEADS = [(4, 16), (16, 4), (8, 6), (512, 16), (16, 512)]
ROPES = {
    "equal": {FULL: {"rope_theta": 1e4}, SLIDES: {"rope_theta": 1e4}},
    "equal shares": {key: {"rope_type": "proportional", "partial_rotary_factor": 0.5} for key in (FULL, SLIDES)},
    "other": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}, SLIDES: {"rope_theta": 100.0}},
}


@torch.inference_mode()
@pytest.mark.parametrize("ropes", ROPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kinds_of_layers_may_differ_in_their_heads_alone(heads: tuple[int, int], ropes: str) -> None:
    hf = {**SMALL, **GEMMA4, "head_dim": heads[0], "global_head_dim": heads[1], "rope_parameters": ROPES[ropes]}
    config = gemma4_text.read_config({**hf, "layer_types": [SLIDES, FULL, SLIDES, FULL]})
    assert {of.rotated for of in config.attentions} == {*heads}
    for theirs, ours in zip(*(passes(model, 20) for model in make_models(config, SETS[0])), strict=True):
        assert (ours - theirs).norm() < 2e-3 * theirs.norm()  # scores of many dimensions are large


@torch.inference_mode()
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("entry", [StateEntry.INPUT, StateEntry.NORMED, StateEntry.ATTENTION])
def test_layers_of_a_head_may_differ_in_their_heads_alone(entry: StateEntry, heads: tuple[int, int]) -> None:
    reference, native = make_models(random_description(2), SETS[0])
    width, norm = reference.config.hidden_size, Norm(1e-6)
    layers = tuple(Layer(Attention(2, 1, dim, Rope(1e4)), Mlp(30), norm, norm) for dim in heads)
    config = HeadConfig(DecoderConfig(Embedding(53, width), layers, norm, Head(), max_positions=128), entry)
    torch.manual_seed(4)
    own = HeadDecoder(config, reference).requires_grad_(False).double()
    attached, found = attach(native, config, ModuleWeights(own)), []
    states = torch.randn(30, width, dtype=torch.float64)
    for head in (own, attached):
        cache = paged_cache(head.cache_shape, 24, 5)
        batch = build_batch([SequenceInput(0, TOKENS[:30], DraftTree.empty())], cache, torch.device("cpu"))
        found.append(head.forward(replace(batch, hidden=states), cache.storage).last.double())
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
