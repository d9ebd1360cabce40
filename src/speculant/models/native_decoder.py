"""A `CausalLM` on the native kernels: every row's result depends on that row and its context alone, bit for bit."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, KVCache
from speculant.errors import CapacityError
from speculant.kernels.native import MOST_DEPTH, MOST_DIM, MOST_GROUP, TYPES, Kernels, Op, Pass, Type
from speculant.models.base import Batch, Segment
from speculant.models.config import DecoderConfig
from speculant.models.decoder import Decoder
from speculant.models.decoder_program import PackedDecoder, Program, linear
from speculant.models.rotary import Rotary

FEWEST_ROWS, FEWEST_POSITIONS = 16, 256  # to make room for at first


class NativeDecoder:
    """A decoder whose weights were taken and packed; activations are float32, whatever the weights are."""

    def __init__(self, decoder: Decoder, kernels: Kernels, quantization: Type | None = None) -> None:
        self.cache_shape: CacheShape = decoder.cache_shape
        self.vocab_size, self.max_positions = decoder.vocab_size, decoder.max_positions
        self._rotary = Rotary(decoder.config.rope, decoder.config.head_dim)
        self._kernels = kernels
        self._weights = PackedDecoder.take(decoder, kernels, quantization)
        self._program = Program(self._weights, FEWEST_ROWS)
        self._cosines = self._sines = torch.empty(0)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """See `CausalLM.forward`; hidden states are float32."""
        rows = len(batch.tokens)
        if rows > self._program.room:
            self._program = Program(self._weights, _next_power(rows))
        segments, parents, _tables = _segments(batch, cache)
        self._make_angles(max(segment.slots.end for segment in batch.segments))
        keys, values = cache.layer(0)
        self._kernels.run(
            self._program.ops,
            Pass(
                rows=rows,
                num_segments=len(batch.segments),
                block=cache.block_size,
                tokens=batch.tokens.data_ptr(),
                positions=batch.positions.data_ptr(),
                slots=batch.rows.data_ptr(),
                segments=segments.buffer_info()[0],
                parents=parents.buffer_info()[0],
                cosines=self._cosines.data_ptr(),
                sines=self._sines.data_ptr(),
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                layer_stride=_layer_stride(self.cache_shape, cache),
            ),
        )
        return self._program.hidden[:rows].clone()

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`; float32."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.vocab_size)
        ops = (Op * 1)(linear(self._weights.head, hidden, out))
        self._kernels.run(ops, Pass(rows=len(hidden)))
        return out

    def _make_angles(self, positions: int) -> None:
        """Make sure that the tables of angles reach that far."""
        if positions > len(self._cosines):
            cosines, sines = self._rotary.angles(torch.arange(_next_power(positions)), torch.float32)
            half = cosines.shape[-1] // 2
            self._cosines, self._sines = cosines[:, 0, :half].contiguous(), sines[:, 0, :half].contiguous()


def why_not_native(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say what keeps a model from the native kernels; None if nothing does."""
    if device.type != "cpu":
        return f"they run on the CPU and the device is {device}"
    if dtype not in TYPES:
        return f"they compute float32 and bfloat16 weights, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim > MOST_DIM or config.num_heads // config.num_kv_heads > MOST_GROUP:
        return (
            f"heads of {config.head_dim} in groups of {config.num_heads // config.num_kv_heads} are too large for them"
        )
    return None


def _segments(batch: Batch, cache: KVCache) -> tuple[array[int], array[int], list[Tensor]]:
    """Lay out the batch's segments as csrc/speculant.h has them; the block tables have to outlive the pass."""
    fields: list[int] = []
    parents: list[int] = []
    tables: list[Tensor] = []
    first = 0
    for segment in batch.segments:
        tables.append(cache.table(segment.slots.seq).blocks)
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


def _layer_stride(shape: CacheShape, cache: KVCache) -> int:
    """Return the bytes between one layer's keys and the next one's."""
    return 2 * cache.num_blocks * cache.block_size * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def _next_power(n: int) -> int:
    return max(FEWEST_POSITIONS, 1 << (n - 1).bit_length())
