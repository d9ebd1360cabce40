"""Checkpoints that quantizers' own packages wrote have the logits of the numbers that the packages read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculant.kernels import Type, usable_sets
from speculant.models import NativeDecoder, load_model
from tests.models import Shape, write_checkpoint
from tests.package_checkpoints import (
    BITSANDBYTES,
    COMPRESSED_TENSORS,
    are_installed,
    compressed_by_package,
    four_bits_by_package,
    int8_by_package,
)
from tests.quantised_folders import Format, quantise
from tests.unit.models.families import Session, random_tokens

PROMPT = random_tokens(24)
GROUP: dict[str, Any] = {"strategy": "group", "group_size": 64}
CASES: dict[str, tuple[str, dict[str, Any], Type]] = {
    "4 bits": ("pack-quantized", {"num_bits": 4, **GROUP}, Type.Q4_0),
    "4 bits, zero points": ("pack-quantized", {"num_bits": 4, "symmetric": False, **GROUP}, Type.ZERO4),
    "4 bits, channels": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, Type.Q4_0),
    "8 bits": ("pack-quantized", {"num_bits": 8, **GROUP}, Type.Q8_0),
    "8 bits, zero points": ("pack-quantized", {"num_bits": 8, "symmetric": False, **GROUP}, Type.ZERO8),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, Type.INT8),
    "int8 tensors": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, Type.INT8),
    "int8, zero points": ("naive-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, Type.ZERO8),
    "e4m3": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, Type.FP8),
    "e4m3 tensors": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, Type.FP8),
    "e4m3 blocks": (
        "naive-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, Type.FP8,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        Type.MXFP4,
    ),
}  # fmt: skip


def check(form: Format, type_: Type, root: Path) -> None:
    """Compare the logits of a checkpoint with those of its numbers, on both backends."""
    source = Path(write_checkpoint(root / "plain", Shape(hidden_size=192)))
    quantise(source, root / "packed", root / "numbers", form)
    found, expected = (
        Session(load_model(str(root / name), "float32", kernels="reference").model).extend(PROMPT)
        for name in ("packed", "numbers")
    )
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    if not usable_sets():
        return
    loaded = load_model(str(root / "packed"), "float32", kernels="native").model
    assert isinstance(loaded, NativeDecoder)
    assert loaded.packed.layers[0].attention.out.type == type_
    seen = Session(loaded).extend(PROMPT)
    assert float((seen - expected).norm() / expected.norm()) < 0.1


@pytest.mark.skipif(not are_installed(*COMPRESSED_TENSORS), reason="compressed-tensors is not installed")
@pytest.mark.parametrize("case", CASES)
def test_files_of_compressed_tensors_have_its_numbers(case: str, tmp_path: Path) -> None:
    form, options, type_ = CASES[case]
    check(compressed_by_package(form, **options), type_, tmp_path)


@pytest.mark.skipif(not are_installed(*BITSANDBYTES), reason="bitsandbytes is not installed")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_files_of_bitsandbytes_have_its_numbers(kind: str, nested: bool, tmp_path: Path) -> None:
    check(four_bits_by_package(kind, nested), Type.BF16, tmp_path)


@pytest.mark.skipif(not are_installed(*BITSANDBYTES), reason="bitsandbytes is not installed")
def test_rows_of_int8_of_bitsandbytes_have_its_numbers(tmp_path: Path) -> None:
    check(int8_by_package(), Type.INT8, tmp_path)
