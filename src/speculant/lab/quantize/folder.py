"""Writes a quantised model whole or not at all: a GGUF file, or a folder that vLLM and transformers read.

A folder is in the format of compressed-tensors. Matrices of layers become integers in groups of 32 with a scale and a
zero point ("pack-quantized"). Embeddings, heads, routers, tables of distances, vectors and rows that 32 does not
divide stay as they are. The whole rounded model is in memory until it is written.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculant.errors import ConfigError, ModelError
from speculant.files import read_json
from speculant.lab.quantize.check import check_model, check_tokenizer
from speculant.lab.quantize.gguf import read_file, read_folder, write_gguf
from speculant.models import RoundsWeights, find_backends, open_folder, read_plain

GROUP = 32
_BITS = {"int4": 4, "int8": 8}
_LAYER = re.compile(r".*\b(layers|block)\.[0-9]+\..*\.weight")
_PLAIN = re.compile(
    r".*\.(gate|router|shared_expert_gate|relative_attention_bias)\.weight|(model\.)?mtp\..*"
)  # mtp: a head beside it
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "*.spm",
    "spiece.model",
)


def write_folder(source: Path, type_: str, backend: RoundsWeights, out: Path, begin: Callable[[str], None]) -> None:
    """Write a model with rounded weights to an existing folder. begin: called with the name of each matrix.

    Raises ModelError for a model or a type that the format can't hold.
    """
    if type_ not in _BITS:
        raise ModelError(
            f"a folder holds weights in {' or '.join(_BITS)}, and {type_} is a format of GGUF files",
            "name a file OUT.gguf, or another --type.",
        )
    files, config = open_folder(source), read_json(source / "config.json")
    if files.quantised_kinds():
        raise ModelError(f"{source} has quantised weights", "use the checkpoint that they were made from.")
    made, ignored = dict[str, Tensor](), list[str]()
    for name in files.names():
        tensor = read_plain(files, name)
        module = name.removesuffix(".weight")
        if _is_rounded(name, tensor):
            begin(module)
            made |= {f"{module}.{part}": each for part, each in _rounded(tensor, name, _BITS[type_], backend).items()}
        else:
            made[name] = tensor
            ignored += [module] if tensor.dim() == 2 else []
    if not ignored or len(made) == len(files.names()):
        raise ModelError(f"{source} has no matrices that this format holds", "name a file OUT.gguf.")
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)
    config["quantization_config"] = _options(_BITS[type_], ignored)
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")  # last: without it nothing loads


def _is_rounded(name: str, tensor: Tensor) -> bool:
    fits = tensor.dim() == 2 and tensor.shape[1] % GROUP == 0
    return fits and _LAYER.fullmatch(name) is not None and not _PLAIN.fullmatch(name)


def _rounded(matrix: Tensor, name: str, bits: int, backend: RoundsWeights) -> dict[str, Tensor]:
    """Return the tensors of a module: packed integers, scales and zero points."""
    if not bool(matrix.isfinite().all()):
        raise ModelError(f"{name} has weights that are NaN or infinite", "download the checkpoint again.")
    n, k = matrix.shape
    wide = matrix.dtype == torch.float64  # which the kernels do not read
    blocks = backend.round(f"ZERO{bits}", matrix.float() if wide else matrix).blocks.view(n, k // GROUP, -1)
    scales, zeros, q = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2], blocks[..., 3:]
    if bits == 4:
        q = torch.cat((q & 15, q >> 4), -1)
    return {
        "weight_packed": _packed(q.reshape(n, k), bits),
        "weight_scale": scales.bfloat16(),  # exact; see csrc/rounding.h
        "weight_zero_point": _packed(zeros.t(), bits).t().contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Return unsigned integers [n, k] in words of 32 bits, the lowest bits first; the last word may have zeros."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(numbers.to(torch.int64), (0, -numbers.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    return (padded.view(len(numbers), -1, per_word) << shifts).sum(-1).to(torch.int32)


def _options(bits: int, ignored: list[str]) -> Mapping[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP,
        "dynamic": False, "observer": "minmax",
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignored,
    }  # fmt: skip


TYPES = ("int4", "int8", "q8_0", "q4_0")


def quantize(source: Path, out: Path, type_: str, begin: Callable[[str], None], *, replace: bool = False) -> int:
    """Write a model to a .gguf file or else a folder, and return its bytes.

    source: a folder or a GGUF file with floating-point weights. begin: called with the name of each tensor. replace:
    whether existing files are replaced. Raises ConfigError or ModelError.
    """
    backend = next((each for each in find_backends("native") if isinstance(each, RoundsWeights)), None)
    assert backend is not None, "the native kernels round"
    _check_place(source, out, replace)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        if _is_file(out):
            model = read_folder(source) if source.is_dir() else read_file(source)
            write_gguf(model, type_, backend, Path(made) / out.name, begin, partial(_check, source))
            (Path(made) / out.name).replace(out)
            return out.stat().st_size
        if not source.is_dir():
            raise ConfigError("a GGUF file can't be written as a folder", "name a file OUT.gguf.")
        write_folder(source, type_, backend, Path(made), begin)
        return _move_all(Path(made), out)


def _check(source: Path, file: Path) -> None:
    check_model(source, file)
    check_tokenizer(source, file)


def _is_file(out: Path) -> bool:
    return out.suffix.lower() == ".gguf"


def _check_place(source: Path, out: Path, replace: bool) -> None:
    if out.exists() and out.samefile(source):
        raise ConfigError(f"{out} is the model itself", "name another place.")
    if out.is_dir() == _is_file(out) and out.exists():
        raise ConfigError(f"{out} is {'a folder' if out.is_dir() else 'a file'}", "name another place.")
    if not replace and out.exists() and (_is_file(out) or any(out.iterdir())):
        raise ConfigError(f"{out} exists", "name another place, or add --force to replace it.")


def _move_all(made: Path, out: Path) -> int:
    """Move files into a folder, config.json last, and return their bytes."""
    out.mkdir(exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)  # until all other files are there, nothing loads
    files = sorted(made.iterdir(), key=lambda file: file.name == "config.json")
    size = sum(file.stat().st_size for file in files)
    for file in files:
        shutil.move(file, out / file.name)
    return size
