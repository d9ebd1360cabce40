"""Native models whose matrices have types of their own compute with the numbers in the files, alike in every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speculant.kernels import Code, Type
from speculant.models import Decoder, NativeDecoder, PackedDecoder, PackedMlp, WeightCache, WeightStore
from speculant.models.weights import cache as weight_cache
from tests.exactness.test_native_decoder import CACHES, feed, make_decoder, packed, tokens_of
from tests.native import SETS, needs_kernels, on
from tests.stored_weights import ModuleWeights, StoredAs, decoded, stored

pytestmark = needs_kernels
SIZES: dict[str, object] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_heads": 4, "num_kv_heads": 2,
    "qkv_bias": True, "output_bias": True, "mlp_bias": True,
}  # fmt: skip
TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
Q, K, V = "q_proj.weight", "k_proj.weight", "v_proj.weight"
OUT, GATE, UP, DOWN = "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight"
MIXES: dict[str, dict[str, str]] = {
    "Q4_K_M": {"0.self_attn." + V: "Q6_K", "0.mlp." + DOWN: "Q6_K", HEAD: "Q6_K", "": "Q4_K"},
    "q, k and v differ": {Q: "Q5_0", K: "Q8_0", V: "IQ4_NL", DOWN: "MXFP4", "": "Q4_1"},
    "q and v are alike": {Q: "Q4_0", K: "Q5_K", V: "Q4_0", OUT: "Q5_1", HEAD: "Q8_0", TABLE: "Q4_0", "": "Q6_K"},
    "halves": {Q: "F16", K: "BF16", V: "F32", OUT: "F16", UP: "BF16", DOWN: "BF16", TABLE: "F16", "": "Q8_0"},
    "gate and up differ": {"0.mlp." + GATE: "Q4_K", "0.mlp." + UP: "Q6_K", OUT: "TQ2_0", "": "Q8_0"},
}
FEW_MIXES = [pytest.param(mix, marks=[] if mix == "Q4_K_M" else pytest.mark.slow) for mix in MIXES]
MOST_ERROR = 0.03  # of the logits' norm: activations are rounded to int8, and to bfloat16 on one set
ROWS = [*range(1, 23), 64, 47, 33, 32, 31, 40, 24, 48, 57, 11]


def small(**changes: object) -> Decoder:
    """Return a decoder whose activations keep their size from layer to layer."""
    decoder = make_decoder(**{**SIZES, **changes})
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            parameter.mul_(0.3)
    return decoder


def make(mix: str, isa: str = SETS[0] if SETS else "", threads: int = 2, dtype: torch.dtype = torch.float32,
         **changes: object) -> tuple[NativeDecoder, Decoder]:  # fmt: skip
    """Return a native model, and one of torch in float32 with the same numbers."""
    decoder = small(**changes)
    weights = stored(decoder, MIXES[mix])
    return NativeDecoder(decoder.config, weights, dtype, on(isa, threads)), decoded(decoder, weights)


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("mix", MIXES)
def test_logits_are_those_of_the_stored_numbers(mix: str, isa: str) -> None:
    native, reference = make(mix, isa)
    tokens = tokens_of(1)[:80]
    expected = feed(reference, CACHES["slotted"](reference.cache_shape), 1, tokens, [80])
    seen = feed(native, CACHES["paged"](native.cache_shape), 1, tokens, [80])
    assert float((seen - expected).norm() / expected.norm()) < MOST_ERROR


@pytest.mark.parametrize("mix", FEW_MIXES)
def test_embeddings_are_the_stored_numbers(mix: str) -> None:
    native, reference = make(mix)
    tokens = torch.arange(native.vocab_size)
    assert torch.equal(native.embed(tokens), reference.embed(tokens))


@pytest.mark.parametrize("mix", [pytest.param(mix, marks=[] if mix == "Q4_K_M" else pytest.mark.slow) for mix in MIXES])
def test_rows_and_threads_change_no_bit(mix: str) -> None:
    native, alone = make(mix, dtype=torch.bfloat16)[0], make(mix, dtype=torch.bfloat16, threads=1)[0]
    tokens = tokens_of(2)[: sum(ROWS)]
    whole = feed(native, CACHES["slotted"](native.cache_shape), 1, tokens, [len(tokens)])
    assert torch.equal(feed(alone, CACHES["paged"](alone.cache_shape), 1, tokens, ROWS), whole)


def test_each_matrix_has_the_type_of_its_file() -> None:
    model = make("Q4_K_M")[0].packed
    qkv = [layer.attention.qkv for layer in model.layers]
    assert [[weight.type for weight in weights] for weights in qkv] == [[Type.Q4_K, Type.Q6_K], [Type.Q4_K]]
    assert [[weight.n for weight in weights] for weights in qkv] == [[384, 128], [512]]
    assert [layer.mlp.down.type for layer in model.layers] == [Type.Q6_K, Type.Q4_K]
    assert [[weight.type for weight in layer.mlp.inner] for layer in model.layers] == [[Type.Q4_K]] * 2
    assert model.table.type == Type.Q4_K
    assert model.head.type == Type.Q6_K
    halves = make("halves", dtype=torch.bfloat16)[0].packed
    assert [weight.type for weight in halves.layers[0].attention.qkv] == [Type.F16, Type.BF16, Type.F32]
    assert halves.cache_type == Type.BF16


@pytest.mark.parametrize("mix", ["Q4_K_M", "halves"])
def test_a_tied_head_is_the_table(mix: str) -> None:
    model = make(mix, tie_embeddings=True)[0].packed
    assert model.head is model.table
    assert model.table.type == {"Q4_K_M": Type.Q4_K, "halves": Type.F16}[mix]


@pytest.mark.parametrize("mix", ["Q4_K_M", "halves"])
def test_vectors_of_blocks_are_not_rounded(mix: str) -> None:
    """Vectors stay float32 in a model with blocks; in other models they are rounded to the model's type."""
    decoder = small()
    scale, bias = decoder.get_parameter("model.norm.weight"), decoder.get_parameter("model.layers.1.mlp.down_proj.bias")
    found: PackedDecoder = make(mix, dtype=torch.bfloat16)[0].packed
    assert found.norm is not None
    assert torch.equal(found.norm.scale, scale)
    assert torch.equal(found.layers[1].mlp.down_bias, bias)  # type: ignore[arg-type]
    plain = NativeDecoder(decoder.config, ModuleWeights(decoder), torch.bfloat16, on()).packed
    assert plain.norm is not None
    assert torch.equal(plain.norm.scale, scale.bfloat16().float())
    assert not torch.equal(plain.norm.scale, scale)


def test_types_that_the_kernels_lack_are_decoded() -> None:
    assert {layer.attention.out.type for layer in make("gate and up differ")[0].packed.layers} == {Type.BF16}


def test_only_a_gate_of_a_type_of_its_own_is_multiplied_alone() -> None:
    unlike, alike = make("gate and up differ")[0], make("Q4_K_M")[0]
    types = [[weight.type for weight in layer.mlp.inner] for layer in unlike.packed.layers]
    assert types == [[Type.Q4_K, Type.Q6_K], [Type.Q8_0]]
    assert [op.code for op in unlike.program.ops].count(Code.GATE) == 1
    assert Code.GATE not in [op.code for op in alike.program.ops]
    assert alike._buffers.gates is None
    rows, size = 512, unlike.packed.config.layers[0].mlp.size
    assert unlike.scratch_bytes(rows, 1) - alike.scratch_bytes(rows, 1) == 4 * rows * size


@pytest.mark.parametrize("isa", SETS)
def test_a_gate_that_is_multiplied_alone_changes_no_bit(isa: str) -> None:
    """Numbers of float16 give the same bits in float32, and then gate and up have one type."""
    decoder = small()
    weights = StoredAs(ModuleWeights(decoder), {GATE: "F16"})
    apart = NativeDecoder(decoder.config, weights, torch.float32, on(isa))
    together = packed(decoded(decoder, weights), on(isa))
    assert [len(model.packed.layers[0].mlp.inner) for model in (apart, together)] == [2, 1]
    tokens, chunks = tokens_of(1)[:120], [1, 2, 5, 64, 48]
    seen, expected = (feed(each, CACHES["paged"](each.cache_shape), 1, tokens, chunks) for each in (apart, together))
    assert torch.equal(seen, expected)


def test_float16_weights_take_half_the_bytes_with_the_same_bits() -> None:
    decoder = small().half()
    halves = NativeDecoder(decoder.config, ModuleWeights(decoder), torch.float32, on())
    floats = packed(decoder.float(), on())
    tokens, chunks = tokens_of(1)[:120], [1, 2, 5, 64, 48]
    seen, expected = (feed(each, CACHES["paged"](each.cache_shape), 1, tokens, chunks) for each in (halves, floats))
    assert torch.equal(seen, expected)
    assert 0.49 < halves.bytes_per_pass / floats.bytes_per_pass < 0.51


@pytest.mark.parametrize("mix", FEW_MIXES)
def test_packed_weights_of_every_type_are_mapped_again(
    mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 0)
    decoder, kernels = small(), on()
    tokens, found = tokens_of(3)[:40], []
    for _ in range(2):
        store = WeightStore(WeightCache(tmp_path, kernels), ["a model"])
        model = NativeDecoder(decoder.config, stored(decoder, MIXES[mix]), torch.float32, kernels, store=store)
        assert bool(store.mapped) == bool(found)
        assert len(store.made) == (0 if found else len(matrices_of(model.packed)))
        found.append(feed(model, CACHES["paged"](model.cache_shape), 1, tokens, [40]))
        store.cache.keep(store.facts, store.made) if store.made else None
    assert torch.equal(*found)


def matrices_of(model: PackedDecoder) -> set[int]:
    weights = [model.table, model.head]
    for layer in model.layers:
        assert isinstance(layer.mlp, PackedMlp)
        weights += [*layer.attention.matrices, *layer.mlp.inner, layer.mlp.down]
    return {weight.address for weight in weights}


@pytest.mark.parametrize("coded", [False, True])
def test_only_bfloat16_is_stored_in_12_bits(coded: bool) -> None:
    decoder = small()
    weights = StoredAs(ModuleWeights(decoder), MIXES["halves"])
    model = NativeDecoder(decoder.config, weights, torch.bfloat16, on(), coded=coded).packed
    bfloat16 = Type.BF12 if coded else Type.BF16
    assert [layer.mlp.down.type for layer in model.layers] == [bfloat16] * 2
    assert [weight.type for weight in model.layers[0].mlp.inner] == [Type.Q8_0, bfloat16]
    assert {weight.type for weight in model.layers[0].attention.qkv} == {Type.F16, Type.F32, bfloat16}
    assert (model.table.type, model.head.type) == (Type.F16, Type.Q8_0)
