"""A `CausalLM` on the native kernels: every row's result depends on that row and its context alone, bit for bit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, KVCache
from speculant.errors import CapacityError
from speculant.kernels.native import MOST_DEPTH, Kernels, Op, Pass, Type
from speculant.models.base import Batch, Chain, ModelNeeds, Segment
from speculant.models.config import DecoderConfig
from speculant.models.decoder_program import PackedDecoder, Program, linear
from speculant.models.replay import ChainRows, Drawn, address, can_replay
from speculant.models.rotary import Rotary
from speculant.models.weight_reader import WeightReader
from speculant.models.weight_source import WeightSource

FEWEST_ROWS, FEWEST_POSITIONS = 16, 256  # to make room for at first


@dataclass(frozen=True)
class Layout:
    """What a program is run on, and what must live as long: it is pointed to."""

    on: Pass
    kept: tuple[object, ...]


class NativeDecoder:
    """A decoder whose weights are packed as they are read; activations are float32, whatever the weights are.

    dtype is that of the weights, float32 or bfloat16, and of the cache. quantization: what matrices are rounded to.
    What a linear layer rounds activations to before it multiplies is the kernels' matter: see csrc/speculant.h.
    """

    needs = ModelNeeds()

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        kernels: Kernels,
        quantization: Type | None = None,
    ) -> None:
        cpu = torch.device("cpu")
        self.cache_shape = CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype, cpu)
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self._rotary = Rotary(config.rope, config.head_dim)
        self.kernels = kernels
        self._weights = PackedDecoder.read(config, WeightReader(weights, kernels, dtype), quantization)
        self.program = Program(self._weights, FEWEST_ROWS)
        self._head = linear(self._weights.head, None, None)
        self._cosines = self._sines = torch.empty(0)

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass reads."""
        return self._weights.bytes_per_pass

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """See `CausalLM.forward`; hidden states are float32."""
        layout = self.layout(batch, cache)
        self.kernels.run(self.program.ops, layout.on)
        return self.program.hidden[: batch.tokens.shape[0]].clone()

    def layout(self, batch: Batch, cache: KVCache) -> Layout:
        """Say what the program is run on."""
        segments, parents, tables = _segments(batch, cache)
        on = self._pass(cache, batch.tokens.shape[0], max(segment.slots.end for segment in batch.segments))
        on.tokens, on.positions, on.slots = batch.tokens.data_ptr(), batch.positions.data_ptr(), batch.rows.data_ptr()
        on.num_segments, on.segments, on.parents = len(batch.segments), address(segments), address(parents)
        return Layout(on, (batch, segments, parents, tables))

    def _pass(self, cache: KVCache, rows: int, end: int) -> Pass:
        """Make a pass over a cache's storage, with room for so many rows and angles for positions below `end`."""
        if rows > self.program.room:
            self.program = Program(self._weights, _next_power(rows))
        if end > len(self._cosines):
            cosines, sines = self._rotary.angles(torch.arange(_next_power(end)), torch.float32)
            half = cosines.shape[-1] // 2
            self._cosines, self._sines = cosines[:, 0, :half].contiguous(), sines[:, 0, :half].contiguous()
        keys, values = (stored.data_ptr() for stored in cache.layer(0))
        return Pass(
            rows=rows,
            block=cache.block_size,
            cosines=self._cosines.data_ptr(),
            sines=self._sines.data_ptr(),
            keys=keys,
            values=values,
            layer_stride=2 * (values - keys),  # a layer's keys, its values, the next one's keys
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`; float32."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.vocab_size)
        ops = (Op * 1)(linear(self._weights.head, hidden, out))
        self.kernels.run(ops, Pass(rows=len(hidden)))
        return out

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`: chains that can be replayed are drawn all in one call."""
        replayed, others = list[Chain](), list[Chain]()
        for chain in chains:
            (replayed if can_replay(chain) else others).append(chain)
        if replayed:
            self._replay(replayed, cache, vocab_size)
        return others

    def _replay(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> None:
        chains = sorted(chains, key=lambda chain: -chain.limit)
        rows = ChainRows()
        for chain in chains:
            rows.add(chain, self.vocab_size, cache)
        on = self._pass(cache, len(rows.tokens), rows.end)
        on.tokens, on.positions, on.slots = address(rows.tokens), address(rows.positions), address(rows.slots)
        on.num_segments, on.segments = len(chains), address(rows.segments)
        drawing = [chain for chain in chains if chain.limit]
        if drawing:
            draft = Drawn(drawing, vocab_size)
            self.kernels.draft(self.program.ops, self._head, on, draft.call)
            draft.give(drawing)
        else:
            self.kernels.run(self.program.ops, on)


def _segments(batch: Batch, cache: KVCache) -> tuple[array[int], array[int], list[Tensor]]:
    """Lay out the batch's segments as csrc/speculant.h has them; the block tables have to outlive the pass."""
    fields: list[int] = []
    parents: list[int] = []
    tables: list[Tensor] = []
    first = 0
    for segment in batch.segments:
        tables.append(cache.table(segment.slots.seq_id).blocks)
        chain, tree = segment.num_rows, -1
        if not segment.tree.is_chain:
            _check_depth(segment)
            chain, tree = segment.num_committed, len(parents)
            parents += segment.tree.parent_list
        fields += (first, segment.num_rows, segment.slots.start, chain, tree, tables[-1].data_ptr())
        first += segment.num_rows
    return array("q", fields), array("q", parents), tables


def _check_depth(segment: Segment) -> None:
    if max(segment.tree.depths) > MOST_DEPTH:
        raise CapacityError(
            f"a draft tree is {max(segment.tree.depths)} deep and the kernels go to {MOST_DEPTH}", "draft fewer tokens."
        )


def _next_power(n: int) -> int:
    return max(FEWEST_POSITIONS, 1 << (n - 1).bit_length())
