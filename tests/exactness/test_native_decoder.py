"""Whole models on the native kernels: the reference's logits, the same bits for any batch, chunk, cache and tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from speculant.cache import CacheShape, KVCache, paged_cache, slotted_cache
from speculant.errors import ModelError
from speculant.kernels import Kernels
from speculant.models import ROUNDINGS, Clamped, Decoder, Experts, NativeDecoder, Rounding, SequenceInput, build_batch
from speculant.types import DraftTree
from tests.descriptions import SHARED, describe
from tests.native import SETS, needs_kernels, on
from tests.stored_weights import ModuleWeights

pytestmark = needs_kernels
CPU = torch.device("cpu")
NUM_TOKENS = 640  # beyond one span of 512 keys
VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "normed": {"qk_norm": True, "head_dim": 24},
    "windowed": {"windows": (None, 100)},
    "tied": {"tie_embeddings": True, "num_kv_heads": 4},
    "experts": {"experts": Experts(6, 3, 40)},
    "shared expert": {"experts": SHARED},
    "clamped experts": {"experts": Experts(5, 2, 24, renormalise=False, bias=True, clamped=Clamped(1.7, 0.9))},
    "odd": {"hidden_size": 36, "intermediate_size": 50, "vocab_size": 101, "head_dim": 6},
}
MakeCache = Callable[[CacheShape], KVCache]
CACHES: dict[str, MakeCache] = {
    "slotted": lambda shape: slotted_cache(shape, 4, 1024),
    "paged": lambda shape: paged_cache(shape, 4 * 1024 // 16, 16),
    "paged by 5": lambda shape: paged_cache(shape, 1024, 5),
}


def make_decoder(dtype: torch.dtype = torch.float32, **changes: object) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(describe(**changes)).requires_grad_(False).eval()
    for name, parameter in decoder.named_parameters():
        parameter.copy_((1 if name.endswith("norm.weight") else 0) + 0.2 * torch.randn(parameter.shape))
    decoder.tie_head()
    return decoder.to(dtype)


def make_native(isa: str = SETS[0] if SETS else "", quantization: Rounding | None = None, threads: int = 2,
                dtype: torch.dtype = torch.float32, **changes: object) -> NativeDecoder:  # fmt: skip
    return packed(make_decoder(dtype, **changes), on(isa, threads), quantization)


def packed(
    decoder: Decoder, kernels: Kernels, quantization: Rounding | None = None, coded: bool = False
) -> NativeDecoder:
    """Pack a decoder's own parameters; coded = in 12 bits a weight."""
    dtype = decoder.cache_shape.dtype
    return NativeDecoder(decoder.config, ModuleWeights(decoder), dtype, kernels, quantization, coded)


def tokens_of(seed: int, vocab_size: int = 96) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator).tolist()]


@torch.inference_mode()
def feed(
    model: Decoder | NativeDecoder, cache: KVCache, seq_id: int, tokens: Sequence[int], chunks: Sequence[int]
) -> Tensor:
    """Feed tokens in chunks; return the logits of all rows."""
    rows, first = [], 0
    for count in chunks:
        batch = build_batch([SequenceInput(seq_id, tokens[first : first + count], DraftTree.empty())], cache, CPU)
        rows.append(model.logits(model.forward(batch, cache.storage).last))
        first += count
    return torch.cat(rows)


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_reference_s(isa: str, variant: str) -> None:
    decoder = make_decoder(**VARIANTS[variant])
    native = make_native(isa, **VARIANTS[variant])
    tokens = tokens_of(1, decoder.vocab_size)
    shape = decoder.cache_shape
    expected = feed(decoder, CACHES["slotted"](shape), 1, tokens, [NUM_TOKENS])
    seen = feed(native, CACHES["paged"](shape), 1, tokens, [NUM_TOKENS])
    assert float((seen - expected).abs().max()) < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_logits_are_near_the_reference_s(isa: str, variant: str) -> None:
    """The weights are the same numbers; the cache is rounded to bfloat16, and so may be what a set multiplies.

    A row whose scores are almost equal may then use another expert, so those of the usual row are compared.
    """
    native = make_native(isa, dtype=torch.bfloat16, **VARIANTS[variant])
    decoder = make_decoder(torch.bfloat16, **VARIANTS[variant]).float()
    tokens = tokens_of(1, decoder.vocab_size)
    expected = feed(decoder, CACHES["slotted"](decoder.cache_shape), 1, tokens, [NUM_TOKENS])
    seen = feed(native, CACHES["paged"](native.cache_shape), 1, tokens, [NUM_TOKENS])
    rows = (seen - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(rows.median()) < 0.02
    if "experts" not in VARIANTS[variant]:
        assert float((seen - expected).norm() / expected.norm()) < 0.02


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_coded_weights_are_plain_ones(isa: str, variant: str) -> None:
    """Bit for bit, for a prompt in chunks of all sizes and for single rows; and most weights take 12 bits."""
    decoder, kernels = make_decoder(torch.bfloat16, **VARIANTS[variant]), on(isa)
    plain, coded = packed(decoder, kernels), packed(decoder, kernels, coded=True)
    tokens, chunks = tokens_of(1, decoder.vocab_size), [1, 2, 3, 5, 8, 9, 17, 64, 130, 399, 1, 1]
    seen, expected = (feed(each, CACHES["paged"](plain.cache_shape), 1, tokens, chunks) for each in (coded, plain))
    assert torch.equal(seen.view(torch.int32), expected.view(torch.int32))
    most = 1.1 if variant == "odd" else 0.9  # matrices that fill no block stay plain
    assert coded.bytes_per_pass < most * plain.bytes_per_pass


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", [None, *ROUNDINGS.values()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_caches_and_threads_change_no_bit(
    variant: str, dtype: torch.dtype, quantization: Rounding | None
) -> None:
    native = make_native(quantization=quantization, dtype=dtype, **VARIANTS[variant])
    alone = make_native(quantization=quantization, dtype=dtype, threads=1, **VARIANTS[variant])
    tokens, shape = tokens_of(2, native.vocab_size), native.cache_shape
    whole = feed(native, CACHES["slotted"](shape), 1, tokens, [NUM_TOKENS])
    for name, chunks in (("paged", [1] * 40 + [600]), ("paged by 5", [7, 13, 80, 540]), ("slotted", [600] + [1] * 40)):
        assert torch.equal(feed(native, CACHES[name](shape), 1, tokens, chunks), whole), (name, chunks[:3])
    assert torch.equal(feed(alone, CACHES["paged"](shape), 1, tokens, [320, 319, 1]), whole)


@pytest.mark.parametrize("quantization", [None, *ROUNDINGS.values()])
@pytest.mark.parametrize("num_others", [1, 4, 16, 63])
@torch.inference_mode()
def test_a_sequence_never_sees_its_neighbours(num_others: int, quantization: Rounding | None) -> None:
    native = make_native(quantization=quantization, dtype=torch.bfloat16)
    shape, tokens = native.cache_shape, tokens_of(3)
    expected = feed(native, CACHES["slotted"](shape), 1, tokens[:40], [39, 1])[39:]
    cache = paged_cache(shape, 1024, 16)
    feeds = [
        SequenceInput(seq_id, tokens_of(seq_id)[: 1 + seq_id % 7], DraftTree.empty())
        for seq_id in range(10, 10 + num_others)
    ]
    batch = build_batch([SequenceInput(1, tokens[:39], DraftTree.empty())], cache, CPU)
    native.forward(batch, cache.storage)
    place = num_others // 2
    batch = build_batch(
        [*feeds[:place], SequenceInput(1, tokens[39:40], DraftTree.empty()), *feeds[place:]], cache, CPU
    )
    row = sum(len(other.tokens) for other in feeds[:place])
    assert torch.equal(native.logits(native.forward(batch, cache.storage).last)[row : row + 1], expected)


@pytest.mark.covering(2)
@pytest.mark.parametrize("committed", [1, 3])
@pytest.mark.parametrize("context", [5, 62, 511, 600])
@pytest.mark.parametrize("variant", ["grouped", "windowed"])
@torch.inference_mode()
def test_a_path_of_a_tree_is_a_chain(variant: str, context: int, committed: int) -> None:
    """The logits along a path, and those after it is kept, equal those of the path alone."""
    native = make_native(dtype=torch.bfloat16, **VARIANTS[variant])
    shape, tokens = native.cache_shape, tokens_of(4)
    context -= committed
    path = tokens[context + committed : context + committed + 4]
    other = [(token + 1) % 96 for token in path]
    tree = DraftTree(
        torch.tensor([other[0], path[0], other[1], path[1], other[2], path[2], path[3]]),
        torch.tensor([-1, -1, 1, 1, 2, 3, 5]),
    )
    nodes = (1, 3, 5, 6)
    chain = feed(native, CACHES["slotted"](shape), 1, tokens, [context + committed, 4, 1])
    cache = paged_cache(shape, 256, 5)
    feed(native, cache, 1, tokens, [context])
    batch = build_batch([SequenceInput(1, tokens[context : context + committed], tree)], cache, CPU)
    logits = native.logits(native.forward(batch, cache.storage).last)
    seen = logits[[committed - 1, *(committed + node for node in nodes)]]
    assert torch.equal(seen, chain[context + committed - 1 : context + committed + 4])
    cache.compact(1, context + committed, nodes)
    after = feed(native, cache, 1, tokens[context + committed + 4 :], [1])
    assert torch.equal(after, chain[-1:])


@torch.inference_mode()
def test_a_tree_has_no_bound_of_depth() -> None:
    """A path of 620 nodes and a sibling at the root, as a beam search of two hypotheses feeds them."""
    native = make_native(dtype=torch.bfloat16, windows=(None, 100))
    tokens, context = tokens_of(5), 10
    path = tokens[context : context + 620]
    tree = DraftTree.of([(path[0] + 1) % 96, *path], [-1, -1, *range(1, 620)])
    chain = feed(native, CACHES["slotted"](native.cache_shape), 1, tokens, [context - 1, 621, 1])
    cache = CACHES["paged by 5"](native.cache_shape)
    feed(native, cache, 1, tokens, [context - 1])
    batch = build_batch([SequenceInput(1, tokens[context - 1 : context], tree)], cache, CPU)
    logits = native.logits(native.forward(batch, cache.storage).last)
    assert torch.equal(logits[[0, *range(2, 622)]], chain[context - 1 : context + 620])
    cache.compact(1, context, range(1, 621))
    assert torch.equal(feed(native, cache, 1, tokens[context + 620 :], [1]), chain[-1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
@pytest.mark.parametrize("quantization", ROUNDINGS)
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_refuses_to_quantise_what_is_not_finite(name: str, quantization: str, value: float) -> None:
    """A weight must be finite in the type it is first rounded to: 3.4e38 is infinite in bfloat16."""
    decoder = make_decoder()
    decoder.get_parameter(name)[3, 5] = value
    kernels = on()
    with pytest.raises(ModelError, match=f"{name} .*{quantization}"):
        NativeDecoder(decoder.config, ModuleWeights(decoder), torch.bfloat16, kernels, ROUNDINGS[quantization])
    packed(decoder, kernels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float32])
def test_logits_take_hidden_states_of_every_type(dtype: torch.dtype) -> None:
    native = make_native()
    hidden = torch.randn(5, native.hidden_size).to(dtype)
    expected = native.logits(hidden.float())
    assert torch.equal(native.logits(hidden), expected)
    assert torch.equal(native.logits(hidden.T.contiguous().T), expected)


@pytest.mark.parametrize("shape", [(5, 31), (5, 33), (32,), (1, 5, 32), (0,)])
def test_logits_refuse_hidden_states_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="hidden states are"):
        make_native().logits(torch.zeros(shape))
    assert make_native().logits(torch.zeros(0, 32)).shape == (0, 96)
