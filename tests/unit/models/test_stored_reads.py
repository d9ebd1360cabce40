"""Tensors of safetensors files are read in place, and not more often than a model needs them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels import usable_sets
from speculant.models import QuantizedBlocks, StoredWeights, joined, load_model, open_file, open_folder, scheme_of
from speculant.models.weights import tensors as stored
from tests.models import Shape, write_checkpoint
from tests.quantised_folders import FORMATS, Gptq, quantise
from tests.unit.models.families import PADDED, VARIANTS, make_pair

native = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
KERNELS = pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=native)])
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The numbers of reads of each tensor, and of headers by the name of the file."""
    counts: Counter[str] = Counter()
    read, opened = StoredWeights.read, safe_open

    def counting_read(files: StoredWeights, name: str) -> Tensor | QuantizedBlocks:
        counts[name] += 1
        return read(files, name)

    def counting_open(file: Path, framework: str) -> object:
        counts[file.name] += 1
        return opened(file, framework=framework)

    monkeypatch.setattr(StoredWeights, "read", counting_read)
    monkeypatch.setattr(stored, "safe_open", counting_open)
    return counts


def write(file: Path, tensors: Mapping[str, tuple[Tensor, str]]) -> None:
    """Write tensors in this order, without gaps; safetensors' own writer sorts them so that all are aligned."""
    header, content = {}, b""
    for name, (tensor, kind) in tensors.items():
        data = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        header[name] = {
            "dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(content), len(content) + len(data)]
        }  # fmt: skip
        content += data
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ahead", [0, 1, 5, 4095])
@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.values())
def test_tensors_of_all_types_are_read(dtype: torch.dtype, ahead: int, tmp_path: Path) -> None:
    """Also where they are not aligned, have no dimensions or no numbers."""
    stack = torch.arange(24).reshape(3, 2, 4).to(dtype)
    tensors = {
        "ahead": torch.zeros(ahead, dtype=torch.uint8), "stack": stack, "one": stack[1, 1, 1].clone(),
        "none": stack[:0],
    }  # fmt: skip
    write(tmp_path / "a", {name: (each, TYPES[each.dtype]) for name, each in tensors.items()})
    files = open_file(tmp_path / "a")
    for name, expected in tensors.items():
        found = files.read(name)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found.double(), expected.double())
    assert torch.equal(files.read_stacked("stack", 2).double(), stack[2].double())
    for name, index in (("stack", 3), ("stack", -1), ("one", 0), ("none", 0)):
        with pytest.raises(ModelError, match=f"no part {index}"):
            files.read_stacked(name, index)


def test_changes_to_a_tensor_stay_in_memory(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "a")
    files = open_file(tmp_path / "a")
    files.read("a").zero_()
    assert files.read("a").tolist() == [1] * 4


@pytest.mark.parametrize("left", [0, 1, 100, -1])
def test_a_file_that_has_changed_is_an_error(left: int, tmp_path: Path) -> None:
    file = tmp_path / "a"
    save_file({"a": torch.ones(40)}, file)
    files = open_file(file)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ModelError, match="shorter"):
        files.read("a")
    file.unlink()
    with pytest.raises(ModelError, match="can't be read"):
        files.read("a")


def test_types_without_numbers_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", {"a": (torch.zeros(2, dtype=torch.complex64), "C64")})
    with pytest.raises(ModelError, match="C64"):
        open_file(tmp_path / "a").read("a")


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_offsets_with_gaps_are_refused(name: str, place: int, change: int, tmp_path: Path) -> None:
    """Tensors overlap, leave bytes between them, have another size than their shape or end beyond the file."""
    file = tmp_path / "a"
    write(file, {each: (torch.ones(2), "F32") for each in "abc"})
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[name]["data_offsets"][place] += change
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        open_file(file)


@KERNELS
def test_parts_of_a_fused_matrix_are_converted_once(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Counter[str]
) -> None:
    options = {"hidden_size": 64, "intermediate_size": 96, **PADDED, "sliding_window": None}
    monkeypatch.setitem(VARIANTS, "phi3", {"whole blocks": options})
    make_pair(tmp_path / "plain", "phi3", "whole blocks")
    quantise(tmp_path / "plain", tmp_path / "packed", tmp_path / "numbers", Gptq())
    counted.clear()
    load_model(str(tmp_path / "packed"), kernels=kernels)
    fused = {name: count for name, count in counted.items() if "qkv_proj" in name or "gate_up_proj" in name}
    assert {count for name, count in fused.items() if name.endswith((".qweight", ".scales", ".g_idx"))} == {1}
    assert {count for name, count in fused.items() if name.endswith(".qzeros")} == {2}  # for the kind, and for itself
    assert counted["model.safetensors"] == 1


@pytest.mark.parametrize("form", ["packed 4 bits, groups of 32", "nf4, nested"])
@KERNELS
def test_descriptions_of_modules_are_read_once(kernels: str, form: str, tmp_path: Path, counted: Counter[str]) -> None:
    source = Path(write_checkpoint(tmp_path / "plain", Shape(hidden_size=64)))
    quantise(source, tmp_path / "packed", tmp_path / "numbers", FORMATS[form])
    counted.clear()
    load_model(str(tmp_path / "packed"), kernels=kernels)
    found = [count for name, count in counted.items() if name.endswith(".weight_shape") or "quant_state" in name]
    assert set(found) == {1}
    assert counted["model.safetensors"] == 1


def test_kinds_need_neither_scales_nor_integers(tmp_path: Path, counted: Counter[str]) -> None:
    source = Path(write_checkpoint(tmp_path / "plain", Shape(hidden_size=64)))
    quantise(source, tmp_path / "packed", tmp_path / "numbers", Gptq(act_order=True))
    files, scheme = open_folder(tmp_path / "packed"), scheme_of({"quantization_config": Gptq(act_order=True).config})
    assert scheme is not None
    counted.clear()
    files = joined(files, scheme)
    for _ in range(2):
        assert files.quantised_kinds() == ["ZERO4"]
        assert any(files.order(name) is not None for name in files.joined)
    assert {name.rpartition(".")[2] for name in counted} == {"qzeros", "g_idx"}
    assert set(counted.values()) == {1}
