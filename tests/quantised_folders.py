"""Checkpoints in quantised formats, written from the formats' definitions, and the numbers that they stand for."""

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


Write = Callable[[Gptq, Rounded], Tensors]


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the matrix of a linear layer."""
    return name.endswith(".weight") and tensor.ndim == 2 and not any(part in name for part in ("embed", "wte", "wpe"))


def quantise(
    source: Path, packed: Path, plain: Path, own: Gptq, write: Write = gptq_module, transposed: bool = False
) -> None:
    """Write the linear layers of a checkpoint to `packed`, and the numbers that they stand for to `plain`.

    lm_head is quantised if `own.modules` names it, routers are not. transposed: the plain matrices are [k, n].
    """
    stored, found, numbers = load_file(source / "model.safetensors"), Tensors(), Tensors()
    for seed, (name, tensor) in enumerate(sorted(stored.items())):
        module = name.removesuffix(".weight")
        options = own.of(module) if is_linear(name, tensor) else None
        if options is None or (module == "lm_head" and "lm_head" not in own.modules) or module.endswith("mlp.gate"):
            found[name] = numbers[name] = tensor
            continue
        matrix = (tensor.T if transposed else tensor).float().numpy()
        made = rounded(matrix, options, seed)
        found |= {f"{module}.{part}": each.contiguous() for part, each in write(options, made).items()}
        decoded = torch.from_numpy(made.decoded())
        numbers[name] = (decoded.T if transposed else decoded).contiguous()
    for folder, tensors, entry in ((packed, found, own.config), (plain, numbers, None)):
        if folder != source:
            shutil.copytree(source, folder, dirs_exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        edit_config(folder, quantization_config=entry)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None deletes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")
