"""GPTQ (arXiv 2210.17323): a matrix is rounded column by column, and later columns take up each column's error.

All sums of inputs are those of the original model, not of one whose earlier layers are rounded. There is no act-order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from speculant.lab.bench import read_text
from speculant.models import CausalLM
from tests.quantised_folders import Gptq, Rounded

DAMPING = 0.01  # of the mean diagonal of the sums, as the authors have it


def sums_of_inputs(model: CausalLM, chunks: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return the sum of x x^T over the inputs x of each linear layer, [k, k], by the layer's name.

    model: of the reference kernels.
    """
    assert isinstance(model, nn.Module)
    found = dict[str, Tensor]()

    def adding(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2)
            found[name] = x.T @ x + found.get(name, 0)

        return add

    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    hooks = [each.register_forward_pre_hook(adding(name)) for name, each in layers if name != "lm_head"]
    with torch.inference_mode():
        for chunk in chunks:
            read_text(model, chunk)
    for hook in hooks:
        hook.remove()
    return found


def solve(weight: Tensor, sums: Tensor, own: Gptq) -> Rounded:
    """Round a matrix [n, k] symmetrically. sums [k, k]: of its inputs."""
    (n, k), middle, most = weight.shape, 2 ** (own.bits - 1), 2**own.bits - 1
    damped = sums.double() + DAMPING * sums.diagonal().mean().double() * torch.eye(k, dtype=torch.float64)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    left, q, steps = weight.clone(), torch.empty(n, k), list[Tensor]()
    for first in range(0, k, own.size):
        end = min(first + own.size, k)
        step, errors = (2 * left[:, first:end].abs().amax(1) / most).half().float(), torch.empty(n, end - first)
        for column in range(first, end):
            q[:, column] = ((left[:, column] / step).round() + middle).clamp(0, most)
            error = (left[:, column] - step * (q[:, column] - middle)) / upper[column, column]
            left[:, column + 1 : end] -= error[:, None] * upper[column, column + 1 : end]
            errors[:, column - first] = error
        left[:, end:] -= errors @ upper[first:end, end:]
        steps.append(step)
    scales = torch.stack(steps, 1).numpy()
    return Rounded(q.numpy().astype(np.int64), scales, np.full(scales.shape, middle), np.arange(k) // own.size)
