"""Muon for the matrices inside the layers, AdamW for embeddings and norms.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix, computed with a
few Newton-Schulz steps. torch.optim.Muon runs them in bfloat16, which CPUs without such hardware
emulate; here they run in the parameters' own type, all matrices of one shape together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_OUTSIDE = ("embed_tokens", "embed_positions", "distances", "lm_head")  # names of tables
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: singular values end between 0.7 and 1.2


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return, for each of a stack of matrices [k, m, n] with m <= n, a matrix close to its orthogonal factor.

    Every step multiplies x by a polynomial of x x^T. These polynomials commute, so the steps work on
    [m, m] matrices only, and x is multiplied once, at the end.
    """
    a, b, c = _COEFFICIENTS
    x = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    gram = x @ x.mT
    product = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).expand_as(gram)
    for _ in range(steps):
        factor = b * gram + c * gram @ gram
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product, gram = factor @ product, factor @ gram @ factor
    orthogonal: Tensor = product @ x
    return orthogonal


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; the step is scaled by sqrt(max(1, rows / columns))."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter by its orthogonalised Nesterov momentum."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[tuple(parameter.shape)].append(parameter)
            for parameters in by_shape.values():
                self._step_stack(parameters, group["lr"], group["momentum"])

    def _step_stack(self, parameters: list[Tensor], lr: float, momentum: float) -> None:
        stack = torch.stack([self._momentum(parameter, momentum) for parameter in parameters])
        rows, columns = stack.shape[1:]
        update = orthogonalize(stack) if rows <= columns else orthogonalize(stack.mT).mT
        scale = lr * max(1.0, rows / columns) ** 0.5
        for parameter, change in zip(parameters, update, strict=True):
            parameter.add_(change, alpha=-scale)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


class Optimizer:
    """Both optimizers with one learning-rate factor."""

    def __init__(self, model: nn.Module, matrix_lr: float, embedding_lr: float) -> None:
        inner = [(name, parameter) for name, parameter in model.named_parameters()]
        matrices = [p for name, p in inner if p.ndim == 2 and not any(part in name for part in _OUTSIDE)]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in inner if id(p) not in chosen]
        self._parts = list[tuple[torch.optim.Optimizer, float]]()
        if matrices:
            self._parts.append((Muon(matrices, matrix_lr), matrix_lr))
        if others:
            adam = torch.optim.AdamW(others, embedding_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
            self._parts.append((adam, embedding_lr))

    def step(self, factor: float) -> None:
        """Take one step at `factor` times the peak rates and clear the gradients."""
        for optimizer, lr in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[Any]:
        """Return the state for a checkpoint."""
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load_state_dict(self, state: list[Mapping[str, Any]]) -> None:
        """Restore the state of a checkpoint."""
        for (optimizer, _), part in zip(self._parts, state, strict=True):
            optimizer.load_state_dict(dict(part))
