"""The interface of a model: a flat batch in, hidden states and logits out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as chained
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from speculant.cache import CacheShape, KVCache, KVStorage, Source, StateRows
from speculant.errors import ConfigError, RequestError
from speculant.sampling import Chance
from speculant.tree import ids
from speculant.types import DraftTree, Request

_NO_ROWS = ids([])
NO_TABLE: array[int] = array("q")
_NO_EMBEDDINGS: Mapping[int, Tensor] = MappingProxyType({})
_EMBEDDINGS_FIX = "give each row a vector of the model's hidden_size, such as those that `embed` returns."


class Segment(NamedTuple):
    """One sequence's rows in a flat batch, at the cache positions start .. end - 1.

    The last `len(parents)` rows are draft nodes, the others a chain of committed tokens that ends with the root.
    `table` is the sequence's block table, for every group of layers (`KVCache.table`). `seq_id` appears in error
    messages. `length`: see `SequenceInput`. `source_table` and `source_length` are the block table and the positions of
    its encoded source, which is a sequence of the same cache. state: for layers with a state; None = there are none.
    """

    seq_id: int
    start: int
    num_rows: int
    table: array[int]
    parents: Sequence[int] = ()  # one per draft node, an earlier node; -1 = the root
    length: int | None = None
    source_table: array[int] = NO_TABLE
    source_length: int = 0
    state: StateRows | None = None

    @property
    def end(self) -> int:
        """The sequence's length once these rows are written."""
        return self.start + self.num_rows

    @property
    def num_committed(self) -> int:
        """Rows that are committed tokens (not draft nodes)."""
        return self.num_rows - len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether no draft node has a sibling, so that all rows are one chain."""
        return not self.parents or list(self.parents) == list(range(-1, len(self.parents) - 1))

    @property
    def text_length(self) -> int:
        """The tokens of the whole text, as far as they are known; see `SequenceInput.length`."""
        return self.start + self.num_committed if self.length is None else self.length


@dataclass(slots=True)
class Batch:
    """Prompt chunks, last tokens and draft trees of many sequences, side by side.

    T is the number of rows over all segments. There is no padding and no batch dimension. A batch is plain data and
    complete: it can be sent to another process that holds the model and the storage.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64; a draft node's position is its depth, not its row
    slot_mapping: (
        Tensor  # [T] int64; the slot that each row's key and value are written to, in the first group of layers
    )
    segments: tuple[Segment, ...]
    block_size: int  # positions per block of the block tables
    embeddings: Tensor | None = None  # [k, hidden] input embeddings that replace token lookups; None = no row has one
    embedded_rows: Tensor = _NO_ROWS  # [k] int64, the rows of the batch that they belong to
    hidden: Tensor | None = None  # [T, hidden] states of another model that rows read (models/heads.py); None = none
    group_slots: Tensor | None = None  # [groups, T] int64, as slot_mapping but of every group; None = there is one

    @property
    def num_groups(self) -> int:
        """How many groups of layers have slots of their own; see `CacheShape.groups`."""
        return 1 if self.group_slots is None else self.group_slots.shape[0]

    def slots_of(self, group: int) -> Tensor:
        """Return the slots [T] that rows are written to in the layers of a group."""
        return self.slot_mapping if self.group_slots is None else self.group_slots[group]

    def long_rows(self, needs: ModelNeeds) -> Tensor | None:
        """Return which rows [T] are of texts that a model computes as long; None = it has no other way for these."""
        if needs.restart_at is None:
            return None
        long = [needs.is_long(segment.text_length) for segment in self.segments for _ in range(segment.num_rows)]
        return torch.tensor(long, dtype=torch.bool, device=self.tokens.device)


class SequenceInput(NamedTuple):
    """The input of one sequence to a pass: committed tokens that are not in its cache, then a draft tree.

    `embeddings` maps rows of this sequence in the pass, counted from 0, to their own input embeddings [hidden]. The
    token of such a row is not looked up and may be any number.
    `hidden` has a state [rows, hidden] for each row, for models that read states.
    `length` is the number of tokens of the whole text, those of later passes included; None = up to those of this pass.
    See `ModelNeeds.restart_at`. `source` is the sequence id of its encoded source in the cache; None = it has none.
    `certain` is how many of the tokens, from the first one on, will not be dropped again; None = all.
    """

    seq_id: int
    tokens: Sequence[int]
    tree: DraftTree
    embeddings: Mapping[int, Tensor] = _NO_EMBEDDINGS
    hidden: Tensor | None = None
    length: int | None = None
    source: int | None = None
    certain: int | None = None


class Hidden(NamedTuple):
    """The hidden states that a pass computes for each of its T rows.

    taps[i] is the input of the layer that the i-th requested tap names (EAGLE-3, arXiv 2503.01840): 0 = the input
    embeddings, `num_layers` = the output of the last layer, before the final norm.
    """

    last: Tensor  # [T, hidden], after the final norm: the input of `logits`
    taps: Sequence[Tensor] = ()  # [T, hidden] each, in float32 or the model's dtype
    carried: Tensor | None = None  # [T, hidden], the states that the next rows read; None = the model reads none


@dataclass(eq=False)
class Chain:
    """One sequence's part of a draft: forward `input_tokens`, then draw `limit` tokens (0 = none), a chain or a tree.

    `input_tokens` are the committed tokens that are not in its cache. Each drawn token but the last is forwarded in
    turn. The chain ends at a row without a distribution, because no token is possible or the model failed. It also ends
    after a token whose probability is below `stop_below`, and, unless it is a tree, after one where the product of the
    scores so far is below `stop_path`. probs [tokens, V] are the distributions that the tokens were
    drawn from; None if the verifier does not read them.
    hidden [len(input_tokens), hidden]: the states of the input tokens, for a model that reads states.
    widths [1 + limit]: of a tree whose shape is known in advance, the children of the root and of each node, in order
    of depth; () = a chain. Siblings follow each other and are drawn without replacement, each from the distribution
    without the earlier ones. A node that can't be drawn is left out, with those below it. `parents` are those of the
    tokens; None = a chain.
    topk: of a dynamic tree (drafting/growth.py), the children of the root and of the most confident nodes of
    each depth, and the number of these nodes; 0 = another draft. limit is then the number of all children. `scores` are
    those of the tokens, see `DraftTree.scores`. source, certain: see
    `SequenceInput`.

    is_tree: nodes may have siblings. softened: greedy tokens have distributions at temperature 1, to compare with
    `stop_below` or to rank siblings. emits_probs: a verifier reads `probs`; softened distributions are not those that
    greedy tokens are drawn from.
    """

    request: Request
    input_tokens: list[int]
    limit: int
    chance: Chance
    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None
    stop_below: float = 0.0
    stop_path: float = field(default=0.0, kw_only=True)
    hidden: Tensor | None = None
    widths: tuple[int, ...] = ()
    parents: Sequence[int] | None = None
    topk: int = 0
    scores: Sequence[float] | None = None
    source: int | None = None
    certain: int | None = None

    def __post_init__(self) -> None:
        self.confidence = 1.0  # the product of the scores so far, if there is a `stop_path`
        request, self.is_tree = self.request, bool(self.widths) or self.topk > 0
        ranked = self.stop_below > 0 or self.stop_path > 0 or (self.is_tree and request.drafts.shared_noise)
        self.softened = ranked and request.params.greedy
        self.emits_probs = not (request.drafts.shared_noise or self.softened)

    @property
    def num_inner(self) -> int:
        """The nodes that may have children: those of the draft that its model computes."""
        if self.topk:
            return (self.limit - self.topk) // self.topk
        return sum(width > 0 for width in self.widths[1:]) if self.widths else max(0, self.limit - 1)

    @property
    def inner_depth(self) -> int:
        """The levels of these nodes: how many positions follow the input tokens."""
        if self.topk:
            return self.num_inner // self.topk
        if not self.widths:
            return self.num_inner
        levels, first, size = 0, 1, self.widths[0]
        while deeper := sum(self.widths[first : first + size]):
            levels, first, size = levels + 1, first + size, deeper
        return levels

    def draft(self) -> DraftTree:
        """Return the tokens that were drawn."""
        if self.parents is not None and self.tokens:
            return DraftTree.of(self.tokens, self.parents, self.probs, self.scores)
        return DraftTree.chain(self.tokens, self.probs) if self.tokens else DraftTree.empty()

    @property
    def num_positions(self) -> int:
        """How many cache positions the chain needs."""
        inner = self.num_inner if self.is_tree else max(0, self.limit - 1)
        return len(self.input_tokens) + inner


@dataclass(frozen=True)
class ModelNeeds:
    """What a model requires beyond a cache of keys and values per position.

    source: a second text per request that is encoded before decoding starts; the model is an `EncodesSources`.
    most_nodes: layers with a state take drafts of at most as many nodes, in one chain; None = any tree.
    restart_at: a text of more tokens is computed in another way, its earlier tokens included, so that their keys and
    values must be computed again when the text grows longer; None = no text is.
    """

    source: bool = False
    most_nodes: int | None = None
    restart_at: int | None = None

    def is_long(self, length: int) -> bool:
        """Whether a text of `length` tokens is computed in the other way."""
        return self.restart_at is not None and length > self.restart_at

    def salt(self, request: Request) -> str:
        """Return the salt of a request's keys and values: texts that are computed in other ways share none."""
        salt = request.full_salt
        if self.restart_at is None or request.num_positions <= self.restart_at:
            return salt
        return f"{salt}\0long"


class RunsPasses(Protocol):
    """The methods of a `CausalLM`."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings [k, hidden] of tokens [k]. Raises RequestError for an unknown token."""
        ...

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """Run a pass and write the batch's keys and values to the storage; `taps` are layers, see `Hidden`.

        Raises ConfigError for a tap that the model does not have.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [r, vocab_size] of the given hidden rows [r, hidden]."""
        ...

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """Draw the chains, and trees of known shapes, that this model can draw by itself, over `vocab_size` tokens.

        Returns the others unchanged. The caller makes sure that the cache has room for all. Tokens and probs are the
        same as with one pass per token, or per depth of a tree.
        """
        ...


class CausalLM(RunsPasses, Protocol):
    """A decoder whose storage of keys and values is an argument."""

    @property
    def needs(self) -> ModelNeeds:
        """What the model requires of the engine."""
        ...

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of one position of this model's cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding rows included."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest context that the model was trained for, in positions."""
        ...

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        ...

    @property
    def hidden_size(self) -> int:
        """The width of a hidden state and of an input embedding."""
        ...


@runtime_checkable
class EncodesSources(Protocol):
    """An encoder-decoder model. A source is a sequence of the same cache as the texts that are decoded from it.

    In layer i of the cache, a text has the keys and values of the decoder's self-attention, and a source those of its
    attention over the source.
    """

    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        """Encode whole sources, and write each decoder layer's keys and values of them to the batch's slots.

        The batch has one segment for each source, from position 0 to its end. Returns the encoder's result
        [T, hidden], after its norm. If the batch has `hidden`, this is the result, and the encoder's
        layers are not computed.
        """
        ...


@runtime_checkable
class KnowsSizes(Protocol):
    """A model that knows what its passes read, and the memory that it takes besides its cache."""

    @property
    def weight_bytes(self) -> int:
        """How many bytes of memory its matrices take."""
        ...

    def scratch_bytes(self, rows: int, positions: int) -> int:
        """Return the most bytes that passes of `rows` rows keep, over sequences of up to `positions` positions."""
        return 0

    def relative_reads(self, rows: int) -> float:
        """Return the expected weights that a pass of `rows` rows reads, divided by those that one row reads."""
        ...


def weight_bytes_of(model: CausalLM) -> int:
    """Return the bytes of a model's matrices; 0 for one that does not know."""
    return model.weight_bytes if isinstance(model, KnowsSizes) else 0


def scratch_of(model: CausalLM, rows: int, positions: int) -> int:
    """Return the most bytes of scratch memory that a model keeps; 0 for one that does not know."""
    return model.scratch_bytes(rows, positions) if isinstance(model, KnowsSizes) else 0


def relative_reads_of(model: CausalLM) -> Callable[[int], float]:
    """Return `KnowsSizes.relative_reads` of a model; 1 for one that does not know."""
    return model.relative_reads if isinstance(model, KnowsSizes) else lambda rows: 1.0


@runtime_checkable
class ConvertsKeys(Protocol):
    """A model that can have a cache of another type. This makes it another model: its layers read converted keys."""

    def storing_keys_as(self, dtype: torch.dtype) -> CausalLM:
        """Return this model, with the same weights, for caches of a type; see `CacheShape.stored`."""
        ...


@runtime_checkable
class Truncatable(Protocol):
    """A `CausalLM` whose first layers can be used as a model."""

    def truncated(self, num_layers: int) -> CausalLM:
        """Return the model of the first layers, the final norm and the output head. It shares all weights."""
        ...


class BackendModel(RunsPasses, EncodesSources, KnowsSizes, ConvertsKeys, Truncatable, Protocol):
    """What the models of this package's own backends can do."""


def check_sources(batch: Batch, needs: ModelNeeds) -> None:
    """Check that each text of a batch has an encoded source, or that none has one. Raises RequestError."""
    for segment in batch.segments:
        if bool(segment.source_length) != needs.source:
            raise RequestError(
                f"sequence {segment.seq_id} has no encoded source, and this model is an encoder-decoder"
                if needs.source
                else f"sequence {segment.seq_id} has an encoded source, and this model has no encoder",
                "give each request to an encoder-decoder model a source, and others none.",
            )


def build_batch(inputs: Sequence[SequenceInput], cache: KVCache, device: torch.device) -> Batch:
    """Reserve slots for every input and concatenate the sequences (docs/references.md, verification pass)."""
    segments, tokens, positions, slot_mapping = list[Segment](), list[int](), list[int](), list[int]()
    embeddings, hidden = dict[int, Tensor](), list[Tensor]()
    others = list(map(list[int], [()] * (cache.num_groups - 1)))
    for sequence in inputs:
        seq_id, own_tokens, tree, own_embeddings, own_hidden, length, source, certain = sequence
        if own_hidden is not None:
            hidden.append(own_hidden)
        if own_embeddings:
            embeddings.update(_embedded_rows(sequence, len(tokens)))
        count = len(own_tokens)
        _, start, slots, own = cache.reserve(seq_id, count + tree.size)
        segment = Segment(seq_id, start, count + tree.size, cache.table(seq_id), tree.parent_list, length)
        if source is not None:
            segment = segment._replace(source_table=cache.table(source), source_length=cache.length(source))
        if cache.records is not None:
            segment = segment._replace(state=cache.advance(seq_id, start, count if certain is None else certain))
        segments.append(segment)
        tokens += own_tokens
        positions += range(start, start + count)
        if tree.size:
            tokens += tree.token_list
            positions += map((start + count - 1).__add__, tree.depths)
        slot_mapping += slots
        for known_slots, added in zip(others, own, strict=True):
            known_slots += added
    rows = ids([*tokens, *positions, *slot_mapping, *chained.from_iterable(others)]).view(3 + len(others), len(tokens))
    if device.type != "cpu":
        rows = rows.to(device)
    return Batch(
        rows[0],
        rows[1],
        rows[2],
        tuple(segments),
        cache.block_size,
        _stack(embeddings).to(device) if embeddings else None,
        ids([*embeddings]).to(device) if embeddings else _NO_ROWS,
        torch.cat(hidden) if hidden else None,
        rows[2:] if others else None,
    )


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Check that a model with `num_layers` layers has all these taps. Raises ConfigError."""
    for tap in taps:
        if not 0 <= tap <= num_layers:
            raise ConfigError(
                f"hidden states of layer {tap} are asked for, and the model has {num_layers} layers",
                f"ask for layers 0 (the input embeddings) to {num_layers} (the output of the last layer).",
            )


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Check that tokens [k] have an input embedding. Raises RequestError."""
    unknown = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(unknown):
        raise RequestError(
            f"token {int(unknown[0])} has no input embedding", f"use token ids from 0 to {vocab_size - 1}."
        )


def check_embeddings(batch: Batch, hidden_size: int) -> None:
    """Check that the input embeddings of a batch have the model's width. Raises RequestError."""
    if batch.embeddings is not None and batch.embeddings.shape[1:] != (hidden_size,):
        raise RequestError(
            f"an input embedding has the shape {list(batch.embeddings.shape[1:])}, and the model's are [{hidden_size}]",
            _EMBEDDINGS_FIX,
        )


def _stack(embeddings: Mapping[int, Tensor]) -> Tensor:
    shapes = {tuple(embedding.shape) for embedding in embeddings.values()}
    if len(shapes) > 1:
        raise RequestError(f"the input embeddings of a pass have different shapes: {sorted(shapes)}", _EMBEDDINGS_FIX)
    return torch.stack([*embeddings.values()])


def _embedded_rows(inputs: SequenceInput, first: int) -> dict[int, Tensor]:
    """Return a sequence's own input embeddings by row of the batch; its rows begin at `first`."""
    count = len(inputs.tokens) + inputs.tree.size
    for row in inputs.embeddings:
        if not 0 <= row < count:
            raise RequestError(
                f"an input embedding is for row {row} of sequence {inputs.seq_id}, which has {count} rows in this pass",
                f"give rows from 0 to {count - 1}.",
            )
    return {first + row: embedding for row, embedding in inputs.embeddings.items()}


def known(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Replace tokens outside a model's vocabulary by token 0: a draft may be any token, but a lookup may not."""
    if not tokens or max(tokens) < vocab_size:
        return list(tokens)
    return [token if token < vocab_size else 0 for token in tokens]


@torch.inference_mode()
def encode_sources(
    model: CausalLM,
    cache: KVCache,
    sources: Sequence[Source],
    keeps_states: bool = False,
    given: Sequence[Tensor] | None = None,
) -> None:
    """Encode whole sources in one pass; after an error none of them is in the cache.

    keeps_states: their `states` are kept. given: the encoder's result [tokens, hidden] of each; None = it is computed.
    """
    assert isinstance(model, EncodesSources), "the model has no encoder"
    states: Sequence[Tensor | None] = [None] * len(sources) if given is None else given
    inputs = [
        SequenceInput(source.seq_id, known(source.tokens, model.vocab_size), DraftTree.empty(), hidden=own)
        for source, own in zip(sources, states, strict=True)
    ]
    try:
        encoded, first = model.encode(build_batch(inputs, cache, model.cache_shape.device), cache.storage), 0
    except BaseException:
        for source in sources:
            cache.release(source.seq_id)
        raise
    for source in sources:
        end = first + len(source.tokens)
        source.states, first = encoded[first:end].clone() if keeps_states else None, end
        if cache.stored is not None:
            cache.stored.keep_source(source)
