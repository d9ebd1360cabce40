"""A `CausalLM` on the native kernels: each row's result depends only on that row and its context, bit for bit.

Chains and trees whose noise is known in advance are drawn in one native call: passes, distributions and draws.

Rotary positions have a table of cosines and one of sines for each kind, by position. If texts beyond a length have
other angles, these follow in the same tables:

    row        0 ... n - 1               n ... 2 n - 1
    angles     of positions 0 ... n - 1  of the same positions in long texts
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain as chained
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import NO_RECORD, CacheShape, KVCache, KVStorage, StateRows
from speculant.kernels import (
    CACHE_TYPES,
    MOST_CONV,
    MOST_DIM,
    MOST_GROUP,
    NO_TOKEN,
    TYPES,
    Arena,
    Bounds,
    Draft,
    Edits,
    Kernels,
    NativeEdits,
    Op,
    Pass,
    Scratch,
    address,
    likely_bytes,
    panel_rows,
    settings_array,
)
from speculant.models.base import (
    BackendModel,
    Batch,
    CausalLM,
    Chain,
    Hidden,
    ModelNeeds,
    check_embeddings,
    check_sources,
    check_taps,
    check_tokens,
    known,
)
from speculant.models.description import DecoderConfig
from speculant.models.heads import HeadConfig, HeadHost, StateEntry
from speculant.models.native.likely import LEAST_VOCABULARY, LikelyPanels
from speculant.models.native.packed import PackedDecoder, embedding, linear
from speculant.models.native.program import Buffers, EncoderProgram, NativeLinears, Program, SourceKeys, scratch_bytes
from speculant.models.reference import needs_of, rotaries, spread
from speculant.models.sizes import cache_shape, relative_reads, tensor_shapes
from speculant.models.weights.cache import WeightStore
from speculant.models.weights.reader import DRAFT_ROUNDINGS, Rounding, WeightReader, WeightTypes, require_finite
from speculant.models.weights.source import WeightSource
from speculant.params import SamplingParams
from speculant.sampling import KeyedNoise, MostLikely, Node, Stream, copied, edits_of, sampling_settings
from speculant.tree import ids, parents_of

FEWEST_POSITIONS = 256  # in the tables at first


class AngleTables:
    """The tables of a description's `rotations`, in their order. They grow with the positions that are used.

    positions: how many they have. tensors: cosines and sines [rows, rotated / 2], and factors of queries [rows] where
    there are some. widths: of the rows of each table. cosines, sines, factors: the addresses of pointers to them.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self._rotaries, self._restarts = [*rotaries(config).values()], config.restart_at is not None
        self.widths = array("q", [rotary.pairs for rotary in self._rotaries])
        self.tensors: list[Tensor] = []
        self._pointers: tuple[array[int], ...] = ()
        self.positions = self.cosines = self.sines = 0
        self.factors: int | None = None

    def rows(self, positions: Tensor, long: Tensor) -> Tensor | None:
        """Return the rows of the tables [T] for rows of a pass; None = their positions.

        long: see `Batch.long_rows`.
        """
        return positions + self.positions * long if bool(long.any()) else None

    def grow(self, end: int) -> None:
        """Make the tables have the positions below `end`."""
        self.positions = positions = next_power(end)
        at, long = torch.arange(positions), None
        if self._restarts:
            at, long = at.repeat(2), torch.arange(2 * positions) >= positions
        both = [rotary.tables(at, long) for rotary in self._rotaries]
        factors = [rotary.query_factors(at) for rotary in self._rotaries]
        self.tensors = [table for of_one in both for table in of_one] + [each for each in factors if each is not None]
        cosines, sines = (array("Q", [of_one[i].data_ptr() for of_one in both]) for i in (0, 1))
        scaling = array("Q", [0 if each is None else each.data_ptr() for each in factors])
        self._pointers, self.cosines, self.sines = (cosines, sines, scaling), address(cosines), address(sines)
        self.factors = address(scaling) if any(scaling) else None


def next_power(positions: int) -> int:
    """Return to how many positions the tables grow to have at least this number."""
    return max(FEWEST_POSITIONS, 1 << (positions - 1).bit_length())


FORESEEABLE = (Stream, KeyedNoise, MostLikely)
NO_STATES = StateRows(NO_RECORD, 0, NO_RECORD, 0)  # of a model without any


def _edits(chain: Chain) -> Edits | None:
    """Return the edits of a chain's rows; None if its first row has none, because then no row has any."""
    node = Node(chain.request)
    return edits_of(node) if node.edited else None


def is_foreseeable(chain: Chain) -> bool:
    """Whether a chain's noise is known in advance. A constraint's mask is not: it depends on every token drawn."""
    return isinstance(chain.chance, FORESEEABLE) and chain.request.constraint is None


_Kind = tuple[int, int, SamplingParams, tuple[int, ...], int]


def _kind_of(chains: Sequence[Chain]) -> list[_Kind]:
    """Return for each chain its limit, its noise, the settings of its distributions and its shape."""
    kind = list[_Kind]()
    for chain in chains:
        assert isinstance(chain.chance, FORESEEABLE)
        params = chain.request.params
        used = params.softened if chain.softened else params
        kind.append((chain.limit, chain.chance.noise, used, chain.widths, chain.topk))
    return kind


class ChainRows:
    """The input rows of chains, concatenated, with slots that it reserves. See `known` for unknown tokens.

    count: their number. most_drawn: the most rows of a later pass. end: length of the longest sequence in the cache.
    groups: of the model's layers.
    """

    def __init__(self, chains: Sequence[Chain], vocab_size: int, cache: KVCache, groups: int) -> None:
        tokens, positions, segments, end = list[int](), list[int](), list[int](), 0
        slots, groups_apart = list(map(list[int], [()] * cache.num_groups)), cache.num_groups > 1
        self._tables: list[array[int]] = []
        self._positions, self._ends, self.most_drawn = positions, list[int](), 0
        self._angles: Tensor | None = None
        for chain in chains:
            seq_id, own, num_positions = chain.request.seq_id, chain.input_tokens, chain.num_positions
            _, start, reserved, others = cache.reserve(seq_id, num_positions)
            table, count = cache.table(seq_id), len(own)
            stride = len(table) // cache.num_groups if groups_apart else 0
            segments += (len(tokens), count, start, count, -1, table.buffer_info()[0], stride, 0)
            self._tables.append(table)
            if chain.source is None:
                segments += (0, 0)
            else:
                self._tables.append(cache.table(chain.source))
                segments += (address(self._tables[-1]), cache.length(chain.source))
            certain = count if chain.certain is None else chain.certain
            segments += NO_STATES if cache.records is None else cache.advance(seq_id, start, certain)
            tokens += own
            positions += range(start, start + count)
            for known_slots, added in zip(slots, (reserved, *others), strict=True):
                known_slots += added[:count]
            self._ends.append(start + count)
            end = max(end, start + num_positions)
            self.most_drawn += num_positions - count if chain.is_tree else 1
        self.count, self.end, self._num_segments, self._groups = len(tokens), end, len(chains), groups
        slots *= groups // len(slots)
        self._memory = array("q", [*known(tokens, vocab_size), *positions, *chained.from_iterable(slots), *segments])

    def end_position(self, chains: Sequence[Chain]) -> int:
        """Return one more than the last position of a token."""
        return max(end + chain.inner_depth for chain, end in zip(chains, self._ends, strict=True))

    def long_rows(self, chains: Sequence[Chain], needs: ModelNeeds) -> tuple[Tensor, Tensor]:
        """Return the rows' positions [count], and which of them are of long texts: see `Batch.long_rows`."""
        long = [needs.is_long(chain.request.num_positions) for chain in chains for _ in chain.input_tokens]
        return ids(self._positions), torch.tensor(long)

    def point(self, on: Pass, angles: Tensor | None) -> None:
        """Let a pass point to the rows. angles: see `AngleTables.rows`."""
        self._angles = angles
        on.angles = None if angles is None else angles.data_ptr()
        size = 8 * self.count
        on.tokens = first = self._memory.buffer_info()[0]
        on.positions, on.slots, on.segments = first + size, first + 2 * size, first + (2 + self._groups) * size
        on.num_segments = self._num_segments


class Drawn:
    """Memory for the tokens and probs that chains draw, largest first; `call` points to it.

    It serves other chains of the same kind as well, one draft after the other.
    """

    def __init__(self, chains: Sequence[Chain], vocab_size: int) -> None:
        count, nodes = len(chains), chains[0].limit
        self._kind, self._nodes, self._width = _kind_of(chains), nodes, vocab_size
        self._edited = any(chain.request.params.edits for chain in chains)
        self._tokens = array("q", bytes(8 * count * nodes))
        limits, noise, params, shapes, topk = zip(*self._kind, strict=True)
        widths = [array("q", shape) for shape in shapes]
        shaped, dynamic = array("Q", [address(own) if own else 0 for own in widths]), array("q", topk)
        self._parents, self._scores = (array(code, bytes(8 * count * nodes) if any(topk) else b"") for code in "qd")
        self._numbers = array("Q", [*limits, *noise, *bytes(3 * count)])  # the last ones are set by `prepare`
        settings, edits = settings_array([*map(sampling_settings, params)]), NativeEdits([*map(_edits, chains)])
        self._owners = (settings, edits, widths, shaped, dynamic)
        first, size = address(self._numbers), 8 * count
        self.call = Draft(
            sequences=count,
            nodes=nodes,
            width=vocab_size,
            limits=first,
            widths=address(shaped) if any(shapes) else None,
            topk=address(dynamic) if any(topk) else None,
            parents=address(self._parents) if any(topk) else None,
            scores=address(self._scores) if any(topk) else None,
            noise=first + size,
            out=first + 2 * size,
            chances=first + 3 * size,
            settings=ctypes.addressof(settings),
            edits=edits.address,
            drawn=address(self._tokens),
        )

    def serves(self, chains: Sequence[Chain], vocab_size: int) -> bool:
        """Whether chains are of its kind. Those with edits never are, because edits change from step to step."""
        return not self._edited and self._width == vocab_size and self._kind == _kind_of(chains)

    def prepare(self, chains: Sequence[Chain], scratch: Scratch) -> None:
        """Take the keys of the chains' draws, and memory for their probs."""
        out, keys = list[int](), list[int]()
        emitting = list[Chain]()
        for chain in chains:
            if chain.emits_probs:
                emitting.append(chain)
        if emitting:
            lengths = [chain.limit for chain in emitting]
            probs = torch.split(scratch.empty(sum(lengths), self._width, dtype=torch.float64), lengths)
            for chain, own in zip(emitting, probs, strict=True):
                chain.probs = own
        for chain in chains:
            assert isinstance(chain.chance, FORESEEABLE)
            keys += chain.chance.take_keys(chain.limit)
            out.append(0 if chain.probs is None else chain.probs.data_ptr())
        self._numbers[2 * len(chains) :] = array("Q", out + keys)
        self.call.stop_below = chains[0].stop_below
        self.call.stop_path = 0.0 if self.call.widths or self.call.topk else chains[0].stop_path

    def write_to(self, chains: Sequence[Chain]) -> None:
        """Write the drawn tokens to the chains, without the nodes that were not drawn."""
        for row, chain in enumerate(chains):
            first, end = row * self._nodes, row * self._nodes + chain.limit
            tokens = self._tokens[first:end].tolist()
            chain.parents = parents_of(chain.widths) if chain.widths else None
            if chain.topk:
                chain.parents, chain.scores = self._parents[first:end], self._scores[first:end]
            if NO_TOKEN in tokens:
                kept = [node for node, token in enumerate(tokens) if token != NO_TOKEN]
                tokens = [tokens[node] for node in kept]
                chain.probs = None if chain.probs is None else chain.probs[kept]
                if chain.parents is not None:
                    places = {node: place for place, node in enumerate((-1, *kept), -1)}
                    chain.parents = [places[chain.parents[node]] for node in kept]
                chain.scores = None if chain.scores is None else [chain.scores[node] for node in kept]
            chain.tokens = tokens


Recorded = TypeVar("Recorded", bound=Program)
FEWEST_ROWS = 16  # that the buffers have room for at first


class LayerPointers:
    """The addresses of each layer's keys and values in a storage, and of its records; 0 = it has none.

    keys, values, states: where they are listed.
    """

    def __init__(self, storage: KVStorage, shape: CacheShape) -> None:
        layers = [storage.layer(layer) for layer in range(shape.num_layers)]
        keys, values = (array("Q", [layer[i].data_ptr() for layer in layers]) for i in (0, 1))
        records = [storage.records(layer).data_ptr() if of else 0 for layer, of in enumerate(shape.states)]
        states = array("Q", records)
        self.storage, self._pointers = weakref.ref(storage), (keys, values, states)
        self.keys, self.values, self.states = address(keys), address(values), address(states) if states else None


class Layout(NamedTuple):
    """The arguments of a program, and the objects that they point to, which must live as long."""

    on: Pass
    owners: tuple[object, ...]


class NativeDecoder(BackendModel, HeadHost):
    """A decoder whose weights are packed as they are read. Activations are float32 for every type of weights.

    dtype, float32 or bfloat16, is that of the cache, unless `storing_keys_as` chooses another one; for weights, see
    `WeightTypes`. quantization: the types that matrices are rounded to; None = they are not.
    coded: bfloat16 matrices are stored in 12 bits a weight, which changes no bit of a result. store: of packed ones.
    The kernels may round the activations of a linear layer before they multiply: see csrc/speculant.h.

    head_rounding: the types that matrices of heads on this model are rounded to; None = they have that of the cache.
    """

    head_quantizations: Sequence[str] = tuple(DRAFT_ROUNDINGS)
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
        self._num_groups, self._learned_positions = len(self.cache_shape.groups), config.embedding.positions
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.num_layers, self.hidden_size = config.num_layers, config.hidden_size
        self.kernels, self.packed = kernels, packed
        self.needs = needs_of(config)
        self._buffers, self._programs = Buffers(packed, FEWEST_ROWS), dict[tuple[int, ...], Program]()
        self._encoders = dict[type[SourceKeys], SourceKeys]()  # over the same buffers
        self._angles = AngleTables(config)
        self._layers: LayerPointers | None = None  # of the storage of the last pass
        self._head = linear(
            packed.head, None, None, packed.head_bias, factor=config.head.scale, softcap=config.head.softcap
        )
        self._head_tokens = torch.tensor(config.head.tokens, dtype=torch.int64) if config.head.tokens else None
        is_large = config.vocab_size >= LEAST_VOCABULARY and not config.head.tokens
        self._likely = LikelyPanels(config.vocab_size, panel_rows(kernels)) if is_large else None
        shape = self.cache_shape
        self._slot_bytes = array("q", [of.num_kv_heads * shape.bytes_of_head(of.head_dim) for of in shape.layers])
        self._record_sizes = array("q", [of.size if of else 0 for of in shape.states])
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
    @override
    def weight_bytes(self) -> int:
        return self.packed.num_bytes

    @override
    def relative_reads(self, rows: int) -> float:
        return self._reads(rows)

    @cached_property
    def _reads(self) -> Callable[[int], float]:
        return relative_reads(self.packed.config)

    @override
    def scratch_bytes(self, rows: int, positions: int) -> int:
        return scratch_bytes(self.packed.config, self.packed.activations, self.kernels.threads, rows, positions)

    @property
    def program(self) -> Program:
        """A pass without taps."""
        return self._programs.get(()) or self._recorded(())

    def _recorded(self, taps: tuple[int, ...]) -> Program:
        """Record the pass with these taps, at its first use."""
        check_taps(taps, self.num_layers)
        program = self._programs[taps] = self._checked(self._record(taps), self._head)
        return program

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
            slots=address(self._slot_bytes), records=address(self._record_sizes) if self._record_sizes else None,
            angles=address(self._angles.widths), head_tokens=None if tokens is None else tokens.data_ptr(),
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
        for state in filter(None, config.states):
            if max(state.key_dim, state.head_dim) > MOST_DIM or state.conv > MOST_CONV:
                sizes = f"states [{state.key_dim}, {state.head_dim}] with convolutions over {state.conv} positions"
                return f"{sizes} are too large for them"
            if state.norm and (state.norm.kind != "rms" or state.norm.bias):
                return "norms of states subtract the mean or have a bias"
        return None

    @override
    def attach(self, config: HeadConfig, weights: WeightSource) -> CausalLM:
        from speculant.models.native.head import NativeBlockHead, NativeHead

        return (NativeBlockHead if config.entry is StateEntry.CONTEXT else NativeHead)(config, weights, self)

    @override
    def rounding_heads(self, quantization: str) -> NativeDecoder:
        model = self._of(self.packed)
        model.head_rounding = DRAFT_ROUNDINGS[quantization]
        return model

    def _of(self, packed: PackedDecoder) -> NativeDecoder:
        """Return a model of other packed weights."""
        model = NativeDecoder.__new__(NativeDecoder)
        model._begin(packed, self.cache_shape.dtype, self.kernels)
        return model

    @override
    def storing_keys_as(self, dtype: torch.dtype) -> NativeDecoder:
        cache_type = next(type_ for type_, own in CACHE_TYPES.items() if own == dtype)
        return self._of(replace(self.packed, cache_type=cache_type))

    @override
    def linears(self, matrices: Sequence[Tensor], biases: Tensor | None) -> NativeLinears:
        """Raises ModelError for matrices that are not finite and are to be rounded."""
        dtype, rounding = self.cache_shape.dtype, self.head_rounding
        if rounding is None:
            return NativeLinears(self.kernels, TYPES[dtype], matrices, biases)
        for matrix in matrices:
            require_finite(matrix, "a head's matrix", dtype, rounding)
        return NativeLinears(self.kernels, rounding.type_of("", matrices[0].shape[1]), matrices, biases)

    @override
    def truncated(self, num_layers: int) -> NativeDecoder:
        whole = self.packed
        return self._of(replace(whole, config=whole.config.truncated(num_layers), layers=whole.layers[:num_layers]))

    @override
    def embed(self, tokens: Tensor) -> Tensor:
        """Float32."""
        check_tokens(tokens, self.vocab_size)
        tokens, out = tokens.long().contiguous(), torch.empty(len(tokens), self.hidden_size)
        ops = (Op * 1)(embedding(self.packed.table, out, self.packed.config.embedding.scale))
        self.kernels.run(ops, Pass(rows=len(tokens), tokens=tokens.data_ptr()))
        return out

    @override
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """Hidden states are float32."""
        check_sources(batch, self.needs)
        layout, rows = self.layout(batch, storage), batch.tokens.shape[0]
        program = self._programs.get(tuple(taps)) or self._recorded(tuple(taps))
        tapped = program.next_taps(rows) if taps else ()
        self.kernels.run(program.ops, layout.on)
        return Hidden(copied(program.hidden[:rows]), tapped)

    @override
    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        """Float32."""
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
        groups = 1 if batch.group_slots is None else batch.num_groups
        segments, parents, end = _segments(batch, groups)
        if self._learned_positions:
            self._check_learned(int(batch.positions.max()) + 1)
        on = self._pass(storage, batch.block_size, batch.tokens.shape[0], end)
        tokens = batch.tokens if batch.embeddings is None else batch.tokens.index_fill(0, batch.embedded_rows, 0)
        on.tokens, on.positions = tokens.data_ptr(), batch.positions.data_ptr()
        slots = batch.slot_mapping if batch.group_slots is None else batch.group_slots
        if groups != self._num_groups:
            require_one(groups, self._num_groups)
            slots = slots.repeat(self._num_groups)
        on.slots = slots.data_ptr()
        on.num_segments, on.segments = len(batch.segments), segments.buffer_info()[0]
        on.parents = address(parents) if parents else None
        inputs = None if batch.embeddings is None else self._inputs(batch, batch.embeddings)
        long = None if self.needs.restart_at is None else batch.long_rows(self.needs)
        angles = None if long is None else self._angles.rows(batch.positions, long)
        on.inputs = address(inputs[0]) if inputs else None
        on.angles = None if angles is None else angles.data_ptr()
        return Layout(on, (batch, tokens, slots, segments, parents, inputs, angles))

    def _inputs(self, batch: Batch, embeddings: Tensor) -> tuple[array[int], Tensor]:
        """Return the address of each row's input embedding (0 = look its token up) and their memory."""
        check_embeddings(batch, self.hidden_size)
        embeddings, pointers = embeddings.float().contiguous(), array("Q", bytes(8 * len(batch.tokens)))
        for row, vector in zip(batch.embedded_rows.tolist(), embeddings, strict=True):
            pointers[row] = vector.data_ptr()
        return pointers, embeddings

    def _check_learned(self, end: int) -> None:
        """Raise ValueError for positions up to `end` - 1 that a table of learned positions does not have."""
        rows = self._learned_positions
        if rows and end > rows:
            raise ValueError(f"a pass has position {end - 1}, and the model has {rows} learned positions")

    def _pass(self, storage: KVStorage, block_size: int, rows: int, end: int, most: int = 0) -> Pass:
        """Make a pass over a storage with angles for positions below `end`, and buffers for passes of `most` rows."""
        most = max(most, rows)
        if most > self._buffers.room:
            self._buffers, self._programs, self._encoders = Buffers(self.packed, next_power(most)), {}, {}
        on = Pass(rows=rows, block=block_size, groups=self._num_groups)
        angles, layers = self._angles, self._layers
        if end > angles.positions and angles.widths:
            angles.grow(end)
        if layers is None or layers.storage() is not storage:
            layers = self._layers = LayerPointers(storage, self.cache_shape)
        on.cosines, on.sines, on.query_factors = angles.cosines, angles.sines, angles.factors
        on.keys, on.values, on.states = layers.keys, layers.values, layers.states
        return on

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32. Raises ValueError for rows of another width."""
        if hidden.shape[1:] != (self.hidden_size,):
            raise ValueError(f"hidden states are {list(hidden.shape)}, and the model's are [r, {self.hidden_size}]")
        hidden = hidden.float().contiguous()  # copies nothing if it is both already
        rows, ops = hidden.shape[0], (Op * 1)(self._head)
        out = self.kernels.scratch.empty(rows, self._head.n, dtype=torch.float32)
        ops[0].source, ops[0].out = hidden.data_ptr(), out.data_ptr()
        self.kernels.run(ops, Pass(rows=rows))
        return out if self._head_tokens is None else spread(out, self._head_tokens, self.vocab_size)

    @override
    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """All foreseeable chains and trees are drawn in one call."""
        foreseen, others = list[Chain](), list[Chain]()
        for chain in chains:
            (foreseen if is_foreseeable(chain) else others).append(chain)
        if not foreseen:
            return others
        chains = sorted(foreseen, key=attrgetter("limit"), reverse=True)
        if cache.num_groups != self._num_groups:
            require_one(cache.num_groups, self._num_groups)
        assert not self.needs.source or all(chain.source is not None for chain in chains), "a chain has no source"
        rows = ChainRows(chains, self.vocab_size, cache, self._num_groups)
        if self._learned_positions:
            self._check_learned(rows.end_position(chains))
        on = self._pass(cache.storage, cache.block_size, rows.count, rows.end, rows.most_drawn)
        restart_at = self.needs.restart_at
        rows.point(on, None if restart_at is None else self._angles.rows(*rows.long_rows(chains, self.needs)))
        drawing = chains if chains[-1].limit else [chain for chain in chains if chain.limit]
        if drawing:
            drawn = self._drawn
            if drawn is None or not drawn.serves(drawing, vocab_size):
                drawn = self._drawn = Drawn(drawing, vocab_size)
                drawn.call.num_logits = self.vocab_size
                drawn.call.head_tokens = None if self._head_tokens is None else self._head_tokens.data_ptr()
            drawn.prepare(drawing, self.kernels.scratch)
            if self._likely is not None:
                self._likely.choose(drawing, drawn.call)
            self.kernels.draft(self._entered(chains, drawn.call).ops, self._head, on, drawn.call)
            drawn.write_to(drawing)
        else:
            self.kernels.run(self._entered(chains, None).ops, on)
        return others

    def _entered(self, chains: Sequence[Chain], draft: Draft | None) -> Program:
        """Return the program, after setting the inputs that rows have besides tokens: none here.

        draft: the draws that follow, if any.
        """
        return self._programs.get(()) or self._recorded(())


def _segments(batch: Batch, groups: int) -> tuple[array[int], array[int], int]:
    """Return the fields of the segments (csrc/speculant.h), the parents, and the length of the longest sequence.

    The fields point to the batch's block tables. groups: of layers that these tables have.
    """
    fields, parents, first, end = list[int](), list[int](), 0, 0
    for segment in batch.segments:
        _, start, chain, table, own, _, source, source_length, _ = segment
        rows, tree = chain, -1
        if own and not segment.is_chain:
            chain, tree = segment.num_committed, len(parents)
            parents += own
        stride = len(table) // groups if groups > 1 else 0
        fields += (first, rows, start, chain, tree, table.buffer_info()[0], stride, 0)
        fields += (address(source) if source_length else 0, source_length, *(segment.state or NO_STATES))
        first, end = first + rows, max(end, start + rows)
    return array("q", fields), array("q", parents), end


def require_one(num_groups: int, expected: int) -> None:
    """Raise ValueError unless a cache with other groups than a model's layers has one, which serves them all alike."""
    if num_groups != 1:
        raise ValueError(f"a cache with {num_groups} groups of layers is used by a model with {expected}")
