"""The methods that make GPTQ and AWQ checkpoints for `benchmarks/formats.py` round better than rounding to nearest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.quantised.awq import best_scales, scale_inputs
from benchmarks.quantised.gptq import solve, sums_of_inputs
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.lab.bench import read_text
from speculant.models import Decoder, load_model
from tests.models import Checkpoints
from tests.quantised_folders import Gptq, Rounded, rounded

CHUNKS = [[*range(40, 80)], [*range(90, 130)]]


def model_of(folder: str) -> Decoder:
    model = load_model(folder, "float32").model
    assert isinstance(model, Decoder)
    return model


def output_error(weight: Tensor, made: Rounded, sums: Tensor) -> float:
    difference = torch.from_numpy(made.decoded()) - weight
    return float((difference @ sums * difference).sum())


@pytest.fixture
def inputs() -> Tensor:
    """Correlated inputs [500, 64] of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(500, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    return mixed * torch.randn(64, generator=generator).mul(1.5).exp()


def test_sums_are_those_of_the_inputs(checkpoints: Checkpoints) -> None:
    model = model_of(checkpoints.target)
    sums = sums_of_inputs(model, CHUNKS)
    first = "model.layers.0.self_attn.{}_proj"
    with torch.inference_mode():
        x = model.model.layers[0].input_layernorm(model.embed(torch.tensor([*CHUNKS[0], *CHUNKS[1]])))
    torch.testing.assert_close(sums[first.format("q")], x.T @ x)
    torch.testing.assert_close(sums[first.format("v")], sums[first.format("q")])
    assert len(sums) == 2 * 7
    assert "lm_head" not in sums


@pytest.mark.parametrize("size", [16, 32])
def test_gptq_lowers_the_error_of_outputs(inputs: Tensor, size: int) -> None:
    own, weight = Gptq(size=size, sym=True), torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    sums = inputs.T @ inputs
    made = solve(weight, sums, own)
    assert made.q.min() >= 0
    assert made.q.max() <= 15
    assert output_error(weight, made, sums) < 0.7 * output_error(weight, rounded(weight.numpy(), own), sums)


def test_gptq_of_independent_inputs_rounds_to_nearest() -> None:
    own, weight = Gptq(size=32, sym=True), torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    made, nearest = solve(weight, torch.eye(64), own), rounded(weight.numpy(), own)
    assert (made.q == nearest.q).all()
    assert (made.scales == nearest.scales).all()


def test_awq_scales_large_inputs_up(inputs: Tensor) -> None:
    own, weight = Gptq(size=32), torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    sums = inputs.T @ inputs
    scales = best_scales([weight], sums, own)
    sizes = sums.diagonal().sqrt()
    assert float(torch.corrcoef(torch.stack((scales.log(), sizes.log())))[0, 1]) > 0.99
    made = rounded((weight * scales).numpy(), own)
    difference = torch.from_numpy(made.decoded()) / scales - weight
    own_error = float((difference @ sums * difference).sum())
    assert own_error < 0.8 * output_error(weight, rounded(weight.numpy(), own), sums)


def test_scaled_inputs_leave_the_function(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model, folder = model_of(checkpoints.target), Path(checkpoints.target)
    tensors = load_file(folder / "model.safetensors")
    scaled = scale_inputs(tensors, sums_of_inputs(model, CHUNKS), Gptq(size=16))
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in scaled.items()}, tmp_path / "model.safetensors")
    changed = [name for name, tensor in scaled.items() if not torch.equal(tensor, tensors[name])]
    assert len(changed) >= 2 * 5
    with torch.inference_mode():
        before, after = (each.logits(read_text(each, CHUNKS[0])) for each in (model, model_of(str(tmp_path))))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
