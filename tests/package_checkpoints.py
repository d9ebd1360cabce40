"""Modules that the packages `compressed-tensors` and `bitsandbytes` quantise, and the numbers that they read back.

`make test` installs the packages without their dependencies, in .venv/oracle: see tests/speculators_heads.py.
"""

from __future__ import annotations

import functools
import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.quantised_folders import LINEAR, Format, Made, compressed
from tests.speculators_heads import FOLDER

COMPRESSED_TENSORS, BITSANDBYTES = ("compressed_tensors", "loguru", "psutil"), ("bitsandbytes",)


@functools.cache
def are_installed(*modules: str) -> bool:
    """Whether modules can be imported."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return all(find_spec(name) for name in modules)


def compressed_by_package(form: str, **weights: Any) -> Format:
    """Return a format whose modules the package writes and reads, with these options of weights."""
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found,unused-ignore]
    from compressed_tensors.quantization import (  # type: ignore[import-not-found,unused-ignore]
        QuantizationArgs,
        QuantizationScheme,
    )

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(weight: Tensor) -> Made:
        scales, zeros = _parameters(weight, scheme.weights)
        parts = {"weight": weight.clone(), "weight_scale": scales}
        if not scheme.weights.symmetric:
            parts["weight_zero_point"] = zeros
        stored = compressor.compress(parts, scheme)
        decoded = compressor.decompress(dict(stored), scheme)["weight"]
        return Made({f".{name}": part for name, part in stored.items()}, decoded)

    options = scheme.weights.model_dump(mode="json")
    return compressed(form, {LINEAR: write}, options)


def _parameters(weight: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    """Return the scales, which float16 holds if they belong to integers, and the zero points that fit a matrix."""
    from compressed_tensors.quantization.utils import calculate_qparams  # type: ignore[import-not-found,unused-ignore]

    n, k = weight.shape
    rows, columns = {
        "tensor": (n, k), "channel": (1, k), "group": (1, weights.group_size), "block": weights.block_structure,
    }[weights.strategy]  # fmt: skip
    whole = functional.pad(weight, (0, -k % columns, 0, -n % rows))
    tiles = whole.view(whole.shape[0] // rows, rows, whole.shape[1] // columns, columns)
    scales, zeros = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), weights)
    if weights.type == "int":
        scales = scales.half().float()
    flat = (1,) if scales.numel() == 1 else scales.shape
    return scales.reshape(flat).to(torch.float32), zeros.reshape(flat)


def four_bits_by_package(kind: str, nested: bool) -> Format:
    """Return bitsandbytes' format of 4 bits, nf4 or fp4. nested: whether scales are quantised too."""
    from bitsandbytes.functional import (  # type: ignore[import-not-found,unused-ignore]
        dequantize_4bit,
        quantize_4bit,
    )

    def write(weight: Tensor) -> Made:
        stored, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        parts = {f".weight.{name}": part.clone() for name, part in state.as_dict(packed=True).items()}
        return Made({".weight": stored, **parts}, dequantize_4bit(stored, state))

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, {LINEAR: write})


def int8_by_package() -> Format:
    """Return bitsandbytes' format of 8 bits."""
    from bitsandbytes.functional import (  # type: ignore[import-not-found,unused-ignore]
        int8_vectorwise_dequant,
        int8_vectorwise_quant,
    )

    def write(weight: Tensor) -> Made:
        stored, most, _ = int8_vectorwise_quant(weight.half())
        parts = {".weight": stored, ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
        return Made(parts, int8_vectorwise_dequant(stored, most))

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, {LINEAR: write})
