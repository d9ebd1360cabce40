"""The three interpreters of a description agree about its tensors, and a tensor map renames them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from speculant.errors import ModelError
from speculant.models import (
    MOST_WEIGHTS,
    Attention,
    Clamped,
    Decoder,
    DecoderConfig,
    DistanceBias,
    Encoder,
    Experts,
    Layer,
    Rows,
    Stacked,
    TensorMap,
    TokenInputs,
    Transposed,
    activations,
    buckets_of,
    matrix_weights,
    parameters,
    pass_matrices,
    relative_reads,
    source_matrices,
    stored_shape,
    tensor_shapes,
    values_per_position,
)
from speculant.models.families import gemma4_text, t5, umt5
from tests.descriptions import SHARED, describe
from tests.timing import is_within
from tests.unit.models.families import SMALL, VARIANTS

DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "experts": {"experts": Experts(6, 3, 40)},
    "shared expert": {"experts": SHARED},
    "experts with biases": {"experts": Experts(5, 2, 24, bias=True, clamped=Clamped(1.7, 7.0))},
    "normed": {"qk_norm": True, "head_dim": 24, "num_kv_heads": 1},
    "tied": {"tie_embeddings": True},
    "short": {"head_tokens": (3, 5, 90)},
}
CONFIGS = {name: describe(**own) for name, own in DESCRIPTIONS.items()} | {
    f"{family.__name__} {name}": family.read_config({**SMALL, **own})
    for family in (gemma4_text, t5, umt5)
    for name, own in VARIANTS[family.__name__.split(".")[-1]].items()
}
T5 = t5.read_config({**SMALL, **VARIANTS["t5"]["flan"]})


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cost_model_has_the_reference_s_tensors(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = Decoder(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert tensor_shapes(config) == shapes
    assert parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    shape = model.cache_shape
    assert values_per_position(config) * shape.dtype.itemsize == shape.bytes_per_token


def test_matrix_weights_are_those_of_the_matrices() -> None:
    """The head counts, and the embedding table does not: a pass reads only its tokens' rows."""
    config = describe(**DESCRIPTIONS["biases"])
    matrices = {name: shape[0] * shape[1] for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    del matrices["model.embed_tokens.weight"]
    assert matrix_weights(config) == sum(matrices.values()) == matrix_weights(describe(tie_embeddings=True))


def test_a_tensor_map_renames_tensors_of_all_layers() -> None:
    names = TensorMap((("model.norm.weight", "ln_f"), ("model.layers.{}.mlp.up_proj.weight", "h.{}.up")))
    assert names.stored("model.norm.weight") == "ln_f"
    assert names.stored("model.layers.17.mlp.up_proj.weight") == "h.17.up"
    for other in ("lm_head.weight", "model.layers.1.mlp.up_proj.bias", "model.layers.x.mlp.up_proj.weight"):
        assert names.stored(other) == other


def test_stacked_tensors_are_taken_by_the_last_number() -> None:
    stack = Rows(Transposed(Stacked("h.{}.experts", 5)), 1, 1, 2)
    names = TensorMap((("model.layers.{}.mlp.experts.{}.up_proj.weight", stack),))
    found = names.expression("model.layers.17.mlp.experts.3.up_proj.weight")
    assert found == Rows(Transposed(Stacked("h.17.experts", 5, 3)), 1, 1, 2)
    assert stored_shape(found, (24, 32)) == (5, 32, 48)


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_more_rows_read_more_experts(rows: int) -> None:
    """The expected number, by drawing the experts of each row; all else is read once."""
    of = Experts(8, 2, 40)
    config = describe(experts=of)
    assert relative_reads(describe())(rows) == 1
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, rows, of.count, generator=generator).argsort(dim=2)[:, :, : of.used]
    distinct = torch.zeros(4000, of.count).scatter_(1, draws.flatten(1), 1).sum(dim=1).mean()
    experts = len(config.layers) * 3 * 40 * config.hidden_size
    others = matrix_weights(config) - of.count * experts
    expected = (others + float(distinct) * experts) / (others + of.used * experts)
    assert relative_reads(config)(rows) == pytest.approx(expected, rel=0.01)


def test_a_row_cannot_use_more_experts_than_there_are() -> None:
    with pytest.raises(ModelError, match="each token use 4 experts, and the model has 3"):
        Experts(3, 4, 40)


def test_a_layer_reads_the_keys_of_an_earlier_one() -> None:
    config = describe(windows=(6, 6))
    first, second = config.layers
    for change in ({"kv_heads": 1}, {"head_dim": 10}, {"window": 5}, {"shares": 1}, {"shares": 2}):
        other = replace(second, attention=replace(second.attention, **{"shares": 0, **change}))
        with pytest.raises(ModelError, match=f"layer 1 with the keys of layer {change.get('shares', 0)}"):
            replace(config, layers=(first, other))
    other = replace(second, attention=replace(second.attention, shares=0))
    assert values_per_position(replace(config, layers=(first, other))) == 2 * first.attention.key_size
    with pytest.raises(ModelError, match="layer 2 with the keys of layer 1"):
        replace(config, layers=(first, other, replace(other, attention=replace(other.attention, shares=1))))


def test_inputs_by_token_need_a_row_for_each_token() -> None:
    config = describe()
    for rows in (96, 200):
        wide = replace(config.layers[0], token_inputs=TokenInputs(7, rows, config.norm))
        found = replace(config, layers=(wide, config.layers[1]))
        matrices = 2 * 7 * 32 + 32 * 7
        assert matrix_weights(found) - matrix_weights(config) == matrices, "a pass reads a row of the table alone"
        assert parameters(found) - parameters(config) == matrices + 7 * rows + 7 + 32
    with pytest.raises(ModelError, match="a table of 95 tokens for each layer, and the model has 96"):
        replace(config, layers=(replace(config.layers[0], token_inputs=TokenInputs(7, 95, config.norm)),))


def test_a_source_and_a_text_read_different_matrices() -> None:
    """Each matrix is read by one of the two passes, and tables by none."""
    text = {name for name, _, _ in pass_matrices(T5)}
    source = {name for name, _ in source_matrices(T5)}
    tables = {name for name, shape in tensor_shapes(T5).items() if name.endswith("distances.weight")}
    assert len(tables) == 2
    assert text.isdisjoint(source)
    assert text | source | tables == {name for name, shape in tensor_shapes(T5).items() if len(shape) == 2}
    assert {name for name in source if not name.startswith("encoder.")} == {
        f"model.layers.{index}.cross_attn.{kind}_proj.weight" for index in range(3) for kind in "kv"
    }
    assert matrix_weights(T5) == sum(n * k for _, (n, k), _ in pass_matrices(T5))


def test_rows_of_a_source_have_room_too() -> None:
    wide = with_encoder(T5, lambda layer: replace(layer, mlp=replace(layer.mlp, size=77)))
    assert activations(wide) == {**activations(T5), "gated": 77}


def with_encoder(config: DecoderConfig, change: Callable[[Layer], Layer]) -> DecoderConfig:
    """Return an encoder-decoder model whose encoder's layers are changed."""
    assert config.encoder
    return replace(config, encoder=Encoder(tuple(map(change, config.encoder.layers)), config.encoder.norm))


def with_attention(layer: Layer, **fields: Any) -> Layer:
    return replace(layer, attention=replace(layer.attention, **fields))


def test_all_layers_of_a_decoder_read_the_source_or_none() -> None:
    first, *others = T5.layers
    for wrong in (
        {"layers": (replace(first, cross=None), *others)},
        {"encoder": None},
        {"encoder": Encoder((), T5.norm)},
        {"encoder": Encoder((first,), T5.norm)},
    ):
        with pytest.raises(ModelError, match="an encoder whose result not all layers of the decoder read, or none"):
            replace(T5, **wrong)  # type: ignore[arg-type]
    assert T5.truncated(1).encoder == T5.encoder


@pytest.mark.parametrize("fields", [{"kv_heads": 2}, {"head_dim": 16}])
def test_sources_have_keys_of_the_shape_of_texts(fields: dict[str, int]) -> None:
    first, *others = T5.layers
    assert first.cross
    cross: Attention = replace(first.cross, **fields)
    with pytest.raises(ModelError, match="heads of different sizes"):
        replace(T5, layers=(replace(first, cross=cross), *others))
    with pytest.raises(ModelError, match="heads of different sizes"):
        with_encoder(T5, lambda layer: with_attention(layer, **fields))
    with pytest.raises(ModelError, match="with windows"):
        replace(T5, layers=(with_attention(first, window=4), *others))


def test_distances_are_shared_from_an_earlier_layer() -> None:
    first, second, third = T5.layers
    of = second.attention.distances
    assert of == DistanceBias(32, 128, shares=0)
    for change in ({"shares": 1}, {"shares": 2}, {"buckets": 16}, {"max_distance": 64}, {"both_ways": True}):
        wrong = with_attention(second, distances=replace(of, **change))
        with pytest.raises(ModelError, match="layer 1 with the distances of layer"):
            replace(T5, layers=(first, wrong, third))
    chained = with_attention(third, distances=replace(of, shares=1))
    with pytest.raises(ModelError, match="layer 2 with the distances of layer 1"):
        replace(T5, layers=(first, second, chained))
    assert T5.encoder
    ahead = T5.encoder.layers
    late = with_attention(ahead[1], distances=DistanceBias(32, 128, both_ways=True, shares=5))
    with pytest.raises(ModelError, match="layer 1 with the distances of layer 5"):
        replace(T5, encoder=Encoder((ahead[0], late), T5.norm))


@pytest.mark.parametrize(
    ("buckets", "most", "both_ways"), [(1, 9, False), (3, 9, True), (32, 16, False), (32, 8, True)]
)
def test_distances_need_buckets_of_several(buckets: int, most: int, both_ways: bool) -> None:
    with pytest.raises(ModelError, match="buckets of distances up to"):
        DistanceBias(buckets, most, both_ways)


def test_an_encoder_s_matrices_have_a_greatest_size_too() -> None:
    with pytest.raises(ModelError, match="describes a matrix of"):
        with_encoder(T5, lambda layer: replace(layer, mlp=replace(layer.mlp, size=MOST_WEIGHTS)))


def test_buckets_are_those_of_transformers() -> None:
    distances = torch.arange(-4000, 4001)
    for buckets, most, both_ways in product((4, 6, 9, 32, 33), (20, 33, 128, 1000), (False, True)):
        of = DistanceBias(buckets, most, both_ways)
        expected = T5Attention._relative_position_bucket(-distances, both_ways, buckets, most)
        assert torch.equal(buckets_of(of, distances), expected), of


def test_reads_of_many_passes_take_little_time() -> None:
    """A table of costs asks for thousands of sizes within a step: adding up the weights each time took 0.3 s."""
    reads = relative_reads(describe(windows=(None,) * 24))
    assert is_within(0.05, lambda: sum(map(reads, range(1, 4000))))
