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
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import repeat
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from speculant.cache.base import CacheShape, KVStorage
from speculant.cache.paged import KVCache
from speculant.kernels.reference import soft_cap
from speculant.models.base import Batch, CausalLM, Chain, Hidden, ModelNeeds
from speculant.models.description import DecoderConfig, Layer
from speculant.models.reference.attention import Attend, StoredKeys, groups_of
from speculant.models.reference.decoder import (
    DecoderLayer,
    LayerAttention,
    NormLayer,
    angles_of,
    rotaries,
    spread,
)
from speculant.models.sizes import cache_shape
from speculant.models.weights.source import WeightSource, read_plain

logger = logging.getLogger(__name__)


class StateEntry(Enum):
    """How a hidden state enters the first layer: see the module's docstring."""

    INPUT = "input"
    NORMED = "normed"
    ATTENTION = "attention"
    CONTEXT = "context"

    @property
    def has_matrix(self) -> bool:
        """Whether `fc` maps e and h to the first layer's input."""
        return self in (StateEntry.INPUT, StateEntry.NORMED)

    @property
    def has_norm(self) -> bool:
        """Whether h is normalised here."""
        return self in (StateEntry.NORMED, StateEntry.ATTENTION)


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
    """A `CausalLM` that computes heads with kernels of its own."""

    def why_not(self, config: DecoderConfig) -> str | None:
        """Return why its kernels can't compute a head with layers of these sizes; None if they can."""
        ...

    def attach(self, config: HeadConfig, weights: WeightSource) -> CausalLM:
        """Return a head that shares this model's embedding table and output head, where it has none of its own."""
        ...


@runtime_checkable
class RoundsHeads(Protocol):
    """A `CausalLM` whose kernels can compute heads with rounded weights.

    head_quantizations: the types that the weights can be rounded to.
    """

    head_quantizations: Sequence[str]

    def rounding_heads(self, quantization: str) -> CausalLM:
        """Return this model, with the same weights, for heads whose matrices are rounded to a type."""
        ...


@runtime_checkable
class Truncatable(Protocol):
    """A `CausalLM` whose first layers can be used as a model."""

    def truncated(self, num_layers: int) -> CausalLM:
        """Return the model of the first layers, the final norm and the output head. It shares all weights."""
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
    for name in [name for name, _ in head.named_parameters()]:
        part, _, own = name.rpartition(".")
        tensor = read_plain(weights, name).to(device=shape.device, dtype=shape.dtype, copy=True)
        setattr(head.get_submodule(part), own, nn.Parameter(tensor, requires_grad=False))
    return head.eval()


def head_shapes(config: HeadConfig, target: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a head consists of."""
    with torch.device("meta"):
        head = HeadDecoder(config, target)
    return {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}


class HeadDecoder(nn.Module):
    """A head in plain PyTorch: a `CausalLM` whose batches have `hidden`."""

    def __init__(self, config: HeadConfig, target: CausalLM) -> None:
        super().__init__()
        own, hidden = config.decoder, config.decoder.hidden_size
        self.config, self.needs = config, ModelNeeds(restart_at=own.restart_at)
        self._target = (target,)  # in a tuple: its parameters are not this module's
        inputs = 2 * hidden if config.entry is StateEntry.ATTENTION else hidden
        widths = [inputs] + [hidden] * (own.num_layers - 1)
        self.layers = nn.ModuleList(map(DecoderLayer, config.layers, range(own.num_layers), repeat(hidden), widths))
        if config.entry.has_matrix:
            self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        if config.entry.has_norm:
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
    def vocab_size(self) -> int:
        """The target's."""
        return self.config.decoder.vocab_size

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.config.decoder.num_layers

    @property
    def hidden_size(self) -> int:
        """The width of a hidden state and of an embedding."""
        return self.config.decoder.hidden_size

    @property
    def max_positions(self) -> int:
        """The longest context that the head was trained for, in positions."""
        return self.config.decoder.max_positions

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of one position of this head's cache."""
        return head_cache_shape(self.config, self._target[0])

    def embed(self, tokens: Tensor) -> Tensor:
        """See `CausalLM.embed`."""
        return self.embed_tokens[tokens] if self.config.own_table else self._target[0].embed(tokens)

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`; there are no taps. With CONTEXT, rows of states have no result."""
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
            storage.write(index, batch.slots_of(groups[of.attention.window]), keys, values)
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

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        if not self.config.own_head:
            return self._target[0].logits(hidden)
        own = self.config.decoder.head
        out = soft_cap(self.lm_head(hidden), own.softcap)
        return spread(out, torch.tensor(own.tokens, device=out.device), self.vocab_size) if own.tokens else out

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`; this head draws none by itself."""
        return chains


def head_cache_shape(config: HeadConfig, target: CausalLM) -> CacheShape:
    """Return the shape of one position of a head's cache: of the target's types, on its device."""
    of = target.cache_shape
    return cache_shape(config.decoder, of.dtype, of.device, of.stored)
