"""A `CausalLM` on the native kernels: each row's result depends only on that row and its context, bit for bit.

Chains and trees whose noise is known in advance are drawn in one native call: passes, distributions and draws.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from speculant.cache.base import KVStorage
from speculant.cache.paged import KVCache
from speculant.kernels.memory import Arena
from speculant.kernels.native import (
    CACHE_TYPES,
    MOST_DIM,
    MOST_GROUP,
    TYPES,
    Bounds,
    Draft,
    Kernels,
    Op,
    Pass,
    address,
)
from speculant.kernels.packing import likely_bytes
from speculant.models.base import (
    Batch,
    CausalLM,
    Chain,
    Hidden,
    ModelNeeds,
    check_embeddings,
    check_sources,
    check_taps,
    check_tokens,
)
from speculant.models.description import DecoderConfig
from speculant.models.native.angles import AngleTables, next_power
from speculant.models.native.drawn import ChainRows, Drawn, is_foreseeable, stride
from speculant.models.native.ops import embedding, linear
from speculant.models.native.packed import PackedDecoder
from speculant.models.native.program import Buffers, EncoderProgram, NativeLinears, Program, SourceKeys
from speculant.models.native.scratch import scratch_bytes
from speculant.models.reference.decoder import spread
from speculant.models.sizes import cache_shape, relative_reads, tensor_shapes
from speculant.models.weights.cache import WeightStore
from speculant.models.weights.reader import WeightReader, WeightTypes, require_finite
from speculant.models.weights.rounding import ROUNDINGS, Rounding
from speculant.models.weights.source import WeightSource
from speculant.sampling.distribution import copied
from speculant.tree import ids

if TYPE_CHECKING:
    from speculant.models.heads import HeadConfig

Recorded = TypeVar("Recorded", bound=Program)
FEWEST_ROWS = 16  # that the buffers have room for at first


class LayerPointers:
    """The addresses of each layer's keys and values in a storage."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._storage: weakref.ref[KVStorage] | None = None  # of the addresses
        self._keys, self._values = array("Q"), array("Q")

    def point(self, on: Pass, storage: KVStorage) -> None:
        """Let a pass point to a storage's layers."""
        if self._storage is None or self._storage() is not storage:
            layers = [storage.layer(layer) for layer in range(self._num_layers)]
            self._keys = array("Q", [keys.data_ptr() for keys, _ in layers])
            self._values = array("Q", [values.data_ptr() for _, values in layers])
            self._storage = weakref.ref(storage)
        on.keys, on.values = address(self._keys), address(self._values)


class Layout(NamedTuple):
    """The arguments of a program, and the objects that they point to, which must live as long."""

    on: Pass
    owners: tuple[object, ...]


class NativeDecoder:
    """A decoder whose weights are packed as they are read. Activations are float32 for every type of weights.

    dtype, float32 or bfloat16, is that of the cache, unless `storing_keys_as` chooses another one; for weights, see
    `WeightTypes`. quantization: the types that matrices are rounded to; None = they are not.
    coded: bfloat16 matrices are stored in 12 bits a weight, which changes no bit of a result. store: of packed ones.
    The kernels may round the activations of a linear layer before they multiply: see csrc/speculant.h.

    head_rounding: the types that matrices of heads on this model are rounded to; None = they have that of the cache.
    """

    head_quantizations: Sequence[str] = tuple(ROUNDINGS)
    head_rounding: Rounding | None = None

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        kernels: Kernels,
        quantization: Rounding | None = None,
        coded: bool = False,
        store: WeightStore | None = None,
    ) -> None:
        types, shapes = WeightTypes(weights, dtype, coded), tensor_shapes(config)
        expected = sum(
            likely_bytes(
                kernels, types.of(name) if quantization is None else quantization.type_of(name, shape[1]), *shape
            )
            for name, shape in shapes.items()
            if len(shape) == 2
        )
        reader = WeightReader(types, kernels, Arena(kernels.touch, expected), rounded=quantization, store=store)
        self._begin(PackedDecoder.read(config, reader), dtype, kernels)

    def _begin(self, packed: PackedDecoder, dtype: torch.dtype, kernels: Kernels) -> None:
        """Make the model of packed weights."""
        config = packed.config
        stored = None if packed.cache_type == TYPES[dtype] else CACHE_TYPES[packed.cache_type]
        self.cache_shape = cache_shape(config, dtype, torch.device("cpu"), stored)
        self._num_groups = len(self.cache_shape.groups)
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.num_layers, self.hidden_size = config.num_layers, config.hidden_size
        self.kernels, self.packed = kernels, packed
        self.needs = ModelNeeds(source=config.encoder is not None, restart_at=config.restart_at)
        self._buffers, self._programs = Buffers(packed, FEWEST_ROWS), dict[tuple[int, ...], Program]()
        self._encoders = dict[type[SourceKeys], SourceKeys]()  # over the same buffers
        self._angles, self._layers = AngleTables(config), LayerPointers(config.num_layers)
        self._head = linear(
            packed.head, None, None, packed.head_bias, factor=config.head.scale, softcap=config.head.softcap
        )
        self._head_tokens = torch.tensor(config.head.tokens, dtype=torch.int64) if config.head.tokens else None
        shape = self.cache_shape
        self._slot_bytes = array("q", [of.num_kv_heads * shape.bytes_of_head(of.head_dim) for of in shape.layers])
        self._drawn: Drawn | None = None  # of the last draft

    @property
    def config(self) -> DecoderConfig:
        """The description."""
        return self.packed.config

    @property
    def mask_token(self) -> int | None:
        """The token that stands for an unknown one; None = the model has none."""
        return self.config.embedding.mask

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass of one row reads."""
        return self.packed.bytes_per_pass

    @property
    def weight_bytes(self) -> int:
        """See `HoldsWeights.weight_bytes`."""
        return self.packed.num_bytes

    def relative_reads(self, rows: int) -> float:
        """See `ReadsByRows.relative_reads`."""
        return self._reads(rows)

    @cached_property
    def _reads(self) -> Callable[[int], float]:
        return relative_reads(self.packed.config)

    def scratch_bytes(self, rows: int, positions: int) -> int:
        """See `KeepsScratch.scratch_bytes`."""
        return scratch_bytes(self.packed, self.kernels.threads, rows, positions)

    @property
    def program(self) -> Program:
        """A pass without taps."""
        return self._program(())

    def _program(self, taps: tuple[int, ...]) -> Program:
        """Return the pass with these taps; it is recorded at its first use."""
        if taps not in self._programs:
            check_taps(taps, self.num_layers)
            self._programs[taps] = self._checked(self._record(taps), self._head)
        return self._programs[taps]

    def _record(self, taps: tuple[int, ...]) -> Program:
        return Program(self.packed, self._buffers, taps)

    def _checked(self, program: Recorded, head: Op | None = None) -> Recorded:
        """Return a program that reads and writes within the buffers, the tables, the cache and the weights.

        head: that of drafts, if the program has drafts. Raises ModelError for any other program.
        """
        tokens = self._head_tokens
        bounds = Bounds(
            rows=self._buffers.room, tokens=self.vocab_size, positions=self.config.embedding.positions or 0,
            layers=self.num_layers, groups=self._num_groups, ropes=len(self._angles.widths),
            slots=address(self._slot_bytes), angles=address(self._angles.widths),
            head_tokens=None if tokens is None else tokens.data_ptr(),
            num_head_tokens=0 if tokens is None else len(tokens),
        )  # fmt: skip
        self.kernels.check(program.ops, bounds, head)
        return program

    @staticmethod
    def why_not(config: DecoderConfig) -> str | None:
        """Return why the kernels can't compute layers of these sizes, a model's or a head's; None if they can."""
        for of in config.attentions:
            if of.head_dim > MOST_DIM or of.groups > MOST_GROUP:
                return f"heads of {of.head_dim} in groups of {of.groups} are too large for them"
        return None

    def attach(self, config: HeadConfig, weights: WeightSource) -> CausalLM:
        """See `HeadHost.attach`."""
        from speculant.models.native.head import attach_head

        return attach_head(config, weights, self)

    def rounding_heads(self, quantization: str) -> NativeDecoder:
        """See `RoundsHeads.rounding_heads`."""
        model = NativeDecoder.__new__(NativeDecoder)
        model._begin(self.packed, self.cache_shape.dtype, self.kernels)
        model.head_rounding = ROUNDINGS[quantization]
        return model

    def storing_keys_as(self, dtype: torch.dtype) -> NativeDecoder:
        """See `ConvertsKeys.storing_keys_as`."""
        model = NativeDecoder.__new__(NativeDecoder)
        cache_type = next(type_ for type_, own in CACHE_TYPES.items() if own == dtype)
        model._begin(replace(self.packed, cache_type=cache_type), self.cache_shape.dtype, self.kernels)
        return model

    def linears(self, matrices: Sequence[Tensor], biases: Tensor | None) -> NativeLinears:
        """See `LinearHost.linears`. Raises ModelError for matrices that are not finite and are to be rounded."""
        dtype, rounding = self.cache_shape.dtype, self.head_rounding
        if rounding is None:
            return NativeLinears(self.kernels, TYPES[dtype], matrices, biases)
        for matrix in matrices:
            require_finite(matrix, "a head's matrix", dtype, rounding)
        return NativeLinears(self.kernels, rounding.type_of("", matrices[0].shape[1]), matrices, biases)

    def truncated(self, num_layers: int) -> NativeDecoder:
        """See `Truncatable.truncated`."""
        whole, model = self.packed, NativeDecoder.__new__(NativeDecoder)
        first = replace(whole, config=whole.config.truncated(num_layers), layers=whole.layers[:num_layers])
        model._begin(first, self.cache_shape.dtype, self.kernels)
        return model

    def embed(self, tokens: Tensor) -> Tensor:
        """See `CausalLM.embed`; float32."""
        check_tokens(tokens, self.vocab_size)
        tokens, out = tokens.long().contiguous(), torch.empty(len(tokens), self.hidden_size)
        ops = (Op * 1)(embedding(self.packed.table, out, self.packed.config.embedding.scale))
        self.kernels.run(ops, Pass(rows=len(tokens), tokens=tokens.data_ptr()))
        return out

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`; hidden states are float32."""
        check_sources(batch, self.needs)
        layout, rows = self.layout(batch, storage), batch.tokens.shape[0]
        program = self._program(tuple(taps))
        tapped = program.next_taps(rows) if taps else ()
        self.kernels.run(program.ops, layout.on)
        return Hidden(copied(program.hidden[:rows]), tapped)

    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        """See `EncodesSources.encode`; float32."""
        layout, rows = self.layout(batch, storage), batch.tokens.shape[0]
        kind = EncoderProgram if batch.hidden is None else SourceKeys
        program = self._encoders.get(kind)
        if program is None:
            program = self._encoders[kind] = self._checked(kind(self.packed, self._buffers))
        if batch.hidden is not None:
            program.hidden[:rows] = batch.hidden
        self.kernels.run(program.ops, layout.on)
        return copied(program.hidden[:rows])

    def layout(self, batch: Batch, storage: KVStorage) -> Layout:
        """Return the arguments of the program for a batch."""
        segments, parents, end = _segments(batch)
        if self.config.embedding.positions:
            self._check_learned(int(batch.positions.max()) + 1)
        on = self._pass(storage, batch.block_size, batch.tokens.shape[0], end)
        tokens = batch.tokens if batch.embeddings is None else batch.tokens.index_fill(0, batch.embedded_rows, 0)
        on.tokens, on.positions = tokens.data_ptr(), batch.positions.data_ptr()
        slots = self._slots(batch)
        on.slots = slots.data_ptr()
        on.num_segments, on.segments, on.parents = len(batch.segments), address(segments), address(parents)
        inputs, angles = self._inputs(batch), self._angles.rows(batch.positions, batch.long_rows(self.needs))
        on.inputs = address(inputs[0]) if inputs else None
        on.angles = None if angles is None else angles.data_ptr()
        return Layout(on, (batch, tokens, slots, segments, parents, inputs, angles))

    def _slots(self, batch: Batch) -> Tensor:
        """Return the slots [groups, T] of a batch. A cache with one group serves all layers alike."""
        require_groups(batch.num_groups, self._num_groups)
        if batch.group_slots is not None:
            return batch.group_slots
        return batch.slot_mapping if self._num_groups == 1 else batch.slot_mapping.repeat(self._num_groups)

    def _inputs(self, batch: Batch) -> tuple[array[int], Tensor] | None:
        """Return the address of each row's input embedding (0 = look its token up) and their memory, if any."""
        if batch.embeddings is None:
            return None
        check_embeddings(batch, self.hidden_size)
        embeddings, pointers = batch.embeddings.float().contiguous(), array("Q", bytes(8 * len(batch.tokens)))
        for row, vector in zip(batch.embedded_rows.tolist(), embeddings, strict=True):
            pointers[row] = vector.data_ptr()
        return pointers, embeddings

    def _check_learned(self, end: int) -> None:
        """Raise ValueError for positions up to `end` - 1 that a table of learned positions does not have."""
        rows = self.config.embedding.positions
        if rows and end > rows:
            raise ValueError(f"a pass has position {end - 1}, and the model has {rows} learned positions")

    def _pass(self, storage: KVStorage, block_size: int, rows: int, end: int, most: int = 0) -> Pass:
        """Make a pass over a storage with angles for positions below `end`, and buffers for passes of `most` rows."""
        most = max(most, rows)
        if most > self._buffers.room:
            self._buffers, self._programs, self._encoders = Buffers(self.packed, next_power(most)), {}, {}
        on = Pass(rows=rows, block=block_size, groups=self._num_groups)
        self._angles.point(on, end)
        self._layers.point(on, storage)
        return on

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`; float32. Raises ValueError for rows of another width."""
        if hidden.shape[1:] != (self.hidden_size,):
            raise ValueError(f"hidden states are {list(hidden.shape)}, and the model's are [r, {self.hidden_size}]")
        hidden = hidden.float().contiguous()  # copies nothing if it is both already
        rows, ops = hidden.shape[0], (Op * 1)(self._head)
        out = self.kernels.scratch.empty(rows, self._head.n, dtype=torch.float32)
        ops[0].source, ops[0].out = hidden.data_ptr(), out.data_ptr()
        self.kernels.run(ops, Pass(rows=rows))
        return out if self._head_tokens is None else spread(out, self._head_tokens, self.vocab_size)

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`: all foreseeable chains and trees are drawn in one call."""
        foreseen = [chain for chain in chains if is_foreseeable(chain)]
        if foreseen:
            self._draw_at_once(foreseen, cache, vocab_size)
        return [chain for chain in chains if not is_foreseeable(chain)] if len(foreseen) < len(chains) else ()

    def _draw_at_once(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> None:
        chains = sorted(chains, key=_by_limit)
        require_groups(cache.num_groups, self._num_groups)
        assert not self.needs.source or all(chain.source is not None for chain in chains), "a chain has no source"
        rows = ChainRows(chains, self.vocab_size, cache, self._num_groups)
        self._check_learned(rows.end_position)
        on = self._pass(cache.storage, cache.block_size, rows.count, rows.end, rows.most_drawn)
        rows.point(on, self._angles.rows(ids(rows.positions), rows.long_rows(self.needs)))
        drawing = chains if chains[-1].limit else [chain for chain in chains if chain.limit]
        if drawing:
            drawn = self._drawn
            if drawn is None or not drawn.serves(drawing, vocab_size):
                drawn = self._drawn = Drawn(drawing, vocab_size)
                drawn.call.num_logits = self.vocab_size
                drawn.call.head_tokens = None if self._head_tokens is None else self._head_tokens.data_ptr()
            drawn.prepare(drawing, self.kernels.scratch)
            self._enter(chains, drawn.call)
            self.kernels.draft(self.program.ops, self._head, on, drawn.call)
            drawn.write_to(drawing)
        else:
            self._enter(chains, None)
            self.kernels.run(self.program.ops, on)

    def _enter(self, chains: Sequence[Chain], draft: Draft | None) -> None:
        """Set the inputs that rows have besides tokens: none here. draft: the draws that follow, if any."""


def _segments(batch: Batch) -> tuple[array[int], array[int], int]:
    """Return the fields of the segments (csrc/speculant.h), the parents, and the length of the longest sequence.

    The fields point to the batch's block tables.
    """
    fields, parents, first, end, groups = list[int](), list[int](), 0, 0, batch.num_groups
    for segment in batch.segments:
        _, start, chain, table, own, _, source, source_length = segment
        rows, tree = chain, -1
        if own and not segment.is_chain:
            chain, tree = segment.num_committed, len(parents)
            parents += own
        fields += (first, rows, start, chain, tree, address(table), stride(table, groups), 0)
        fields += (address(source), source_length)
        first, end = first + rows, max(end, start + rows)
    return array("q", fields), array("q", parents), end


def require_groups(num_groups: int, expected: int) -> None:
    """Raise ValueError unless a cache has one group, which serves all layers, or those of a model's layers."""
    if num_groups not in (1, expected):
        raise ValueError(f"a cache with {num_groups} groups of layers is used by a model with {expected}")


def _by_limit(chain: Chain) -> int:
    return -chain.limit
