"""Experts in MXFP4 in safetensors are those that transformers decodes."""

from __future__ import annotations

import json
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
from speculant.kernels import usable_sets
from speculant.models import load_model
from tests.unit.models.families import EXPERTS, VARIANTS, Session, make_pair, random_tokens

SIZES: dict[str, Any] = {**EXPERTS, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CHANGED = ("gate_up_proj", "down_proj")
PROMPT = random_tokens(24)
Change = Callable[[dict[str, Tensor]], None]


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


def logits(folder: Path, kernels: str = "reference") -> Tensor:
    return Session(load_model(str(folder), "float32", kernels=kernels).model).extend(PROMPT)


def test_blocks_are_the_numbers_that_transformers_decodes(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    assert torch.equal(logits(packed), logits(plain))


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_native_kernels_multiply_by_the_blocks(folders: tuple[Path, Path]) -> None:
    """They round rows to 8 bits, so a row may use another expert; rows that do not differ by little."""
    packed, plain = folders
    loaded = load_model(str(packed), "float32", kernels="native")
    seen, expected = Session(loaded.model).extend(PROMPT), logits(plain)
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
    tensors = load_file(folders[0] / "model.safetensors")
    change(tensors)
    shutil.copy(folders[0] / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="down_proj_blocks is .* scales do not fit"):
        load_model(str(tmp_path))


def test_blocks_are_not_rounded_again(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="quantised already .MXFP4"):
        load_model(str(folders[0]), quantization="int8", kernels="auto")
