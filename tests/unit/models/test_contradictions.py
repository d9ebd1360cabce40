"""Quantised matrices whose numbers contradict config.json are refused; those that tell what was meant are said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from speculant.errors import ModelError
from speculant.models import QuantizedBlocks, decode, joined, open_folder, scheme_of
from tests.quantised_folders import FORMATS, NF4, Gptq, Made, Rounded, awq_config, awq_module, gptq_module, rounded

N, K = 64, 256
WEIGHT = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
ORDER = torch.randperm(K, generator=torch.Generator().manual_seed(1)) // 32
Change = Callable[[Tensor], Tensor | None]


def opened(folder: Path, options: Mapping[str, Any], tensors: Mapping[str, Tensor], modules: int = 1) -> Tensor:
    """Return the numbers of a matrix that some modules have."""
    named = {f"m{i}{end}": tensor.clone() for i in range(modules) for end, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors")
    scheme = scheme_of({"quantization_config": dict(options)})
    assert scheme is not None
    files = joined(open_folder(folder), scheme)
    for name in files.joined:
        found = files.read(name)
    return decode(found, torch.float32) if isinstance(found, QuantizedBlocks) else found


def gptq(own: Gptq, form: str) -> tuple[dict[str, Tensor], Rounded]:
    """Return the tensors of a matrix, with zero points in a format of their own."""
    made = rounded(WEIGHT.numpy(), own)
    return {f".{end}": tensor for end, tensor in gptq_module(replace(own, form=form), made).items()}, made


@pytest.mark.parametrize("declared", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_symmetric_zeros_tell_their_format(
    bits: int, stored: str, declared: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Gptq(bits, sym=True, act_order=bits == 8)
    tensors, made = gptq(own, stored)
    with caplog.at_level(logging.WARNING, "speculant.models.weights.schemes.gptq"):
        found = opened(tmp_path, {**own.config, "checkpoint_format": declared}, tensors, modules=3)
    torch.testing.assert_close(found, torch.from_numpy(made.decoded()), rtol=0, atol=0)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("gptq")]
    assert len(said) == (stored != (declared or "gptq")), "once for a checkpoint, if config.json is wrong"
    assert all(f"checkpoint_format {stored}, and config.json says {declared or 'gptq'}" in text for text in said)


@pytest.mark.parametrize("dynamic", [None, {"+:m0": {"bits": 4, "sym": False}}, {"+:m0": {"bits": 4}}])
def test_other_zeros_are_not_symmetric(dynamic: Any, tmp_path: Path) -> None:
    own = Gptq(sym=False)
    tensors, made = gptq(own, "gptq")
    options = {**own.config, "sym": True, "dynamic": dynamic}
    if dynamic and "sym" in dynamic["+:m0"]:
        assert torch.equal(opened(tmp_path, options, tensors), torch.from_numpy(made.decoded()))
    else:
        with pytest.raises(ModelError, match=r"m0\.qzeros has other zero points than 8"):
            opened(tmp_path, options, tensors)
    assert torch.equal(opened(tmp_path, own.config, tensors), torch.from_numpy(made.decoded()))


def at_first(value: float) -> Change:
    def change(tensor: Tensor) -> Tensor:
        tensor.flatten()[0] = value
        return tensor

    return change


def with_options(config: Mapping[str, Any], **weights: Any) -> dict[str, Any]:
    """Change the options of the weights in compressed-tensors."""
    groups = {
        name: {**group, "weights": {**group["weights"], **weights}} for name, group in config["config_groups"].items()
    }
    return {**config, "config_groups": groups}


def mxfp4(_: Tensor) -> Made:
    generator = torch.Generator().manual_seed(2)
    pairs = torch.randint(0, 256, (N, K // 32, 16), dtype=torch.uint8, generator=generator)
    return Made({"_blocks": pairs, "_scales": torch.full((N, K // 32), 120, dtype=torch.uint8)}, WEIGHT)


def matrix(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options and the tensors of a matrix in a format."""
    if name in ("gptq", "awq"):
        own = Gptq()
        made = rounded(WEIGHT.numpy(), own)
        if name == "gptq":
            return own.config, gptq(own, "gptq")[0]
        return awq_config(32), {f".{end}": tensor for end, tensor in awq_module(own, made).items()}
    if name == "mxfp4":
        return {"quant_method": "mxfp4"}, mxfp4(WEIGHT).tensors
    form = FORMATS[name]
    write = form.of("layers.")
    assert write is not None
    return dict(form.config), write(WEIGHT).tensors


WORDS, ZEROS, INT8, INT8_ZEROS = (
    "packed 4 bits, groups of 32", "packed 4 bits, zero points", "int8 channels", "int8, zero points",
)  # fmt: skip
MIDDLES = torch.full((N // 8, K // 32), -2004318072, dtype=torch.int32)  # words of eights
FP8, FP8_CHANNELS, NF4_NESTED = "fp8 blocks", "e4m3 channels", "nf4, nested"
UNFILLED = torch.full((K,), -1, dtype=torch.int32)
REFUSED: list[tuple[str, dict[str, Any], dict[str, Change], str]] = [
    # the format, changed options of weights, changed tensors, and what the error says
    ("gptq", {}, {".scales": at_first(torch.inf)}, "NaN or infinite"),
    ("gptq", {}, {".scales": at_first(torch.nan)}, "NaN or infinite"),
    ("gptq", {"group_size": 64}, {}, "has 8 groups, and 256 inputs in groups of 64 are 4"),
    ("gptq", {"bits": 8}, {}, "do not fit integers of 8 bits"),
    ("gptq", {"sym": True}, {}, "has other zero points than 8"),
    ("gptq", {}, {".g_idx": lambda t: t + 1}, "does not divide the inputs"),
    ("awq", {}, {".scales": at_first(torch.nan)}, "NaN or infinite"),
    ("awq", {"group_size": 64}, {}, "qzeros is I32"),
    (WORDS, {"actorder": "group"}, {}, r"the group of each input \(weight_g_idx\)"),
    (WORDS, {"actorder": "GROUP"}, {".weight_g_idx": lambda _: UNFILLED}, "the group of each input"),
    (WORDS, {"actorder": "dynamic"}, {}, "the group of each input"),
    (WORDS, {"actorder": True}, {}, "the group of each input"),
    (INT8, {"actorder": "group"}, {}, "the group of each input"),
    (INT8_ZEROS, {}, {".weight_zero_point": lambda t: t.int() * 300}, "zero points beyond 8 bits"),
    (INT8_ZEROS, {}, {".weight_zero_point": lambda t: t.float() + 0.5}, "zero points beyond 8 bits"),
    (INT8, {}, {".weight_zero_point": lambda _: torch.ones(N, 1, dtype=torch.int8)}, "says that the numbers are symm"),
    (WORDS, {}, {".weight_zero_point": lambda _: MIDDLES + 1}, "says that the numbers are symmetric"),
    (ZEROS, {"symmetric": True}, {}, "says that the numbers are symmetric"),
    (WORDS, {"group_size": 64}, {}, r"weight_scale is \[64, 8\], which does not fit"),
    (WORDS, {"group_size": -1, "strategy": "channel"}, {}, "does not fit"),
    (WORDS, {}, {".weight_scale": lambda t: t[:, :1]}, "does not fit"),
    (WORDS, {}, {".weight_scale": lambda t: t[:1, :1].flatten()}, "does not fit"),
    (WORDS, {"num_bits": 8}, {}, "does not fit integers of 8 bits"),
    (WORDS, {}, {".weight_scale": at_first(torch.inf)}, "NaN or infinite"),
    (FP8_CHANNELS, {"actorder": "group"}, {}, "an order of the inputs of floats"),
    (FP8_CHANNELS, {}, {".weight_g_idx": lambda _: ORDER}, "an order of the inputs of floats"),
    (FP8_CHANNELS, {}, {".weight_zero_point": lambda _: torch.ones(N, 1)}, "says that the numbers are symmetric"),
    (FP8, {}, {".weight_scale": lambda _: torch.ones(1)}, "both weight_scale_inv and weight_scale"),
    (FP8, {}, {".weight_scale_inv": lambda t: t[:1, :1]}, "does not fit"),
    (FP8, {"weight_block_size": [32, 32]}, {}, "does not fit"),
    (FP8, {"weight_block_size": [64, 128]}, {".weight_scale_inv": lambda _: torch.ones(N, 1)}, "does not fit"),
    (NF4_NESTED, {}, {"state": lambda _: None}, "has no usable sizes"),
    ("nf4", {}, {".weight.quant_map": lambda _: NF4 / 0}, "NaN or infinite"),
    ("mxfp4", {}, {"_scales": at_first(255)}, "scales that are NaN"),
    ("mxfp4", {}, {"_blocks": lambda t: t[:, :-1]}, "its scales do not fit it"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[1]}-{[*case[2]]}")
def test_contradictions_are_refused(case: tuple[str, Any, Any, str], tmp_path: Path) -> None:
    name, weights, changes, expected = case
    options, tensors = matrix(name)
    assert opened(tmp_path, options, tensors).isfinite().all()
    nested = name in FORMATS and "config_groups" in options
    for end, change in changes.items():
        if end == "state":
            end = ".weight.quant_state.bitsandbytes__nf4"
            text = bytes(tensors[end].tolist()).replace(b"nested_offset", b"other_offset")
            tensors[end] = torch.tensor(list(text)).byte()
        else:
            tensors[end] = change(tensors[end].clone() if end in tensors else WEIGHT)
    options = with_options(options, **weights) if nested else {**options, **weights}
    with pytest.raises(ModelError, match=expected) as found:
        opened(tmp_path, options, tensors)
    assert found.value.fix


ALLOWED: list[tuple[str, dict[str, Any], dict[str, Tensor]]] = [
    (WORDS, {"actorder": "weight"}, {}),
    (WORDS, {"actorder": "static"}, {".weight_g_idx": UNFILLED}),
    (WORDS, {"actorder": None}, {".weight_zero_point": MIDDLES}),
    (WORDS, {}, {".weight_zero_point": torch.zeros(N, K // 32, dtype=torch.int8)}),
    (INT8, {}, {".weight_zero_point": torch.zeros(N, 1, dtype=torch.int8)}),
    (FP8_CHANNELS, {}, {".weight_zero_point": torch.zeros(N, 1)}),
]


@pytest.mark.parametrize("case", ALLOWED, ids=lambda case: f"{case[0]}-{case[1]}-{[*case[2]]}")
def test_what_changes_no_number_is_read(case: tuple[str, Any, dict[str, Tensor]], tmp_path: Path) -> None:
    name, weights, others = case
    options, tensors = matrix(name)
    expected = opened(tmp_path, options, tensors)
    assert torch.equal(opened(tmp_path, with_options(options, **weights), {**tensors, **others}), expected)
