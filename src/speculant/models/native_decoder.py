"""A `CausalLM` on the native kernels: every row's result depends on that row and its context alone, bit for bit."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, KVCache, Slots
from speculant.errors import CapacityError
from speculant.kernels.native import MOST_DEPTH, MOST_DIM, MOST_GROUP, TYPES, Draft, Kernels, Law, Op, Pass, Type
from speculant.models.base import Batch, Chain, Feed, Segment, build_batch, known
from speculant.models.config import DecoderConfig
from speculant.models.decoder import Decoder
from speculant.models.decoder_program import PackedDecoder, Program, linear
from speculant.models.rotary import Rotary
from speculant.sampling.chance import KeyedNoise, Stream
from speculant.sampling.distribution import edits, native_law
from speculant.types import DraftTree

FEWEST_ROWS, FEWEST_POSITIONS = 16, 256  # to make room for at first


@dataclass(frozen=True)
class Layout:
    """What a program is run on, and what must live as long: it is pointed to."""

    on: Pass
    kept: tuple[object, ...]


class NativeDecoder:
    """A decoder whose weights were taken and packed; activations are float32, whatever the weights are.

    What a linear layer rounds them to before it multiplies is the kernels' matter: see csrc/speculant.h.
    """

    def __init__(self, decoder: Decoder, kernels: Kernels, quantization: Type | None = None) -> None:
        self.cache_shape: CacheShape = decoder.cache_shape
        self.vocab_size, self.max_positions = decoder.vocab_size, decoder.max_positions
        self._rotary = Rotary(decoder.config.rope, decoder.config.head_dim)
        self.kernels = kernels
        self._weights = PackedDecoder.take(decoder, kernels, quantization)
        self.program = Program(self._weights, FEWEST_ROWS)
        self._head = linear(self._weights.head, None, None)
        self._cosines = self._sines = torch.empty(0)

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass reads."""
        return self._weights.bytes_per_pass

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """See `CausalLM.forward`; hidden states are float32."""
        layout = self.layout(batch, cache, [segment.slots for segment in batch.segments])
        self.kernels.run(self.program.ops, layout.on)
        return self.program.hidden[: batch.tokens.shape[0]].clone()

    def layout(self, batch: Batch, cache: KVCache, reserved: Sequence[Slots]) -> Layout:
        """Say what the program is run on; `reserved` is all that will be written."""
        rows = batch.tokens.shape[0]
        if rows > self.program.room:
            self.program = Program(self._weights, _next_power(rows))
        self._make_angles(max(slots.end for slots in reserved))
        segments, parents, tables = _segments(batch, cache)
        keys, values = cache.layer(0)
        on = Pass(
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
            layer_stride=2 * keys.nbytes,  # keys and values of a layer lie one after the other
        )
        return Layout(on, (batch, segments, parents, tables))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`; float32."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.vocab_size)
        ops = (Op * 1)(linear(self._weights.head, hidden, out))
        self.kernels.run(ops, Pass(rows=len(hidden)))
        return out

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> None:
        """Draw the tokens of chains that can be replayed, all in one call; see `chains.grow`."""
        chains = sorted(chains, key=lambda chain: -chain.limit)
        batch = build_batch(
            [Feed(chain.request.seq, known(chain.feed, self), DraftTree.empty()) for chain in chains],
            cache,
            self.cache_shape.device,
        )
        drawing = [chain for chain in chains if chain.limit]
        later = [cache.reserve(chain.request.seq, chain.limit - 1) for chain in drawing]
        layout = self.layout(batch, cache, [*(segment.slots for segment in batch.segments), *later])
        if drawing:
            draft = _Drawn(drawing, later, vocab_size)
            self.kernels.draft(self.program.ops, self._head, layout.on, draft.asked)
            draft.give(drawing)
        else:
            self.kernels.run(self.program.ops, layout.on)

    def _make_angles(self, positions: int) -> None:
        """Make sure that the tables of angles reach that far."""
        if positions > len(self._cosines):
            cosines, sines = self._rotary.angles(torch.arange(_next_power(positions)), torch.float32)
            half = cosines.shape[-1] // 2
            self._cosines, self._sines = cosines[:, 0, :half].contiguous(), sines[:, 0, :half].contiguous()


def can_replay(chain: Chain) -> bool:
    """Whether a chain's draws can be foreseen, and its laws are no matter of single tokens or their history."""
    return isinstance(chain.chance, Stream | KeyedNoise) and not edits(chain.request.params)


class _Drawn:
    """Room for what chains draw, longest first; `asked` points to it."""

    def __init__(self, chains: Sequence[Chain], later: Sequence[Slots], vocab_size: int) -> None:
        count, steps = len(chains), chains[0].limit
        self._steps = steps
        self._tokens = array("q", bytes(8 * count * steps))
        self._laws = torch.empty(count, steps, vocab_size, dtype=torch.float64)
        slots, chances = array("q"), array("Q")
        for chain, slots_of in zip(chains, later, strict=True):
            unused = [0] * (steps - chain.limit)
            slots.extend([*slots_of.rows.tolist(), 0, *unused])  # the last token is not fed
            chances.extend([*_foreseeable(chain).ahead(chain.limit), *unused])
        limits = array("q", [chain.limit for chain in chains])
        coupled = array("q", [_foreseeable(chain).coupled for chain in chains])
        laws = (Law * count)(*[native_law(chain.request.params) for chain in chains])
        self._kept = (slots, chances, limits, coupled, laws)
        self.asked = Draft(
            sequences=count,
            steps=steps,
            width=vocab_size,
            limits=limits.buffer_info()[0],
            laws=ctypes.addressof(laws),
            coupled=coupled.buffer_info()[0],
            chances=chances.buffer_info()[0],
            slots=slots.buffer_info()[0],
            drawn=self._tokens.buffer_info()[0],
            out=self._laws.data_ptr(),
        )

    def give(self, chains: Sequence[Chain]) -> None:
        """Tell the chains what they drew."""
        for row, chain in enumerate(chains):
            first = row * self._steps
            chain.tokens = self._tokens[first : first + chain.limit].tolist()
            chain.laws = self._laws[row, : chain.limit]


def _foreseeable(chain: Chain) -> Stream | KeyedNoise:
    assert isinstance(chain.chance, Stream | KeyedNoise)
    return chain.chance


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


def _next_power(n: int) -> int:
    return max(FEWEST_POSITIONS, 1 << (n - 1).bit_length())
