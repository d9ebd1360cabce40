"""Checkpoints in compressed-tensors, FP8, bitsandbytes and MXFP4 give the logits of the numbers that they stand for."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from speculant.errors import ConfigError, ModelError
from speculant.kernels import Type, usable_sets
from speculant.models import PackedExperts, PackedMlp, e4m3_numbers, load_model
from speculant.models.weights import cache as weight_cache
from speculant.models.weights.schemes import bitsandbytes
from tests.models import Shape, write_checkpoint
from tests.quantised_folders import (
    E4M3,
    FORMATS,
    INT8,
    LINEAR,
    Format,
    Made,
    Tensors,
    compressed,
    e4m3,
    edit_config,
    integers,
    quantise,
)
from tests.unit.models.families import EXPERTS, PADDED, VARIANTS, make_pair
from tests.unit.models.loaded import (
    MOST_ERROR,
    Written,
    change_tensors,
    error,
    load,
    load_twice,
    logits,
    packed_of,
)

pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
HIDDEN = 192  # inputs: one and a half blocks of 128
native = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
TYPES = {  # of the output projection
    "packed 4 bits, groups of 32": Type.Q4_0, "packed 4 bits, zero points": Type.ZERO4,
    "packed 4 bits, channels": Type.Q4_0, "packed 8 bits, groups": Type.Q8_0,
    "packed 8 bits, zero points": Type.ZERO8, "packed, precise scales": Type.BF16, "int8 channels": Type.INT8,
    "int8, zero points": Type.ZERO8, "e4m3 channels": Type.FP8, "e4m3 tensors": Type.FP8, "e4m3 blocks": Type.FP8,
    "mixed": Type.Q4_0, "fp8 blocks": Type.FP8, "fp8 small blocks": Type.BF16, "fp8 tensors": Type.FP8,
    "nf4": Type.BF16, "nf4, nested": Type.BF16, "fp4": Type.BF16, "llm.int8": Type.INT8,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint."""
    return Path(write_checkpoint(tmp_path_factory.mktemp("source") / "plain", Shape(hidden_size=HIDDEN)))


def made(source: Path, root: Path, form: Format) -> tuple[Path, Path]:
    """Return the folders of a quantised checkpoint and of its numbers."""
    quantise(source, root / "packed", root / "numbers", form)
    return root / "packed", root / "numbers"


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(source, tmp_path_factory.mktemp("written"), quantise)


def test_e4m3_is_that_of_torch() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    assert torch.equal(torch.from_numpy(e4m3_numbers()).nan_to_num(), every.nan_to_num())
    assert bool(torch.signbit(torch.from_numpy(e4m3_numbers()))[128])


def test_every_format_has_a_type() -> None:
    assert TYPES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_stored_numbers(name: str, source: Path, written: Written) -> None:
    packed, expected = written[FORMATS[name]]
    assert error(logits(packed), expected) < 1e-6
    assert error(logits(source), expected) > 1e-4, "rounding changed nothing"


@native
@pytest.mark.parametrize("name", FORMATS)
def test_native_matrices_have_their_types(name: str, written: Written) -> None:
    packed, expected = written[FORMATS[name]]
    loaded = load(packed, "native")
    assert error(logits(loaded), expected) < MOST_ERROR
    assert {layer.attention.out.type for layer in packed_of(loaded).layers} == {TYPES[name]}


FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {**PADDED, "sliding_window": None},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 64, "head_dim": 32, "norm_topk_prob": True},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
}
BY_FAMILY = {
    Type.FP8: FORMATS["fp8 blocks"],
    Type.INT8: compressed("int-quantized", {LINEAR: integers(8, 0)}, {**INT8, "strategy": "channel"}),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("type_", BY_FAMILY, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_keep_their_numbers(family: str, type_: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused matrices, experts and tied heads. Native rows that use other experts differ by more."""
    settings = {"hidden_size": 128, "intermediate_size": 192, **FAMILIES[family]}
    monkeypatch.setitem(VARIANTS, family, {"scaled": settings})
    make_pair(tmp_path / "plain", family, "scaled")
    folder, numbers = made(tmp_path / "plain", tmp_path, BY_FAMILY[type_])
    expected = logits(numbers)
    assert error(logits(folder), expected) < 1e-6
    if not usable_sets():
        return
    loaded = load(folder, "native")
    errors = (logits(loaded) - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.median()) < (1e-4 if type_ == Type.FP8 else 0.15), "FP8 is multiplied by float32"
    layer = packed_of(loaded).layers[0]
    assert layer.attention.out.type == type_
    if isinstance(layer.mlp, PackedExperts):
        assert layer.mlp.down.weights[0].type == type_
    else:
        assert isinstance(layer.mlp, PackedMlp)
        assert layer.mlp.down.type == type_


@native
def test_a_quantised_head_is_multiplied(source: Path, tmp_path: Path) -> None:
    form = compressed("float-quantized", {LINEAR: None, "lm_head": e4m3(1, 0)}, {**INT8, "type": "float"})
    folder, numbers = made(source, tmp_path, form)
    loaded = load(folder, "native")
    assert packed_of(loaded).head.type == Type.FP8
    assert error(logits(loaded), logits(numbers)) < MOST_ERROR


def test_inputs_may_have_an_order(written: Written, tmp_path: Path) -> None:
    """weight_g_idx names the group of each input; a tensor that was never filled is left out."""
    folder, _ = written.copy(FORMATS["packed 4 bits, groups of 32"], tmp_path)
    tensors, path = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    module = "model.layers.0.mlp.down_proj"
    expected = logits(folder)
    tensors[f"{module}.weight_g_idx"] = torch.full((2 * HIDDEN,), -1, dtype=torch.int32)
    save_file(tensors, path)
    assert torch.equal(logits(folder), expected)
    groups = torch.arange(2 * HIDDEN)[torch.randperm(2 * HIDDEN, generator=torch.Generator().manual_seed(0))] // 32
    tensors[f"{module}.weight_g_idx"] = groups.int()
    save_file(tensors, path)
    ordered = logits(folder)
    assert error(ordered, expected) > 1e-3
    if usable_sets():
        loaded = load(folder, "native")
        assert packed_of(loaded).layers[0].mlp.down.order is not None
        assert error(logits(loaded), ordered) < MOST_ERROR


@native
def test_packed_weights_are_mapped_again(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 0)
    again, expected = load_twice(written[FORMATS["mixed"]][0], tmp_path / "cache")
    assert packed_of(again).layers[0].mlp.down.type == Type.FP8
    assert torch.equal(logits(again), expected)


def test_scales_of_activations_are_left_out(written: Written, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, expected = written.copy(form := FORMATS["e4m3 tensors"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for module in {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}:
        tensors[f"{module}.input_scale"] = torch.tensor(0.01)
    for name in ("0.self_attn.k_scale", "1.self_attn.k_proj.output_scale"):
        tensors[f"model.layers.{name}"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={**form.config, "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    with caplog.at_level(logging.WARNING):
        assert error(logits(folder), expected) < 1e-6
    assert "kv_cache_scheme" in caplog.text
    assert "no effect" in caplog.text


def test_mxfp4_is_read_from_compressed_tensors(source: Path, tmp_path: Path) -> None:
    def write(weight: Tensor) -> Any:
        n, k = weight.shape
        blocks = weight.view(n, -1, 32)
        exponents = (blocks.abs().amax(2) / 6).log2().ceil()
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        values = torch.cat((values, -values))
        index = (blocks / 2 ** exponents[..., None])[..., None].sub(values).abs().argmin(-1)
        pairs = index.view(n, -1, 2).to(torch.uint8)
        parts = {
            ".weight_packed": pairs[..., 0] | pairs[..., 1] << 4,
            ".weight_scale": (exponents + 127).to(torch.uint8),
        }
        return Made(parts, (values[index] * 2 ** exponents[..., None]).view(n, k))

    options = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    folder, numbers = made(source, tmp_path, compressed("mxfp4-pack-quantized", {LINEAR: write}, options))
    assert error(logits(folder), logits(numbers)) < 1e-6
    assert "MXFP4" in load(folder).kernels.upper() or usable_sets()


@pytest.mark.parametrize("at_once", [1, 1000])
def test_few_blocks_are_decoded_at_a_time(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(write_checkpoint(tmp_path / "plain", Shape(layers=1)))
    folder, _ = made(source, tmp_path, FORMATS["nf4, nested"])
    whole = logits(folder)
    monkeypatch.setattr(bitsandbytes, "DECODED_AT_ONCE", at_once)
    assert torch.equal(logits(folder), whole)


def test_decoded_matrices_are_announced(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(written[FORMATS["nf4"]][0])
    assert "can't multiply by NF4" in caplog.text


Change = Callable[[Tensors], None]
DOWN = "model.layers.1.mlp.down_proj"


def edited(end: str, change: Callable[[Tensor], Tensor | None]) -> Change:
    """Change a tensor of a module; None deletes it."""

    def apply(tensors: Tensors) -> None:
        found = change(tensors.pop(DOWN + end))
        if found is not None:
            tensors[DOWN + end] = found.contiguous()

    return apply


def with_number(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.flatten()[0] = value
        return tensor

    return change


def with_nan_byte(tensor: Tensor) -> Tensor:
    tensor.view(torch.uint8)[3, 5] = 0xFF
    return tensor


def state(**changes: Any) -> Callable[[Tensor], Tensor]:
    """Change entries of a quant_state."""

    def change(tensor: Tensor) -> Tensor:
        entries = {**json.loads(bytes(tensor.tolist())), **changes}
        return torch.tensor(list(json.dumps(entries).encode())).byte()

    return change


STATE = ".weight.quant_state.bitsandbytes__nf4"
WORDS, ZEROS = "packed 4 bits, groups of 32", "packed 4 bits, zero points"
FAULTS: dict[str, tuple[str, Change, str]] = {
    "no scale": (WORDS, edited(".weight_scale", lambda _: None), "weight_scale is missing"),
    "no shape": (WORDS, edited(".weight_shape", lambda _: None), "weight_shape is missing"),
    "wrong shape": (WORDS, edited(".weight_shape", lambda t: t + 8), "says .* does not fit integers"),
    "few scales": (WORDS, edited(".weight_scale", lambda t: t[:, :-1]), "does not fit"),
    "no zeros": (ZEROS, edited(".weight_zero_point", lambda _: None), "zero_point is missing"),
    "few zeros": (ZEROS, edited(".weight_zero_point", lambda t: t[1:]), "zero_point is I32"),
    "float words": (WORDS, edited(".weight_packed", Tensor.float), "instead of a matrix of I32"),
    "infinite scale": (WORDS, edited(".weight_scale", with_number(torch.inf)), "NaN or infinite"),
    "int8 scale": ("int8 channels", edited(".weight_scale", Tensor.char), "is I8 instead of"),
    "int8 zeros": ("int8, zero points", edited(".weight_zero_point", lambda t: t[1:]), "does not fit the scales"),
    "NaN scale": ("int8 channels", edited(".weight_scale", with_number(torch.nan)), "NaN or infinite"),
    "NaN number": ("e4m3 channels", edited(".weight", with_nan_byte), "down_proj.weight has numbers that are NaN"),
    "plain number": ("e4m3 channels", edited(".weight", Tensor.half), "instead of a matrix of F8_E4M3"),
    "no fp8 scale": ("fp8 blocks", edited(".weight_scale_inv", lambda _: None), "F8_E4M3"),
    "large fp8 scale": ("fp8 blocks", edited(".weight_scale_inv", with_number(3e38)), "make weights infinite"),
    "NaN fp8 scale": ("fp8 small blocks", edited(".weight_scale_inv", with_number(torch.nan)), "NaN or infinite"),
    "other fp8 blocks": ("fp8 blocks", edited(".weight_scale_inv", lambda t: t.T), "does not fit"),
    "no absmax": ("nf4", edited(".weight.absmax", lambda _: None), "absmax is missing"),
    "few absmax": ("nf4", edited(".weight.absmax", lambda t: t[1:]), "absmax is F32"),
    "NaN absmax": ("nf4", edited(".weight.absmax", with_number(torch.nan)), "NaN or infinite"),
    "bad JSON": ("nf4", edited(STATE, lambda t: t[1:]), "has no usable sizes"),
    "list of JSON": ("nf4", edited(STATE, lambda _: torch.tensor([91, 93]).byte()), "has no usable sizes"),
    "deep JSON": ("nf4", edited(STATE, lambda _: torch.full((60_000,), 91).byte()), "has no usable sizes"),
    "long JSON": ("nf4", edited(STATE, lambda _: torch.full((70_000,), 32).byte()), "instead of JSON"),
    "no blocksize": ("nf4", edited(STATE, state(blocksize=None)), "has no usable sizes"),
    "zero blocksize": ("nf4", edited(STATE, state(blocksize=0)), "has no usable sizes"),
    "huge shape": ("nf4", edited(STATE, state(shape=[2**40, 2**40])), "has no usable sizes"),
    "other shape": ("nf4", edited(STATE, state(shape=[64, 64])), "instead of F32"),
    "nested offset": ("nf4, nested", edited(STATE, state(nested_offset="x")), "has no usable sizes"),
    "huge offset": ("nf4, nested", edited(STATE, state(nested_offset=10**400)), "has no usable sizes"),
    "no nested": ("nf4, nested", edited(".weight.nested_absmax", lambda _: None), "nested_absmax is missing"),
    "few SCB": ("llm.int8", edited(".SCB", lambda t: t[1:]), "SCB is F32"),
    "tiles": ("llm.int8", edited(".weight_format", lambda t: t + 2), "tiles for a GPU"),
    "infinite SCB": ("llm.int8", edited(".SCB", with_number(torch.inf)), "NaN or infinite"),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=native)])
@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_matrices_are_refused(fault: str, kernels: str, written: Written, tmp_path: Path) -> None:
    name, change, expected = FAULTS[fault]
    folder, _ = written.copy(FORMATS[name], tmp_path)
    change_tensors(folder, change)
    with pytest.raises(ModelError, match=expected) as found:
        load(folder, kernels)
    assert "down_proj" in str(found.value)
    assert found.value.fix


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    "2:4": ({"format": "marlin-24"}, "marlin-24"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "rotated": ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "no groups": ({"config_groups": None}, "config_groups"),
    "a list": ({"config_groups": [1]}, "config_groups"),
    "a preset": ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups"),
    "5 bits": ({"config_groups": {"g": {"weights": {"num_bits": 5}}}}, "num_bits = 5"),
    "dynamic": ({"config_groups": {"g": {"weights": {"num_bits": 8, "dynamic": True}}}}, "dynamic"),
    "a size": ({"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 0}}}}, "group_size = 0"),
    "a block": (
        {"config_groups": {"g": {"weights": {"strategy": "block", "block_structure": "x8"}}}}, "the size of a block",
    ),
    "a long block": (
        {"config_groups": {"g": {"weights": {"strategy": "block", "block_structure": "9" * 5000 + "x1"}}}},
        "the size of a block",
    ),
    "a strategy": ({"config_groups": {"g": {"weights": {"strategy": "tensor_group"}}}}, "strategy"),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_other_options_are_refused_by_name(case: str, written: Written, tmp_path: Path) -> None:
    folder, _ = written.copy(form := FORMATS["packed 4 bits, groups of 32"], tmp_path)
    changes, expected = OPTIONS[case]
    edit_config(folder, quantization_config={**form.config, **changes})
    with pytest.raises(ModelError, match=expected):
        load(folder)


def test_older_config_files_have_another_entry(written: Written, tmp_path: Path) -> None:
    folder, expected = written.copy(form := FORMATS["packed 4 bits, groups of 32"], tmp_path)
    entry = {key: value for key, value in form.config.items() if key != "quant_method"}
    edit_config(folder, quantization_config=None, compression_config=entry)
    assert error(logits(folder), expected) < 1e-6


def test_blocks_of_fp8_have_two_sizes(written: Written, tmp_path: Path) -> None:
    folder, _ = written.copy(form := FORMATS["fp8 blocks"], tmp_path)
    edit_config(folder, quantization_config={**form.config, "weight_block_size": [128]})
    with pytest.raises(ModelError, match="weight_block_size"):
        load(folder)


# --- experts in MXFP4

SIZES: dict[str, Any] = {**EXPERTS, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CHANGED = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkpoint whose experts are in random blocks, and the same with the numbers that they stand for."""
    packed, plain = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "gpt_oss", {"blocks": SIZES})
        make_pair(plain, "gpt_oss", "blocks")
    generator, tensors, blocks = torch.Generator().manual_seed(0), load_file(plain / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(CHANGED)]:
        count, k, n = tensors[name].shape
        halves = torch.randint(0, 256, (count, n, k // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, (count, n, k // 32), dtype=torch.uint8, generator=generator)
        blocks |= {f"{name}_blocks": halves, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(halves, scales, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file({**{k: v for k, v in tensors.items() if not k.endswith(CHANGED)}, **blocks}, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def test_blocks_are_the_numbers_that_transformers_decodes(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    assert torch.equal(logits(packed), logits(plain))


@native
def test_native_kernels_multiply_by_the_blocks(folders: tuple[Path, Path]) -> None:
    """They round rows to 8 bits, so a row may use another expert; rows that do not differ by little."""
    packed, plain = folders
    loaded = load(packed, "native")
    seen, expected = logits(loaded), logits(plain)
    assert "mxfp4" in loaded.kernels
    errors = (seen - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < errors.median() < 0.1


def _no_scales(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def _few_scales(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :-1].contiguous()


def _wrong_type(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name].float()


@pytest.mark.parametrize("change", [_no_scales, _few_scales, _wrong_type])
def test_blocks_need_scales_that_fit_them(change: Change, folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "changed")
    change_tensors(folder, change)
    with pytest.raises(ModelError, match="down_proj_blocks is .* scales do not fit"):
        load(folder)


def test_blocks_are_not_rounded_again(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="quantised already .MXFP4"):
        load_model(str(folders[0]), quantization="int8", kernels="auto")
