"""AWQ (arXiv 2306.00978): columns whose inputs are large are scaled up before rounding, and the inputs scaled down.

The scales of a layer's inputs are a power of their root mean square: the power with the smallest error of the outputs.
Weights are not clipped. Models are Llama.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tests.quantised_folders import Gptq, rounded

POWERS = np.linspace(0, 0.9, 10)
# The source of inputs, a norm or the rows of a matrix, and the matrices that read them.
PAIRS: Mapping[str, Sequence[str]] = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}


def scale_inputs(tensors: Mapping[str, Tensor], sums: Mapping[str, Tensor], own: Gptq) -> dict[str, Tensor]:
    """Return a model's tensors in float32 with scaled inputs: the same function. sums: see `sums_of_inputs`."""
    made = dict(tensors)
    layers = sorted({name.partition("input_layernorm")[0] for name in tensors if "input_layernorm" in name})
    for layer in layers:
        for source, readers in PAIRS.items():
            maker, names = f"{layer}{source}.weight", [f"{layer}{each}" for each in readers]
            scales = best_scales([made[f"{name}.weight"] for name in names], sums[names[0]], own)
            made[maker] = made[maker] / (scales[:, None] if made[maker].ndim == 2 else scales)
            for name in names:
                made[f"{name}.weight"] = made[f"{name}.weight"] * scales
    return made


def best_scales(weights: Sequence[Tensor], sums: Tensor, own: Gptq) -> Tensor:
    """Return the scales [k] of inputs with the smallest error of matrices [n, k]. sums: [k, k], of the inputs."""
    sizes = sums.diagonal().clamp_min(1e-12).sqrt()
    candidates = [(sizes / sizes.log().mean().exp()) ** float(power) for power in POWERS]
    errors = [sum(_error(weight, sums, scales, own) for weight in weights) for scales in candidates]
    return candidates[int(np.argmin(errors))]


def _error(weight: Tensor, sums: Tensor, scales: Tensor, own: Gptq) -> float:
    """Return the summed square error of a matrix's outputs."""
    difference = torch.from_numpy(rounded((weight * scales).numpy(), own).decoded()) / scales - weight
    return float(((difference @ sums) * difference).sum())
