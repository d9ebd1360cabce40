"""Encoder-decoder models on the native kernels: the reference's logits, the same bits for any batch, chunk and tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant.cache import KVCache
from speculant.drafting import HeadFolder
from speculant.drafting.heads import eagle
from speculant.errors import RequestError
from speculant.kernels import NativeSampler, Type
from speculant.models import (
    ROUNDINGS,
    Chain,
    Decoder,
    NativeDecoder,
    Norm,
    SequenceInput,
    build_batch,
    pass_matrices,
    tensor_shapes,
)
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances, sampling_settings
from speculant.types import DraftTree
from tests.descriptions import BART, describe_pair
from tests.exactness.test_native_decoder import CACHES, packed
from tests.heads import write_eagle
from tests.models import make_request
from tests.native import PAIRED_SETS, SETS, needs_kernels, on

pytestmark = needs_kernels
CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "T5": {},
    "gated": {"gated": True, "activation": "gelu_tanh", "tied": False, "head_scale": 1.0},
    "own distances": {"own_distances": True, "num_kv_heads": 2, "buckets": 6, "max_distance": 9},
    "biases": {"bias": True, "norm": Norm(1e-5, "layer", bias=True), "scale": None, "activation": "gelu"},
    "BART": BART,
    "sinusoids": {**BART, "embedding": {"positions": 1024, "sinusoids": True, "scale": 32**0.5}, "tied": False},
    "odd": {"hidden_size": 36, "intermediate_size": 50, "vocab_size": 101, "head_dim": 6, "encoder_layers": 1},
}
LENGTHS = [1, 63, 64, 65, 512, 513, 700]
TEXT = 150  # beyond max_distance
SOURCE, OTHERS = -1, (-2, -3)  # their sequences
Model = Decoder | NativeDecoder


def make_reference(dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(describe_pair(**changes)).requires_grad_(False).eval()
    for name, parameter in decoder.named_parameters():
        scale = 1.0 if "distances" in name else 0.2
        parameter.copy_((1 if name.endswith("norm.weight") else 0) + scale * torch.randn(parameter.shape))
    decoder.tie_head()
    return decoder.to(dtype)


def tokens_of(seed: int, count: int, vocab_size: int = 96) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(0, vocab_size, (count,), generator=generator).tolist()]


@torch.inference_mode()
def encode(model: Model, cache: KVCache, sources: Mapping[int, Sequence[int]]) -> list[Tensor]:
    """Encode sources in one pass; return each one's result."""
    inputs = [SequenceInput(seq_id, tokens, DraftTree.empty()) for seq_id, tokens in sources.items()]
    found = model.encode(build_batch(inputs, cache, CPU), cache.storage)
    return [*found.split([len(tokens) for tokens in sources.values()])]


@torch.inference_mode()
def feed(model: Model, cache: KVCache, tokens: Sequence[int], chunks: Sequence[int], seq_id: int = 1) -> Tensor:
    """Feed a text of the source in chunks; return the logits of all rows."""
    rows, first = [], 0
    for count in chunks:
        text = SequenceInput(seq_id, tokens[first : first + count], DraftTree.empty(), source=SOURCE)
        batch = build_batch([text], cache, CPU)
        rows.append(model.logits(model.forward(batch, cache.storage).last))
        first += count
    return torch.cat(rows)


def logits(model: Model, length: int, cache: str = "paged", chunks: Sequence[int] = (TEXT,)) -> tuple[Tensor, Tensor]:
    """Return the encoder's result for a source of `length` tokens, and the logits of a text with it."""
    made, size = CACHES[cache](model.cache_shape), model.vocab_size
    (encoded,) = encode(model, made, {SOURCE: tokens_of(length, length, size)})
    return encoded, feed(model, made, tokens_of(1, TEXT, size), chunks)


@pytest.mark.covering(1)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("isa", SETS)
def test_logits_of_sources_are_the_reference_s(isa: str, variant: str, length: int) -> None:
    decoder = make_reference(**VARIANTS[variant])
    found, expected = logits(packed(decoder, on(isa)), length), logits(decoder.double(), length)
    for seen, known in zip(found, expected, strict=True):
        assert float((seen - known).abs().max()) < 1e-4 * max(1.0, float(known.abs().max()))


@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("isa", SETS)
def test_bfloat16_logits_of_sources_are_near(isa: str, variant: str) -> None:
    """The weights are the same numbers, and both caches are rounded to bfloat16.

    Some sets also round activations. Torch rounds them in each layer's every operation, so its error is the larger one.
    """
    decoder = make_reference(torch.bfloat16, **VARIANTS[variant])
    found, rounded = logits(packed(decoder, on(isa)), 65), logits(decoder, 65)
    expected = logits(decoder.float().storing_keys_as(torch.bfloat16), 65)
    for seen, known, torchs in zip(found, expected, rounded, strict=True):
        most = float((torchs - known).norm()) if isa in PAIRED_SETS else 0.003 * float(known.norm())
        assert float((seen - known).norm()) < most


@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("isa", SETS)
def test_logits_of_sources_of_coded_weights_are_plain_ones(isa: str, variant: str) -> None:
    decoder, kernels = make_reference(torch.bfloat16, **VARIANTS[variant]), on(isa)
    chunks = [1, 2, 3, 17, 64, 63]
    plain, coded = (logits(packed(decoder, kernels, coded=each), 131, chunks=chunks) for each in (False, True))
    for one, other in zip(plain, coded, strict=True):
        assert torch.equal(one, other)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("quantization", [None, *ROUNDINGS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_and_threads_change_no_bit_of_sources(
    variant: str, dtype: torch.dtype, quantization: str | None, stored: torch.dtype | None
) -> None:
    decoder = make_reference(dtype, **VARIANTS[variant])
    rounding = ROUNDINGS[quantization] if quantization else None
    native, alone = (packed(decoder, on(threads=threads), rounding) for threads in (2, 1))
    if stored is not None:
        native, alone = native.storing_keys_as(stored), alone.storing_keys_as(stored)
    for length in (5, 700):
        encoded, whole = logits(native, length)
        assert bool(whole.isfinite().all())
        for model, cache, chunks in (
            (native, "slotted", [1] * 20 + [130]), (native, "paged by 5", [7, 13, 130]), (alone, "paged", [131, 18, 1]),
        ):  # fmt: skip
            again, pieces = logits(model, length, cache, chunks)
            assert torch.equal(again, encoded)
            assert torch.equal(pieces, whole), (cache, chunks[:3])


@pytest.mark.covering(1)
@pytest.mark.parametrize("length", [1, 63, 64, 65])
@pytest.mark.parametrize("isa", SETS)
@torch.inference_mode()
def test_rounded_keys_of_sources_are_near_the_reference_s(isa: str, length: int) -> None:
    decoder = make_reference()
    native = packed(decoder, on(isa)).storing_keys_as(torch.int8)
    found, expected = logits(native, length), logits(decoder.storing_keys_as(torch.int8), length)
    for seen, known in zip(found, expected, strict=True):
        assert float((seen - known).norm() / known.norm()) < 1e-3


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", [None, *ROUNDINGS])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16, 63, 131])
@torch.inference_mode()
def test_a_source_never_sees_its_neighbours(rows: int, quantization: str | None) -> None:
    """Sources encoded beside others, and texts fed beside others with the same source or another one."""
    native = packed(make_reference(torch.bfloat16), on(), ROUNDINGS[quantization] if quantization else None)
    source, others = tokens_of(7, 65), [tokens_of(seed, rows) for seed in (8, 9)]
    cache, alone = (CACHES["paged by 5"](native.cache_shape) for _ in range(2))
    (expected,) = encode(native, alone, {SOURCE: source})
    found = encode(native, cache, {OTHERS[0]: others[0], SOURCE: source, OTHERS[1]: others[1]})[1]
    assert torch.equal(found, expected)
    text = tokens_of(1, 40)
    chain = feed(native, alone, text, [39, 1])
    feed(native, cache, text, [39])
    inputs = [SequenceInput(seq, tokens_of(seq, 1 + seq % rows), DraftTree.empty(), source=source_id)
              for seq, source_id in ((10, OTHERS[0]), (11, SOURCE), (12, OTHERS[1]))]  # fmt: skip
    inputs.insert(2, SequenceInput(1, text[39:], DraftTree.empty(), source=SOURCE))
    row = sum(len(each.tokens) for each in inputs[:2])
    batch = build_batch(inputs, cache, CPU)
    seen = native.logits(native.forward(batch, cache.storage).last)
    assert torch.equal(seen[row : row + 1], chain[39:])
    fresh = CACHES["slotted"](native.cache_shape)
    encode(native, fresh, {SOURCE: source})
    first = feed(native, fresh, inputs[1].tokens, [len(inputs[1].tokens)], 11)
    assert torch.equal(seen[row - len(first) : row], first), "two texts share a source"


@pytest.mark.covering(1)
@pytest.mark.parametrize("length", [1, 64, 513])
@pytest.mark.parametrize("context", [5, 62, 140])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_path_of_a_tree_with_a_source_is_a_chain(dtype: torch.dtype, context: int, length: int) -> None:
    """The logits along a path, and those after it is kept, equal those of the path alone."""
    native = packed(make_reference(dtype), on())
    text, size = tokens_of(4, context + 5), native.vocab_size
    path = text[context : context + 4]
    other = [(token + 1) % size for token in path]
    tree = DraftTree.of([other[0], path[0], other[1], path[1], other[2], path[2], path[3]], [-1, -1, 1, 1, 2, 3, 5])
    nodes = (1, 3, 5, 6)
    cache, alone = CACHES["paged by 5"](native.cache_shape), CACHES["slotted"](native.cache_shape)
    for each in (cache, alone):
        encode(native, each, {SOURCE: tokens_of(9, length)})
    chain = feed(native, alone, text, [context, 4, 1])
    feed(native, cache, text, [context - 1])
    rows = SequenceInput(1, text[context - 1 : context], tree, source=SOURCE)
    seen = native.logits(native.forward(build_batch([rows], cache, CPU), cache.storage).last)
    assert torch.equal(seen[[0, *(1 + node for node in nodes)]], chain[context - 1 : context + 4])
    cache.compact(1, context, nodes)
    assert torch.equal(feed(native, cache, text[context + 4 :], [1]), chain[-1:])


DRAFTS: dict[str, dict[str, Any]] = {
    "chains": {}, "trees": {"widths": (2, 1, 2, 0, 1, 0, 0)}, "dynamic trees": {"topk": 2},
}  # fmt: skip


def make_chains(native: NativeDecoder, kind: str) -> list[Chain]:
    """Make drafts of three texts, the first two with one source."""
    chances, made = KeyedChances(NativeSampler(native.kernels)), []
    for seq_id, source in ((1, SOURCE), (2, SOURCE), (3, OTHERS[0])):
        tokens, params = tokens_of(seq_id, 9 + seq_id), SamplingParams(temperature=0.9)
        request = make_request(tokens, params=params, seq_id=seq_id, shared_noise=False)
        chain = Chain(request, tokens, 6, chances.draft(request), source=source, **DRAFTS[kind])
        made.append(chain)
    return made


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("variant", ["T5", "BART"])
@pytest.mark.parametrize("isa", SETS)
@torch.inference_mode()
def test_drafts_with_sources_in_one_call_are_passes(isa: str, variant: str, kind: str) -> None:
    """Bit for bit, the distribution of each first child is that of a pass over the drafted tree."""
    native = packed(make_reference(**VARIANTS[variant]), on(isa))
    cache, other = (CACHES["paged by 5"](native.cache_shape) for _ in range(2))
    for each in (cache, other):
        encode(native, each, {SOURCE: tokens_of(9, 70), OTHERS[0]: tokens_of(10, 520)})
    chains = make_chains(native, kind)
    assert not native.grow(chains, cache, native.vocab_size)
    for chain in chains:
        tree, tokens = chain.draft(), chain.request.tokens
        inputs = SequenceInput(chain.request.seq_id, tokens, tree, source=chain.source)
        hidden = native.forward(build_batch([inputs], other, CPU), other.storage).last[len(tokens) - 1 :]
        settings = [sampling_settings(chain.request.params)] * len(hidden)
        probs, parents = native.kernels.probs(native.logits(hidden), settings), tree.parent_list
        assert chain.probs is not None
        first = [node for node, parent in enumerate(parents) if parent not in parents[:node]]
        assert len({parents[node] for node in first}) > 2
        assert torch.equal(chain.probs[first], probs[[1 + parents[node] for node in first]])
    cache.check()


@torch.inference_mode()
def test_a_truncated_model_keeps_its_encoder() -> None:
    """It stores the keys and values of a source for its own layers."""
    decoder = make_reference(layers=3, own_distances=True)
    native = packed(decoder, on())
    for layers in (1, 2):
        first, theirs = native.truncated(layers), decoder.truncated(layers)
        assert first.needs.source
        for seen, known in zip(logits(first, 65), logits(theirs, 65), strict=True):
            torch.testing.assert_close(seen, known, atol=1e-4, rtol=1e-4)
    shared = packed(make_reference(layers=3), on())
    assert bool(logits(shared.truncated(1), 65)[1].isfinite().all())


@torch.inference_mode()
def test_taps_of_a_model_with_a_source_enter_its_layers() -> None:
    decoder = make_reference()
    found = list[Sequence[Tensor]]()
    for model in (packed(decoder, on()), decoder):
        cache = CACHES["paged"](model.cache_shape)
        encode(model, cache, {SOURCE: tokens_of(9, 70)})
        batch = build_batch([SequenceInput(1, tokens_of(1, 9), DraftTree.empty(), source=SOURCE)], cache, CPU)
        found.append(model.forward(batch, cache.storage, (2, 0, 1, 2)).taps)
    for seen, known in zip(*found, strict=True):
        torch.testing.assert_close(seen, known, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 70])
@torch.inference_mode()
def test_a_source_of_another_model_s_result(length: int) -> None:
    """Its keys and values are the same bits as those of the model's own encoder; other sources may be beside it."""
    decoder, tokens = make_reference(), tokens_of(9, length)
    for model in (packed(decoder, on()), decoder):
        cache, given = CACHES["paged by 5"](model.cache_shape), CACHES["paged"](model.cache_shape)
        (states,) = encode(model, cache, {SOURCE: tokens})
        inputs = [
            SequenceInput(seq_id, read, DraftTree.empty(), hidden=result)
            for seq_id, read, result in ((OTHERS[0], [1, 2], torch.randn(2, 32)), (SOURCE, [0] * length, states))
        ]
        assert torch.equal(model.encode(build_batch(inputs, given, CPU), given.storage)[2:], states)
        text = tokens_of(1, 9)
        found, expected = feed(model, given, text, [9]), feed(model, cache, text, [9])
        torch.testing.assert_close(found, expected, atol=0 if isinstance(model, NativeDecoder) else 1e-5, rtol=0)


@torch.inference_mode()
def test_a_head_reads_states_and_no_source(tmp_path: Path) -> None:
    """It has layers of its own, whose rows see their own sequence; table and output head are the target's."""
    decoder, folder = make_reference(), HeadFolder.open(write_eagle(tmp_path, 32, 96), "eagle")
    tokens, states = tokens_of(1, 9), torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    found = list[Tensor]()
    for target in (packed(decoder, on()), decoder):
        head = eagle.load(folder, target)
        assert isinstance(head, NativeDecoder) == isinstance(target, NativeDecoder)
        assert not head.needs.source
        cache = CACHES["paged"](head.cache_shape)
        batch = build_batch([SequenceInput(1, tokens, DraftTree.empty(), hidden=states)], cache, CPU)
        found.append(head.logits(head.forward(batch, cache.storage).last))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_refuses_a_text_whose_source_is_missing() -> None:
    native = packed(make_reference(), on())
    cache = CACHES["paged"](native.cache_shape)
    batch = build_batch([SequenceInput(5, [1, 2], DraftTree.empty())], cache, CPU)
    with pytest.raises(RequestError, match="sequence 5 has no encoded source"):
        native.forward(batch, cache.storage)


def test_a_pass_reads_no_weights_of_the_encoder() -> None:
    """Nor the matrices of a source's keys and values. The model holds all of them."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    native = packed(make_reference(torch.bfloat16, **sizes), on())
    every = {name: shape for name, shape in tensor_shapes(native.config).items() if len(shape) == 2}
    held = [shape for name, shape in every.items() if "distances" not in name]
    read = [shape for _, shape, _ in pass_matrices(native.config)]
    bytes_of = [sum(native.kernels.packed_bytes(Type.BF16, *shape) for shape in shapes) for shapes in (read, held)]
    padded = 0.05  # queries, keys and values are one matrix, which is padded once
    assert [native.bytes_per_pass, native.weight_bytes] == pytest.approx(bytes_of, rel=padded)
    assert native.bytes_per_pass < 0.6 * native.weight_bytes


def test_matrices_of_sources_are_rounded_by_role() -> None:
    native = packed(make_reference(hidden_size=256, intermediate_size=256, head_dim=64), on(), ROUNDINGS["int4"])
    assert native.packed.encoder is not None
    for layer in (*native.packed.layers, *native.packed.encoder.layers):
        for attention in (layer.attention, *([layer.cross] if layer.cross else [])):
            assert [weight.type for weight in attention.qkv] == [
                *([Type.Q4_K] * (2 if attention.of.source else 1)),
                Type.Q6_K,
            ]
            assert attention.out.type == Type.Q5_K
        assert layer.mlp.down.type == Type.Q5_K
