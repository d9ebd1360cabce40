"""Checkpoints in quantised formats, written from the formats' definitions, and the numbers that they stand for.

GPTQ and AWQ have integers in groups; compressed-tensors, FP8 and bitsandbytes have scales of rows, tiles or blocks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each integer of a word, from the lowest bits on


@dataclass(frozen=True)
class Rounded:
    """Integers q [n, k] in groups, with scales and zeros [n, groups]. groups: that of each input [k]."""

    q: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    def decoded(self) -> np.ndarray:
        """Return the numbers in float32."""
        scales, zeros = self.scales[:, self.groups].astype(np.float32), self.zeros[:, self.groups]
        return scales * (self.q - zeros).astype(np.float32)


@dataclass(frozen=True)
class Made:
    """The tensors of a module, by the ends of their names, and the numbers [n, k] that they stand for."""

    tensors: Tensors
    decoded: Tensor


Pack = Callable[["Gptq", Rounded], Tensors]


@dataclass(frozen=True)
class Gptq:
    """How a checkpoint is quantised. size -1 = one group. Options of single modules take precedence: see `of`."""

    bits: int = 4
    size: int = 32
    sym: bool = False
    act_order: bool = False
    form: str = "gptq"
    scales: torch.dtype = torch.float16
    modules: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)  # by the end of a name; None = plain

    def of(self, module: str) -> Gptq | None:
        """Return the options of a module; None = it is plain."""
        found = [changes for end, changes in self.modules.items() if module.endswith(end)]
        if found and found[0] is None:
            return None
        return Gptq(**{**self.__dict__, **(found[0] or {})}) if found else self

    def made(self, module: str, weight: Tensor, seed: int, pack: Pack) -> Made | None:
        """Return a matrix [n, k]; None = it is plain, as routers are, and lm_head unless `modules` names it."""
        options = self.of(module)
        if options is None or (module == "lm_head" and "lm_head" not in self.modules) or module.endswith("mlp.gate"):
            return None
        made = rounded(weight.numpy(), options, seed)
        parts = {f".{part}": tensor for part, tensor in pack(options, made).items()}
        return Made(parts, torch.from_numpy(made.decoded()))

    @property
    def config(self) -> dict[str, Any]:
        """The entry of config.json."""
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.size, "sym": self.sym,
            "desc_act": self.act_order, "checkpoint_format": self.form, "lm_head": "lm_head" in self.modules,
        }  # fmt: skip


def rounded(weight: np.ndarray, own: Gptq, seed: int = 0) -> Rounded:
    """Round a matrix [n, k] to integers. With an act-order, groups have random inputs."""
    k = weight.shape[1]
    size, most = (k if own.size == -1 else own.size), 2**own.bits - 1
    groups = np.arange(k) // size
    if own.act_order:
        groups = np.random.default_rng(seed).permutation(groups)
    parts = [weight[:, groups == group] for group in range(groups.max() + 1)]
    lows = np.stack([np.minimum(part.min(axis=1), 0) for part in parts], axis=1)
    highs = np.stack([np.maximum(part.max(axis=1), 0) for part in parts], axis=1)
    steps = 2 * np.maximum(-lows, highs) / most if own.sym else (highs - lows) / most
    stored = torch.from_numpy(steps).to(own.scales).float().numpy()
    zeros = np.full(stored.shape, (most + 1) // 2) if own.sym else np.rint(-lows / stored)
    zeros = zeros.clip(0, most).astype(np.int64)
    q = (np.rint(weight / stored[:, groups]) + zeros[:, groups]).clip(0, most).astype(np.int64)
    return Rounded(q, stored, zeros, groups)


def words(integers: np.ndarray, bits: int) -> Tensor:
    """Pack integers [r, c] along the rows' numbers: int32 [r * bits / 32, c], the lowest bits first."""
    count = 32 // bits
    parts = integers.reshape(-1, count, integers.shape[1]).astype(np.uint64)
    packed = sum(parts[:, place] << np.uint64(bits * place) for place in range(count))
    return torch.from_numpy(np.asarray(packed).astype(np.uint32).view(np.int32))


def gptq_module(own: Gptq, made: Rounded) -> Tensors:
    """Return the tensors of a module in GPTQ."""
    zeros = words(made.zeros, own.bits).T.numpy().view(np.uint32)  # [groups, n bits / 32]
    if own.form == "gptq":
        zeros = zeros - np.uint32(sum(1 << place for place in range(0, 32, own.bits)))
    return {
        "qweight": words(made.q.T, own.bits),
        "qzeros": torch.from_numpy(np.ascontiguousarray(zeros).view(np.int32)),
        "scales": torch.from_numpy(made.scales.T.copy()).to(own.scales),
        "g_idx": torch.from_numpy(made.groups.astype(np.int32)),
    }


def awq_module(own: Gptq, made: Rounded) -> Tensors:
    """Return the tensors of a module in AWQ."""
    place = [8 * (column // 8) + AWQ_ORDER[column % 8] for column in range(len(made.q))]
    return {
        "qweight": words(made.q[place], 4).T.contiguous(),
        "qzeros": words(made.zeros[place], 4).T.contiguous(),
        "scales": torch.from_numpy(made.scales.T.copy()).to(own.scales),
    }


def awq_config(size: int) -> dict[str, Any]:
    """Return the entry of config.json for AWQ."""
    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the matrix of a linear layer."""
    return name.endswith(".weight") and tensor.ndim == 2 and not any(part in name for part in ("embed", "wte", "wpe"))


# --- scales of rows, tiles or blocks

E4M3 = torch.float8_e4m3fn
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


Write = Callable[[Tensor], Made]


@dataclass(frozen=True)
class Format:
    """How a checkpoint is quantised. writes: by a part of the modules' names, the first that fits; None = plain."""

    config: Mapping[str, Any]
    writes: Mapping[str, Write | None]

    def of(self, module: str) -> Write | None:
        return next((write for part, write in self.writes.items() if part in module), None)

    def made(self, module: str, weight: Tensor, _seed: int, _pack: Pack) -> Made | None:
        """Return a matrix [n, k]; None = it is plain, as routers are."""
        write = None if "router" in module else self.of(module)
        return None if write is None else write(weight)


def tiles(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Return the tiles of a matrix [n / rows, rows, k / columns, columns]; zeros follow the last numbers."""
    n, k = weight.shape
    whole = functional.pad(weight, (0, -k % columns, 0, -n % rows))
    return whole.view(-1, rows, whole.shape[1] // columns, columns)


def spread(scales: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """Return the scale of each number of a matrix."""
    wide = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


def e4m3(rows: int, columns: int, end: str = ".weight_scale", dtype: torch.dtype = torch.float32) -> Write:
    """Numbers in e4m3 with a scale for each tile; rows or columns 0 = all."""

    def write(weight: Tensor) -> Made:
        sizes = rows or len(weight), columns or weight.shape[1]
        scales = (tiles(weight, *sizes).abs().amax((1, 3)) / 448).to(dtype)
        each = spread(scales, *sizes, weight.shape)
        numbers = (weight / each.clamp_min(1e-30)).clamp(-448, 448).to(E4M3)
        stored = scales.flatten() if scales.numel() == 1 else scales
        return Made({".weight": numbers, end: stored}, numbers.float() * each)

    return write


def integers(bits: int, columns: int, symmetric: bool = True, dtype: torch.dtype = torch.float16) -> Write:
    """Integers, not packed: q - middle, and the scales and zeros [n, groups]; columns 0 = one group."""
    middle, most = 2 ** (bits - 1), 2**bits - 1

    def write(weight: Tensor) -> Made:
        size = columns or weight.shape[1]
        groups = tiles(weight, 1, size)[:, 0]
        if symmetric:
            scales = (2 * groups.abs().amax(2) / most).to(dtype)
            zeros = torch.full_like(scales, middle, dtype=torch.float32)
        else:
            lows, highs = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
            scales = ((highs - lows) / most).to(dtype)
            zeros = (-lows / scales.float()).round().clamp(0, most)
        each, zero = spread(scales, 1, size, weight.shape), spread(zeros, 1, size, weight.shape)
        q = ((weight / each).round() + zero).clamp(0, most)
        parts = {".weight": (q - middle).to(torch.int8), ".weight_scale": scales}
        if not symmetric:
            parts[".weight_zero_point"] = (zeros - middle).to(torch.int8)
        return Made(parts, (q - zero) * each)

    return write


def packed(bits: int, columns: int, symmetric: bool = True, dtype: torch.dtype = torch.float16) -> Write:
    """The same in words of 32 bits, as pack-quantized has them."""

    def write(weight: Tensor) -> Made:
        made, (n, k) = integers(bits, columns, symmetric, dtype)(weight), weight.shape
        unsigned = functional.pad(made.tensors[".weight"].int() + 2 ** (bits - 1), (0, -k % (32 // bits)))
        parts = {
            ".weight_packed": words(unsigned.T.numpy(), bits).T,
            ".weight_scale": made.tensors[".weight_scale"],
            ".weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            zeros = made.tensors[".weight_zero_point"].int() + 2 ** (bits - 1)
            parts[".weight_zero_point"] = words(functional.pad(zeros, (0, 0, 0, -n % (32 // bits))).numpy(), bits)
        return Made(parts, made.decoded)

    return write


def compressed(form: str, writes: Mapping[str, Write | None], *weights: Mapping[str, Any], **more: Any) -> Format:
    """compressed-tensors with these options of weights, a group each."""
    groups = {
        f"group_{number}": {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **each}}
        for number, each in enumerate(weights)
    }
    entries = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return Format({**entries, **more}, writes)


def nf4(size: int = 64, nested: int | None = None, kind: str = "nf4") -> Write:
    """bitsandbytes' numbers of 4 bits. nested: scales of a block that are quantised together; None = they are not."""
    table = NF4 if kind == "nf4" else torch.linspace(-1, 1, 16)

    def write(weight: Tensor) -> Made:
        flat = functional.pad(weight.flatten(), (0, -weight.numel() % size)).view(-1, size)
        scales, state = flat.abs().amax(1), {"blocksize": size, "shape": [*weight.shape], "quant_type": kind}
        parts, numbers = {".weight.quant_map": table.clone()}, torch.linspace(-1, 1, 256)
        if nested is None:
            parts[".weight.absmax"] = scales
        else:
            offset = float(scales.mean())
            rest = functional.pad(scales - offset, (0, -len(scales) % nested)).view(-1, nested)
            largest = rest.abs().amax(1)
            index = (rest / largest[:, None]).unsqueeze(-1).sub(numbers).abs().argmin(-1)
            scales = (numbers[index] * largest[:, None]).flatten()[: len(scales)] + offset
            parts[".weight.absmax"] = index.flatten()[: len(scales)].to(torch.uint8)
            parts |= {".weight.nested_absmax": largest, ".weight.nested_quant_map": numbers.clone()}
            state |= {"nested_blocksize": nested, "nested_offset": offset, "nested_dtype": "float32"}
        index = (flat / scales[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1)
        pairs = index.view(-1, 2).to(torch.uint8)
        parts[".weight"] = (pairs[:, :1] << 4 | pairs[:, 1:])[: -(-weight.numel() // 2)]
        parts[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
        return Made(parts, (table[index] * scales[:, None]).flatten()[: weight.numel()].view_as(weight))

    return write


def llm_int8(weight: Tensor) -> Made:
    """Return bitsandbytes' rows of int8."""
    most = weight.abs().amax(1)
    numbers = (weight * (127 / most[:, None])).round().to(torch.int8)
    parts = {".weight": numbers, ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Made(parts, numbers.float() * (most[:, None] / 127))


HF_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
LINEAR = "layers."  # a part of the names of all modules but lm_head
INT4, INT8 = {"num_bits": 4}, {"num_bits": 8}
FLOAT8 = {"num_bits": 8, "type": "float"}
FORMATS = {
    "packed 4 bits, groups of 32": compressed(
        "pack-quantized", {LINEAR: packed(4, 32)}, {**INT4, "strategy": "group", "group_size": 32}
    ),
    "packed 4 bits, zero points": compressed(
        "pack-quantized", {LINEAR: packed(4, 32, False)},
        {**INT4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "packed 4 bits, channels": compressed("pack-quantized", {LINEAR: packed(4, 0)}, {**INT4, "strategy": "channel"}),
    "packed 8 bits, groups": compressed(
        "pack-quantized", {LINEAR: packed(8, 64)}, {**INT8, "strategy": "group", "group_size": 64}
    ),
    "packed 8 bits, zero points": compressed(
        "pack-quantized", {LINEAR: packed(8, 32, False)},
        {**INT8, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "packed, precise scales": compressed(
        "pack-quantized", {LINEAR: packed(4, 32, dtype=torch.float32)},
        {**INT4, "strategy": "group", "group_size": 32},
    ),
    "int8 channels": compressed(
        "int-quantized", {LINEAR: integers(8, 0, dtype=torch.float32)}, {**INT8, "strategy": "channel"}
    ),
    "int8, zero points": compressed(
        "int-quantized", {LINEAR: integers(8, 0, False)}, {**INT8, "strategy": "channel", "symmetric": False}
    ),
    "e4m3 channels": compressed(
        "float-quantized", {LINEAR: e4m3(1, 0, dtype=torch.bfloat16)}, {**FLOAT8, "strategy": "channel"}
    ),
    "e4m3 tensors": compressed("float-quantized", {LINEAR: e4m3(0, 0)}, {**FLOAT8, "strategy": "tensor"}),
    "e4m3 blocks": compressed(
        "naive-quantized", {LINEAR: e4m3(128, 128)},
        {**FLOAT8, "strategy": "block", "block_structure": [128, 128]},
    ),
    "mixed": compressed(
        "mixed-precision", {"down_proj": e4m3(1, 0), "up_proj": integers(8, 0), "q_proj": None, LINEAR: packed(4, 32)},
        {**INT4, "strategy": "group", "group_size": 32}, {**FLOAT8, "strategy": "channel"},
        {**INT8, "strategy": "channel"},
    ),
    "fp8 blocks": Format(
        {**HF_FP8, "weight_block_size": [128, 128]}, {LINEAR: e4m3(128, 128, ".weight_scale_inv")}
    ),
    "fp8 small blocks": Format({**HF_FP8, "weight_block_size": [32, 32]}, {LINEAR: e4m3(32, 32, ".weight_scale_inv")}),
    "fp8 tensors": Format(HF_FP8, {"k_proj": None, LINEAR: e4m3(0, 0)}),
    "nf4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, {LINEAR: nf4()}),
    "nf4, nested": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, {LINEAR: nf4(64, 256)}),
    "fp4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, {LINEAR: nf4(64, kind="fp4")}),
    "llm.int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, {LINEAR: llm_int8}),
}  # fmt: skip


def quantise(
    source: Path, packed: Path, plain: Path, form: Gptq | Format, write: Pack = gptq_module, transposed: bool = False
) -> None:
    """Write the linear layers of a checkpoint to `packed`, and the numbers that they stand for to `plain`.

    write: returns the tensors of a module in groups. transposed: the plain matrices are [k, n].
    """
    found, numbers = Tensors(), Tensors()
    for seed, (name, tensor) in enumerate(sorted(load_file(source / "model.safetensors").items())):
        module, matrix = name.removesuffix(".weight"), tensor.T if transposed else tensor
        made = form.made(module, matrix.float(), seed, write) if is_linear(name, tensor) else None
        if made is None:
            found[name] = numbers[name] = tensor
            continue
        found |= {module + end: each.contiguous() for end, each in made.tensors.items()}
        numbers[name] = (made.decoded.T if transposed else made.decoded).float().contiguous()
    for folder, tensors, entry in ((packed, found, form.config), (plain, numbers, None)):
        if folder != source:
            shutil.copytree(source, folder, dirs_exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        edit_config(folder, quantization_config=entry)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None deletes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")
