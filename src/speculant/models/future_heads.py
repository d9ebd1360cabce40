"""Heads on the target's last hidden state, one for each further token (Stern et al. 2018; arXiv 2401.10774).

The state of a token predicts the next one by the target's output head. Head i = 0, 1, ... turns it into a state from
which an output head predicts the token i + 2 places after it: the target's own output head, or one of the head's.

    residual blocks     x + SiLU(W x + b), several in a row           (Medusa)
    feed-forward        x + V ReLU(U x + u) + v                       (blockwise parallel decoding)

They are trained as modules of torch; `FutureModule.on` puts them on the kernels of their target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculant.models.base import CausalLM
from speculant.models.linears import Linears, TorchLinears, linears_of


@dataclass(frozen=True)
class FutureShape:
    """The sizes of some heads.

    num_layers: residual blocks of each head. inner: the width of each feed-forward block. vocab_size: rows of each
    head's own output head; None = all use the target's. biased: residual blocks have a bias.
    """

    num_heads: int
    hidden_size: int
    num_layers: int = 1
    inner: int = 0
    vocab_size: int | None = None
    biased: bool = True


class FutureHeads(Protocol):
    """Maps states to states."""

    def states(self, hidden: Tensor, count: int) -> Tensor:
        """Return the states [count, r, hidden] of the first `count` heads, for the target's states [r, hidden]."""
        ...


@dataclass(frozen=True)
class PlacedHeads:
    """Heads on the kernels of a model. apply: computes [count, r, hidden] by the layers of the first `count` heads."""

    shape: FutureShape
    layers: Sequence[Linears]
    apply: Callable[[Sequence[Linears], Tensor], Tensor]

    def states(self, hidden: Tensor, count: int) -> Tensor:
        """See `FutureHeads.states`."""
        return self.apply(self.layers, hidden.expand(count, *hidden.shape))


class FutureModule(nn.Module, ABC):
    """Heads in plain PyTorch."""

    apply_layers: Callable[[Sequence[Linears], Tensor], Tensor]

    def __init__(self, shape: FutureShape) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def layers(self) -> list[TorchLinears]:
        """Return the matrices of all heads, in the order in which they are applied."""

    def states(self, hidden: Tensor, count: int) -> Tensor:
        """See `FutureHeads.states`."""
        return PlacedHeads(self.shape, self.layers(), self.apply_layers).states(hidden, count)

    def on(self, model: CausalLM) -> PlacedHeads:
        """Return these heads on the kernels of a model, of its dtype."""
        of = model.cache_shape
        self.to(of.device, of.dtype).requires_grad_(False)
        placed = [linears_of(model, [*each.weight], each.bias) for each in self.layers()]
        return PlacedHeads(self.shape, placed, self.apply_layers)


def residual(layers: Sequence[Linears], x: Tensor) -> Tensor:
    """Return the output of residual blocks."""
    for layer in layers:
        x = x + functional.silu(layer(x))
    return x


def feed_forward(layers: Sequence[Linears], x: Tensor) -> Tensor:
    """Return the output of a feed-forward block."""
    up, down = layers
    return x + down(up(x).relu())


class ResidualHeads(FutureModule):
    """Heads of residual blocks. The weights of all heads lie side by side: [layers, heads, hidden, hidden]."""

    apply_layers = staticmethod(residual)

    def __init__(self, shape: FutureShape) -> None:
        super().__init__(shape)
        size = (shape.num_layers, shape.num_heads, shape.hidden_size)
        self.weight = nn.Parameter(torch.zeros(*size, shape.hidden_size))
        self.bias = nn.Parameter(torch.zeros(size))

    def layers(self) -> list[TorchLinears]:
        """See the base."""
        return [*map(TorchLinears, self.weight, self.bias)]

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors in a file; the names are those of Medusa's own."""
        size, layers = self.shape.hidden_size, range(self.shape.num_layers)
        names: dict[str, tuple[int, ...]] = {}
        for head in range(self.shape.num_heads):
            for layer in layers:
                names[f"{head}.{layer}.linear.weight"] = (size, size)
                if self.shape.biased:
                    names[f"{head}.{layer}.linear.bias"] = (size,)
            if self.shape.vocab_size is not None:
                names[f"{head}.{len(layers)}.weight"] = (self.shape.vocab_size, size)
        return names

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a file; see `stored`."""
        with torch.no_grad():
            for layer in range(self.shape.num_layers):
                for head in range(self.shape.num_heads):
                    self.weight[layer, head] = tensors[f"{head}.{layer}.linear.weight"]
                    self.bias[layer, head] = tensors[f"{head}.{layer}.linear.bias"] if self.shape.biased else 0.0

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights as a file has them, without own output heads."""
        found: dict[str, Tensor] = {}
        for layer in range(self.shape.num_layers):
            for head in range(self.shape.num_heads):
                found[f"{head}.{layer}.linear.weight"] = self.weight[layer, head].detach().contiguous()
                found[f"{head}.{layer}.linear.bias"] = self.bias[layer, head].detach().contiguous()
        return found


class FeedForwardHeads(FutureModule):
    """Heads of one feed-forward block each. The weights of all heads lie side by side."""

    apply_layers = staticmethod(feed_forward)
    NAMES = ("up.weight", "up.bias", "down.weight", "down.bias")

    def __init__(self, shape: FutureShape) -> None:
        super().__init__(shape)
        heads, size, inner = shape.num_heads, shape.hidden_size, shape.inner
        self.up, self.up_bias = nn.Parameter(torch.zeros(heads, inner, size)), nn.Parameter(torch.zeros(heads, inner))
        self.down, self.down_bias = (
            nn.Parameter(torch.zeros(heads, size, inner)),
            nn.Parameter(torch.zeros(heads, size)),
        )

    def layers(self) -> list[TorchLinears]:
        """See the base."""
        return [TorchLinears(self.up, self.up_bias), TorchLinears(self.down, self.down_bias)]

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors in a file."""
        return {name: tuple(parameter.shape) for name, parameter in self._named()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a file; see `stored`."""
        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights as a file has them."""
        return {name: parameter.detach().contiguous() for name, parameter in self._named()}

    def _named(self) -> list[tuple[str, Tensor]]:
        parts = (self.up, self.up_bias, self.down, self.down_bias)
        return [
            (f"heads.{head}.{name}", part[head])
            for head in range(self.shape.num_heads)
            for name, part in zip(self.NAMES, parts, strict=True)
        ]
