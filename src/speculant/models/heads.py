"""Heads that are decoders: layers over token embeddings and a target's hidden states (arXiv 2401.15077, 2503.01840).

Each row reads a token's embedding e and a hidden state h: the target's state at the position before, or in a draft the
`Hidden.carried` of the row's parent.

    INPUT       x = fc [e; h];  the first layer has no input norm, and there is no final norm (EAGLE)
    NORMED      x = fc [norm(e); norm(h)];  whole layers and a final norm (multi-token prediction, arXiv 2412.19437)
    ATTENTION   the first layer attends with [norm(e); norm(h)] and adds to h;  a final norm before the head (EAGLE-3)
    CONTEXT     x = e;  rows have h or a token, and whole layers attend to each h as if it were their normed input
                (arXiv 2602.06036)

With CONTEXT a pass has rows of states or rows of tokens. Rows of states get keys and values in each layer, and nothing
else is computed for them. Rows of tokens are those of a usual decoder.

The embedding table and the output head are the target's unless the head's files have their own. Embeddings have the
target's scale, with CONTEXT that of `decoder`.

`FutureHeads` are heads on the target's last hidden state, one for each further token (Stern et al. 2018; arXiv
2401.10774). The state of a token predicts the next one by the target's output head. Head i = 0, 1, ... turns it into a
state from which an output head predicts the token i + 2 places after it: the target's own, or one of the head's.

    residual blocks     x + SiLU(W x + b), several in a row           (Medusa)
    feed-forward        x + V ReLU(U x + u) + v                       (blockwise parallel decoding)

They are trained as modules of torch; `FutureModule.on` puts them on the kernels of their target.

All are multiplied on the kernels of the target: torch has threads of its own, which spin for a while after an
operation. A native pass that follows takes up to half as long again.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import repeat
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from speculant.cache import CacheShape, KVStorage
from speculant.kernels import soft_cap
from speculant.models.base import Batch, CausalLM, Hidden, ModelNeeds
from speculant.models.description import DecoderConfig, Layer
from speculant.models.reference import (
    Attend,
    DecoderLayer,
    DescribedModule,
    LayerAttention,
    NormLayer,
    StoredKeys,
    angles_of,
    fill,
    groups_of,
    rotaries,
    spread,
)
from speculant.models.sizes import cache_shape
from speculant.models.weights.source import WeightSource

logger = logging.getLogger(__name__)


class Linears(Protocol):
    """y = W x + b of several matrices side by side."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [count, r, n], by the first `count` matrices, for [count, r, k]."""
        ...


@dataclass(frozen=True)
class TorchLinears(Linears):
    """In plain PyTorch: weight [h, n, k] and bias [h, n] or None; results are of their type."""

    weight: Tensor
    bias: Tensor | None = None

    @override
    def __call__(self, x: Tensor) -> Tensor:
        count, x = len(x), x.to(self.weight.dtype)
        matrices = self.weight[:count].mT
        return torch.bmm(x, matrices) if self.bias is None else torch.baddbmm(self.bias[:count, None], x, matrices)


def linears_of(model: CausalLM, matrices: Sequence[Tensor], biases: Tensor | None = None) -> Linears:
    """Return the `Linears` of matrices [n, k] of one shape and of the model's dtype, and of biases [h, n]."""
    if isinstance(model, HeadHost):
        return model.linears(matrices, biases)
    return TorchLinears(torch.stack(tuple(matrices)), biases)


class StateEntry(Enum):
    """How a hidden state enters the first layer: see the module's docstring."""

    INPUT = "input"
    NORMED = "normed"
    ATTENTION = "attention"
    CONTEXT = "context"


@dataclass(frozen=True)
class HeadConfig:
    """The arithmetic of a head. `decoder` describes its layers; and of its output head the tokens and the soft cap.

    fc_bias: whether fc has a bias. norm_before_residual: with ATTENTION, the first layer adds to norm(h) instead of h.
    norm_output: the next row reads the state after the final norm. own_table, own_head: whether it
    has its own embedding table and output head.
    """

    decoder: DecoderConfig
    entry: StateEntry
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_table: bool = False
    own_head: bool = False

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers; with INPUT, the first one has no norm before attention."""
        first, *others = self.decoder.layers
        return (replace(first, before_attention=None) if self.entry is StateEntry.INPUT else first, *others)


@runtime_checkable
class Described(Protocol):
    """A `CausalLM` that a description determines."""

    @property
    def config(self) -> DecoderConfig:
        """The description."""
        ...


@runtime_checkable
class HeadHost(Protocol):
    """A `CausalLM` that computes heads, with weights that may be rounded, on kernels of its own.

    head_quantizations: the types that weights of heads can be rounded to.
    """

    head_quantizations: Sequence[str]

    def why_not(self, config: DecoderConfig) -> str | None:
        """Return why its kernels can't compute a head with layers of these sizes; None if they can."""
        ...

    def attach(self, config: HeadConfig, weights: WeightSource) -> CausalLM:
        """Return a head that shares this model's embedding table and output head, where it has none of its own."""
        ...

    def rounding_heads(self, quantization: str) -> CausalLM:
        """Return this model, with the same weights, for heads whose matrices are rounded to a type."""
        ...

    def linears(self, matrices: Sequence[Tensor], biases: Tensor | None) -> Linears:
        """See `linears_of`; results are float32."""
        ...


def usual_taps(num_layers: int) -> tuple[int, int, int]:
    """Return the target's layers whose inputs an EAGLE-3 head reads if its files name none."""
    return 2, num_layers // 2, num_layers - 3


def attach(target: CausalLM, config: HeadConfig, weights: WeightSource) -> CausalLM:
    """Return a head of a target, on the target's kernels if they can compute it, else on torch's."""
    if isinstance(target, HeadHost):
        why = target.why_not(config.decoder)
        if why is None:
            return target.attach(config, weights)
        logger.warning("the head runs on the reference kernels, which are slower and round no weights: %s", why)
    shape = target.cache_shape
    with torch.device("meta"):
        head = HeadDecoder(config, target)
    fill(head, weights, shape.dtype, shape.device)
    return head.eval()


def head_shapes(config: HeadConfig, target: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a head consists of."""
    with torch.device("meta"):
        head = HeadDecoder(config, target)
    return {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}


class HeadDecoder(DescribedModule):
    """A head in plain PyTorch: a `CausalLM` whose batches have `hidden`."""

    def __init__(self, config: HeadConfig, target: CausalLM) -> None:
        super().__init__()
        own, hidden = config.decoder, config.decoder.hidden_size
        self.config, self.needs = config, ModelNeeds(restart_at=own.restart_at)
        self._target = (target,)  # in a tuple: its parameters are not this module's
        inputs = 2 * hidden if config.entry is StateEntry.ATTENTION else hidden
        widths = [inputs] + [hidden] * (own.num_layers - 1)
        self.layers = nn.ModuleList(map(DecoderLayer, config.layers, range(own.num_layers), repeat(hidden), widths))
        if config.entry in (StateEntry.INPUT, StateEntry.NORMED):
            self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        if config.entry in (StateEntry.NORMED, StateEntry.ATTENTION):
            self.hidden_norm = NormLayer(hidden, own.norm)
        if config.entry is not StateEntry.INPUT:
            self.norm = NormLayer(hidden, own.norm)
        if config.entry is StateEntry.NORMED:
            self.token_norm = NormLayer(hidden, own.norm)
        if config.own_table:
            self.embed_tokens = nn.Parameter(torch.zeros(own.vocab_size, hidden))
        if config.own_head:
            self.lm_head = nn.Linear(hidden, len(own.head.tokens) or own.vocab_size, bias=False)
        self._rotaries = rotaries(own)

    @property
    @override
    def described(self) -> DecoderConfig:
        return self.config.decoder

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of one position of this head's cache."""
        return head_cache_shape(self.config, self._target[0])

    @override
    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens[tokens] if self.config.own_table else self._target[0].embed(tokens)

    @override
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """There are no taps. With CONTEXT, rows of states have no result."""
        if self.config.entry is StateEntry.CONTEXT:
            return self._block(batch, storage) if batch.hidden is None else self._store(batch, batch.hidden, storage)
        assert batch.hidden is not None, "a head reads a hidden state for each row"
        embedded = self.embed(batch.tokens).to(self.cache_shape.dtype)  # a target may have activations of another type
        attend = StoredKeys.build(batch, storage, self.config.layers, embedded.dtype)
        long = batch.long_rows(self.needs)
        return self.states(embedded, batch.hidden.to(embedded.dtype), batch.positions, attend, long)

    def states(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, long: Tensor | None = None
    ) -> Hidden:
        """Run the layers over embeddings and states [..., n, hidden] of rows at positions [n].

        long: see `angles_of`.
        """
        angles = angles_of(self._rotaries, positions, embedded.dtype, long)
        first, *others = cast(list[DecoderLayer], self.layers)
        if self.config.entry is StateEntry.INPUT:
            x: Tensor = self.fc(torch.cat((embedded, hidden), dim=-1))
            x = first.add(x, x, angles, attend)
        elif self.config.entry is StateEntry.NORMED:
            x = first(self.fc(torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), dim=-1)), angles, attend)
        else:
            normed = self.hidden_norm(hidden)
            input_norm = cast(nn.Module, first.input_layernorm)
            entering = torch.cat((input_norm(embedded), normed), dim=-1)
            x = first.add(normed if self.config.norm_before_residual else hidden, entering, angles, attend)
        for layer in others:
            x = layer(x, angles, attend)
        last = x if self.config.entry is StateEntry.INPUT else self.norm(x)
        return Hidden(last, carried=last if self.config.norm_output else x)

    def _store(self, batch: Batch, states: Tensor, storage: KVStorage) -> Hidden:
        """Write the keys and values of states [T, hidden] in each layer."""
        states, groups = states.to(self.cache_shape.dtype), groups_of(self.config.layers, batch)
        angles = angles_of(self._rotaries, batch.positions, states.dtype, batch.long_rows(self.needs))
        for index, (layer, of) in enumerate(zip(self.layers, self.config.layers, strict=True)):
            keys, values = cast(LayerAttention, layer.self_attn).keys(states, angles)
            storage.write(index, batch.slots_of(groups[of.window]), keys, values)
        return Hidden(states[:0])

    def _block(self, batch: Batch, storage: KVStorage) -> Hidden:
        """Run the layers over tokens."""
        x = (self.embed(batch.tokens) * self._rescaling).to(self.cache_shape.dtype)
        attend = StoredKeys.build(batch, storage, self.config.layers, x.dtype)
        angles = angles_of(self._rotaries, batch.positions, x.dtype, batch.long_rows(self.needs))
        for layer in self.layers:
            x = layer(x, angles, attend)
        return Hidden(self.norm(x))

    @property
    def _rescaling(self) -> float:
        """The factor from the scale of the target's embeddings to this head's own."""
        own, target = self.config.decoder.embedding.scale, self._target[0]
        if self.config.own_table or not isinstance(target, Described):
            return own
        return own / target.config.embedding.scale

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        if not self.config.own_head:
            return self._target[0].logits(hidden)
        own = self.config.decoder.head
        out = soft_cap(self.lm_head(hidden), own.softcap)
        return spread(out, torch.tensor(own.tokens, device=out.device), self.vocab_size) if own.tokens else out


def head_cache_shape(config: HeadConfig, target: CausalLM) -> CacheShape:
    """Return the shape of one position of a head's cache: of the target's types, on its device."""
    of = target.cache_shape
    return cache_shape(config.decoder, of.dtype, of.device, of.stored)


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
class PlacedHeads(FutureHeads):
    """Heads on the kernels of a model. apply: computes [count, r, hidden] by the layers of the first `count` heads."""

    shape: FutureShape
    layers: Sequence[Linears]
    apply: Callable[[Sequence[Linears], Tensor], Tensor]

    @override
    def states(self, hidden: Tensor, count: int) -> Tensor:
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

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """Return the weights by their names in a file, without own output heads."""

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors in a file."""
        return {name: tuple(tensor.shape) for name, tensor in self.named().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a file; see `stored`."""
        with torch.no_grad():
            for name, tensor in self.named().items():
                tensor.copy_(tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights as a file has them."""
        return {name: tensor.detach().contiguous() for name, tensor in self.named().items()}

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

    @override
    def layers(self) -> list[TorchLinears]:
        return [*map(TorchLinears, self.weight, self.bias)]

    @override
    def named(self) -> dict[str, Tensor]:
        """As in Medusa's own files."""
        parts = {"weight": self.weight, **({"bias": self.bias} if self.shape.biased else {})}
        return {
            f"{head}.{layer}.linear.{name}": part[layer, head]
            for head in range(self.shape.num_heads)
            for layer in range(self.shape.num_layers)
            for name, part in parts.items()
        }

    @override
    def stored(self) -> dict[str, tuple[int, ...]]:
        found, of = super().stored(), self.shape
        if of.vocab_size is not None:
            found |= {f"{head}.{of.num_layers}.weight": (of.vocab_size, of.hidden_size) for head in range(of.num_heads)}
        return found

    @override
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        if not self.shape.biased:
            nn.init.zeros_(self.bias)


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

    @override
    def layers(self) -> list[TorchLinears]:
        return [TorchLinears(self.up, self.up_bias), TorchLinears(self.down, self.down_bias)]

    @override
    def named(self) -> dict[str, Tensor]:
        parts = zip(self.NAMES, (self.up, self.up_bias, self.down, self.down_bias), strict=True)
        return {f"heads.{head}.{name}": part[head] for name, part in parts for head in range(self.shape.num_heads)}
