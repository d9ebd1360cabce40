"""A model at a larger shape computes the same function."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant import LLM, SamplingParams
from speculant.errors import ConfigError, ModelError
from speculant.kernels import usable_sets
from speculant.lab.inflation import SHAPES, Shape, fitting_shape, inflate, named_shape
from speculant.models import Experts, load_model, open_folder, read_description, read_model_config, resolve_source
from tests.unit.models.families import FEW, STATES, Session, random_tokens, thinned_cases, write_variant

NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
KERNELS = ["reference", pytest.param("native", marks=NATIVE)]
DRAFT = Shape(128, 240, 2, 4, 2)  # of the embedded pair
SHAPE = Shape(384, 300, 3, 12, 3)  # three copies, groups of four instead of two
LARGER = [
    SHAPE,
    DRAFT,  # as it is, but untied
    *(
        pytest.param(replace(DRAFT, **alone), marks=pytest.mark.slow)  # SHAPE changes all of them
        for alone in (
            {"hidden_size": 640},
            {"intermediate_size": 256},
            {"num_hidden_layers": 4},
            {"num_attention_heads": 6},
            {"num_attention_heads": 8, "num_key_value_heads": 4},
        )
    ),
]
PROMPT = random_tokens(24)


def logits(folder: Path, dtype: str, kernels: str) -> Tensor:
    """Read a prompt in a pass, then further tokens one at a time; return the logits [30, V]."""
    session = Session(load_model(str(folder), dtype, kernels=kernels).model)
    return torch.cat([session.extend(PROMPT), *(session.extend([token]) for token in random_tokens(6, seed=1))])


def copy_changed(folder: Path, source: Path, changes: Mapping[str, Any]) -> Path:
    """Copy a checkpoint and change its config.json."""
    shutil.copytree(source, folder)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**hf, **changes}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def draft() -> Path:
    return resolve_source("demo", "draft")


@pytest.fixture(scope="module")
def precise(draft: Path) -> Tensor:
    """The draft's logits in float64, in which rounding is negligible."""
    return logits(draft, "float64", "reference")


@pytest.fixture(scope="module")
def inflated(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inflated") / "large"
    inflate(draft, folder, SHAPE)
    return folder


@pytest.mark.parametrize("kernels", KERNELS)
def test_inflated_model_has_the_same_logits(draft: Path, inflated: Path, kernels: str) -> None:
    expected = logits(draft, "float32", kernels)
    assert expected.std() > 1
    torch.testing.assert_close(logits(inflated, "float32", kernels), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", LARGER, ids=lambda shape: "-".join(map(str, asdict(shape).values())))
def test_every_size_can_grow(draft: Path, precise: Tensor, shape: Shape, tmp_path: Path) -> None:
    """A difference would come from the weights."""
    inflate(draft, tmp_path, shape)
    torch.testing.assert_close(logits(tmp_path, "float64", "reference"), precise, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("case", thinned_cases(families=(*FEW, *STATES)))
def test_every_family_can_grow(case: tuple[str, str], tmp_path: Path) -> None:
    """In all sizes at once, by a reader that may give it as many key heads as attention heads; without experts."""
    small = write_variant(tmp_path, *case)
    layers = read_description(read_model_config(small)).layers
    if any(isinstance(layer.mlp, Experts) for layer in layers):
        with pytest.raises(ModelError, match=r"models with experts can't be inflated"):
            inflate(small, tmp_path / "large", SHAPE)
        return
    if any(layer.state and layer.state.steps for layer in layers):
        with pytest.raises(ModelError, match=r"layers of Mamba 2 can't be inflated"):
            inflate(small, tmp_path / "large", SHAPE)
        return
    if len({layer.attention.head_dim for layer in layers if layer.attention}) > 1:
        with pytest.raises(ModelError, match=r"other arithmetic at this shape|MLPs of different sizes"):
            inflate(small, tmp_path / "large", Shape(128, 136, 6, 16, 4))
        return
    (tmp_path / "large").mkdir()
    shape = fitting_shape(read_model_config(small), Shape(128, 136, 6, 16, 4))
    inflate(small, tmp_path / "large", shape)
    expected = logits(small, "float64", "reference")
    torch.testing.assert_close(logits(tmp_path / "large", "float64", "reference"), expected, atol=1e-8, rtol=1e-8)


def test_a_factor_of_embeddings_must_stay_exact(tmp_path: Path) -> None:
    """Gemma multiplies by the square root of the width."""
    small = write_variant(tmp_path, "gemma2", "plain")
    with pytest.raises(ModelError, match="would have to be rounded"):
        inflate(small, tmp_path / "large", Shape(64, 48, 3, 4, 2))


def test_norms_of_all_heads_need_whole_multiples(tmp_path: Path) -> None:
    small = write_variant(tmp_path, "olmo2", "plain")
    with pytest.raises(ConfigError, match="normalises all heads together"):
        inflate(small, tmp_path / "large", Shape(64, 48, 3, 6, 3))


def test_a_family_without_shared_keys_says_so(tmp_path: Path) -> None:
    small = write_variant(tmp_path, "gpt2", "plain")
    with pytest.raises(ConfigError, match="num_key_value_heads 8, not 4"):
        inflate(small, tmp_path / "large", Shape(64, 48, 3, 8, 4))


@pytest.mark.slow  # its logits are the same
def test_inflated_model_writes_the_same_text(draft: Path, inflated: Path) -> None:
    prompts, params = ["def main(", "import os\n"], SamplingParams(temperature=0, max_tokens=16)
    texts = [
        [output.outputs[0].text for output in LLM(str(folder), dtype="float64").generate(prompts, params)]
        for folder in (draft, inflated)
    ]
    assert all(texts[0])
    assert texts[0] == texts[1]


def test_an_own_head_stays_separate(draft: Path, precise: Tensor, tmp_path: Path) -> None:
    own = copy_changed(tmp_path / "own", draft, {"tie_word_embeddings": False})
    tensors = load_file(own / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)}
    save_file({**tensors, **head}, own / "model.safetensors")
    inflate(own, tmp_path / "large", SHAPE)
    expected = logits(own, "float64", "reference")
    torch.testing.assert_close(logits(tmp_path / "large", "float64", "reference"), expected, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(expected, precise, atol=1)


def test_a_tied_head_becomes_separate(draft: Path, inflated: Path) -> None:
    """Its parts add up to the table's rows without rounding: two halves, and a copy times zero."""
    table = open_folder(draft).read("model.embed_tokens.weight")
    weights = open_folder(inflated)
    assert torch.equal(weights.read("model.embed_tokens.weight"), table.repeat(1, 3))
    first, second, third = weights.read("lm_head.weight").chunk(3, dim=1)
    assert torch.equal(first, second)
    assert torch.equal(first + second, table)
    assert not third.any()


def test_further_weights_are_random_and_meet_zeros(inflated: Path) -> None:
    weights = open_folder(inflated)
    assert {weights.read(name).dtype for name in weights.names()} == {torch.bfloat16}
    gate, down = (weights.read(f"model.layers.1.mlp.{name}_proj.weight") for name in ("gate", "down"))
    assert gate[240:].float().std() == pytest.approx(0.02, rel=0.05)
    assert not down[:, 240:].any()
    query, output = (weights.read(f"model.layers.1.self_attn.{name}_proj.weight") for name in ("q", "o"))
    for head in (2, 3, 6, 7, 8, 9, 10, 11):  # those that are not the first two of the first two groups
        of_head = slice(32 * head, 32 * head + 32)
        assert query[of_head].float().std() == pytest.approx(0.02, rel=0.05)
        assert not output[:, of_head].any()
    keys = weights.read("model.layers.2.self_attn.k_proj.weight")
    assert keys.float().std() == pytest.approx(0.02, rel=0.05)
    assert not weights.read("model.layers.2.self_attn.o_proj.weight").any()


def test_same_weights_are_written_again(draft: Path, inflated: Path, tmp_path: Path) -> None:
    inflate(draft, tmp_path, SHAPE)
    assert all(file.read_bytes() == (inflated / file.name).read_bytes() for file in tmp_path.iterdir())


def test_files_beside_the_weights_are_copied(draft: Path, inflated: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (inflated / name).read_bytes() == (draft / name).read_bytes()
    assert not (inflated / "model.safetensors").exists()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (draft, inflated))
    assert after == {**before, **asdict(SHAPE), "tie_word_embeddings": False}


def test_head_dim_is_written_where_it_was_implied(draft: Path, tmp_path: Path) -> None:
    """128 / 4 heads are 32 dimensions, which stay; 384 / 6 would be 64."""
    implied = copy_changed(tmp_path / "implied", draft, {"head_dim": None})
    inflate(implied, tmp_path / "large", replace(SHAPE, num_attention_heads=6))
    assert json.loads((tmp_path / "large" / "config.json").read_text())["head_dim"] == 32


def test_card_describes_the_model(inflated: Path) -> None:
    card = (inflated / "README.md").read_text(encoding="utf-8")
    assert "the function of `draft` at the shape of a larger model" in card
    assert "the texts of the small model at the cost of the large one" in card
    assert "| hidden_size | 128 | 384 |" in card
    weights = open_folder(inflated)
    assert f"| weights | 1,331,840 | {sum(weights.read(name).numel() for name in weights.names()):,} |" in card


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 320}, "hidden_size 320 is not a multiple of the model's 128"),
        ({"hidden_size": 64}, "hidden_size 64 is not a multiple"),
        ({"intermediate_size": 239}, "intermediate_size 239 is below the model's 240"),
        ({"num_hidden_layers": 1}, "num_hidden_layers 1 is below the model's 2"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, "num_key_value_heads 1 is below the model's 2"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, "group_size 1 is below the model's 2"),
    ],
)
def test_smaller_shape_is_refused(draft: Path, change: dict[str, int], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        inflate(draft, tmp_path / "large", replace(SHAPE, **change))
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_attention_heads": 10}, "10 attention heads, not a multiple of 3 key heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0, not a positive number"),
        ({"hidden_size": 0}, "hidden_size = 0, not a positive number"),
    ],
)
def test_impossible_shape_is_refused(change: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(SHAPE, **change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen2"}, "6 missing"),
        ({"model_type": None}, "model_type"),
        ({"quantization_config": {}}, "is quantised"),
        ({"num_hidden_layers": 3}, "the weights hold 2 layers"),
        ({"intermediate_size": 256}, "do not fit config.json"),
    ],
)
def test_other_checkpoint_is_refused(draft: Path, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        inflate(copy_changed(tmp_path / "other", draft, change), tmp_path / "large", SHAPE)
    assert not (tmp_path / "large").exists()


def test_weights_that_would_round_are_refused(draft: Path, tmp_path: Path) -> None:
    """The smallest number above zero has no half."""
    other = copy_changed(tmp_path / "other", draft, {})
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 2.0**-133
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds numbers that torch.bfloat16"):
        inflate(other, tmp_path / "large", SHAPE)
    assert not (tmp_path / "large" / "config.json").exists()


def test_folder_with_files_is_refused(draft: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="is not empty"):
        inflate(draft, tmp_path, SHAPE)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ConfigError, match="can't be made"):
        inflate(draft, tmp_path / "file", SHAPE)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_fill_the_width(name: str, head_dim: int) -> None:
    shape = named_shape(name, head_dim)
    assert shape.num_attention_heads * head_dim == shape.hidden_size
    assert shape.group_size == {"50m": 4, "1b": 4, "3b": 3}[name]


def test_named_shape_of_one_billion_weights() -> None:
    assert named_shape("1b", 64) == Shape(2048, 8192, 16, 32, 8)
    assert named_shape("3b", 64) == Shape(3072, 8192, 28, 48, 16)


@pytest.mark.parametrize(
    ("name", "head_dim", "reason"),
    [("2b", 64, "'2b' is unknown"), ("1b", 96, "not a whole number of groups of 4"), ("1b", 0, "not a whole number")],
)
def test_unknown_shape_is_refused(name: str, head_dim: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        named_shape(name, head_dim)


def test_noise_changes_the_function_a_little(draft: Path, inflated: Path, tmp_path: Path) -> None:
    expected, told = logits(draft, "float32", "reference"), "Noise of 0.05 times"
    inflate(draft, tmp_path / "noisy", SHAPE, noise=0.05)
    noisy = logits(tmp_path / "noisy", "float32", "reference")
    assert 0.01 < (noisy - expected).std() / expected.std() < 0.5
    assert told in (tmp_path / "noisy" / "README.md").read_text(encoding="utf-8")
    assert told not in (inflated / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="noise=-1"):
        inflate(draft, tmp_path / "other", SHAPE, noise=-1)
