"""DFlash: a head that drafts a block of tokens in one pass, whose rows attend to each other (arXiv 2602.06036).

    cache       keys and values of the states of t0 .. t3         t4 = the newest token, whose state is not known yet
    block       t4   mask mask mask                               every row sees the cache and the whole block
    predicts         t5   t6   t7

A matrix and a norm map the states of several target layers to one state. Each layer of the head projects this state to
a key and a value; nothing else is computed for it. The rows of a block leave the cache after the pass.

The whole block is computed even if fewer tokens are drafted, because the head was trained on whole blocks. It has fewer
masks only if the cache has no room for all of them. A row does not know the tokens that other rows draft:
drafting/model/drafter.py describes the draws, and why all verification rules are exact.

The head's folder has config.json and safetensors, as its authors or the `speculators` package write them. If the file
has no embedding or no output head, the head uses the target's.

Memory: the head's weights, and a KV cache of its layers. Cost: two matrices of each layer for each committed token; for
a draft, one pass of the layers with all rows of a block, and the output head for the drafted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import KVCache, ReservationPlan
from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.growth import Drafting, chain_input, fit_vocabulary
from speculant.drafting.heads.folder import BLOCKS, SPECULATORS, HeadFolder, Renamed, require_target
from speculant.drafting.heads.hidden import Encode, HiddenDrafter, HiddenStateRunner
from speculant.drafting.heads.page import (
    ENCODER,
    TOKEN_MAPS,
    HeadPage,
    layer_entries,
    load_head,
    with_own_head,
)
from speculant.drafting.model.drafter import Mask, OnePass
from speculant.drafting.topology import StaticTree, tree_option
from speculant.errors import ConfigError, ModelError, PairError
from speculant.models import (
    POSITIVE,
    CausalLM,
    Chain,
    DecoderConfig,
    Layer,
    SequenceInput,
    StateEntry,
    build_batch,
    count,
    flag,
    number,
    read_windows,
    show,
)
from speculant.sampling import Chances
from speculant.types import DraftTree

KIND = "dflash"
METHOD = Method(default_length=15, uses_model=True, uses_head=True)
USUAL_BLOCK = 16
SCALE = "encoder.norm.weight"
LAYERS, OUTPUTS = "aux_hidden_state_layer_ids", "target_layer_ids"  # keys: layers whose inputs, or outputs, are read
EMBEDDING_SCALE = "input_embedding_scale"
RENAMED: Mapping[str, str | None] = {
    "fc.weight": ENCODER, "hidden_norm.weight": SCALE, "embed_tokens.weight": "embed_tokens",
    **dict.fromkeys(TOKEN_MAPS),
}  # fmt: skip


@dataclass(frozen=True)
class BlockOptions:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain."""

    tree: Any = None


class BlockShape(NamedTuple):
    """A block of `size` rows, the newest token and masks. Row `first` predicts the first drafted token."""

    size: int
    first: int
    mask: int

    @property
    def depth(self) -> int:
        """The most tokens that a block drafts, one after the other."""
        return self.size - self.first

    def input(self, chain: Chain, rows: int, vocab_size: int) -> SequenceInput:
        """Return the input of a block of some rows after a chain's tokens, for a model of `vocab_size` tokens."""
        tokens = [*chain.input_tokens[-1:], *[self.mask] * (rows - 1)]
        return chain_input(chain, tokens, vocab_size, DraftTree.empty(), None)


class BlockRunner(HiddenStateRunner):
    """Follows the target's states, and makes room for blocks. shape: of drafts; None = chains."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        chances: Chances,
        max_num_batched_tokens: int,
        stop_below: float,
        encode: Encode,
        block: BlockShape,
        shape: StaticTree | None,
    ) -> None:
        super().__init__(model, cache, chances, max_num_batched_tokens, stop_below, encode)
        self._block, self._shape = block, shape
        self.rows: Mapping[int, int] = {}  # of each sequence's block in this round

    @override
    def plan(self, drafting: Drafting) -> list[Chain]:
        """Set `limit` to 0 for a sequence without room for a block that is deep enough."""
        chains, plan, rows = super().plan(drafting), ReservationPlan(self.cache), dict[int, int]()
        for chain in chains:
            plan.take(chain.request.seq_id, len(chain.input_tokens))
        for chain in chains:
            if chain.limit:
                seq_id = chain.request.seq_id
                rows[seq_id] = min(self._block.size, plan.room(seq_id))
                chain.limit = self._within(chain.limit, rows[seq_id] - self._block.first)
                plan.take(seq_id, rows[seq_id] if chain.limit else 0)
        self.rows = rows
        return chains

    def _within(self, limit: int, depth: int) -> int:
        """Return how many nodes a draft of this depth may have."""
        if self._shape is None:
            return max(0, min(limit, depth))
        return limit if self._shape.within(limit).depth <= depth else 0


class BlockDrafter(OnePass, HiddenDrafter):
    """Drafts with the head of `runner`; layers: those whose states it reads."""

    _runner: BlockRunner

    def __init__(
        self,
        runner: BlockRunner,
        layers: tuple[int, ...],
        block: BlockShape,
        context: DrafterContext,
        shape: StaticTree | None,
    ) -> None:
        HiddenDrafter.__init__(self, runner, layers, context.target.vocab_size, context.target.sampler, shape)
        nodes = self.needs.max_nodes or block.depth
        self.needs = replace(self.needs, max_nodes=nodes, usual_nodes=nodes)
        self.mask, self.shape, self._block = Mask(block.mask), shape, block

    def _pass(self, chains: Sequence[Chain], depths: Sequence[int]) -> tuple[Tensor, dict[int, int]]:
        """Store the chains' states, then compute a block for each chain that draws.

        Returns the logits [sum of depths, V], and each sequence's first row. Afterwards the blocks leave the cache.
        """
        size = self._runner.model.vocab_size
        self._forward([self.mask.input(chain, 0, size) for chain in chains])
        blocks, first, rows, end = list[SequenceInput](), dict[int, int](), list[int](), 0
        for chain, depth in zip(chains, depths, strict=True):
            seq_id = chain.request.seq_id
            first[seq_id] = len(rows)
            if depth:
                blocks.append(self._block.input(chain, self._runner.rows[seq_id], size))
                rows += range(end + self._block.first, end + self._block.first + depth)
                end += len(blocks[-1].tokens)
        hidden = self._forward(blocks)[rows]
        for chain, depth in zip(chains, depths, strict=True):
            self._runner.note(chain.request, chain.input_tokens)
            if depth:
                self._runner.finish(chain.request)
        return fit_vocabulary(self._runner.model.logits(hidden), self._vocab_size) if rows else hidden, first

    def _forward(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """Return the states [T, hidden] of a pass; of none, no rows."""
        model, cache = self._runner.model, self._runner.cache
        if not inputs:
            return torch.empty(0, self._vocab_size)
        return model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage).last


def build(context: DrafterContext) -> BlockDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, BlockOptions)
    target, shape = require_target(context.target.model), tree_option(context, options.tree)
    folder = HeadFolder.open(str(context.model), KIND)
    layers, block = read_layers(folder, target), read_block(folder, target)
    if shape is not None and shape.depth > block.depth:
        raise ConfigError(
            f"the tree has {shape.depth} levels, and the head in {folder.folder} drafts blocks of {block.depth} tokens",
            "give a tree of at most as many levels.",
        )
    model, encode = load_head(PAGE, folder, target)
    runner = BlockRunner.of(context, model, encode=encode, block=block, shape=shape)
    return BlockDrafter(runner, layers, block, context, shape)


def read_entries(folder: HeadFolder) -> dict[str, Any]:
    """Return the entries of config.json, those within `dflash_config` among them. Raises ModelError."""
    inner = folder.config.get(BLOCKS, {})
    if not isinstance(inner, dict):
        raise ModelError(
            f"config.json in {folder.folder} has a {BLOCKS} that is no object, but {show(inner)}", "correct it."
        )
    return {**folder.config, **inner}


def read_layers(folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the target's layers whose inputs the head takes in."""
    entries = read_entries(folder)
    named, shift = entries.get(LAYERS), 0
    if named is None:
        named, shift = entries.get(OUTPUTS), 1
    size, whole = target.num_layers, isinstance(named, list) and all(type(layer) is int for layer in named)
    if not whole or not named or not all(0 <= layer + shift <= size for layer in named):
        raise PairError(
            f"config.json in {folder.folder} names the target's layers {show(named)}, and the target has {size} layers",
            f"use a head of this target, or name its layers as {LAYERS}: 0 is the embeddings, {size} the last output.",
        )
    return tuple(layer + shift for layer in named)


def read_block(folder: HeadFolder, target: CausalLM) -> BlockShape:
    """Return the size and the mask of a block. Raises ModelError."""
    entries = read_entries(folder)
    size, first = count(entries, "block_size", USUAL_BLOCK), 0 if flag(entries, "sample_from_anchor") else 1
    if size <= first:
        raise ModelError(f"config.json in {folder.folder} has blocks of {size} row, which draft nothing", "correct it.")
    return BlockShape(size, first, folder.check_mask(entries.get("mask_token_id"), "mask_token_id", target))


def with_blocks(sizes: DecoderConfig, weights: Renamed, target: CausalLM) -> DecoderConfig:
    """Return the description with the attention of blocks, the scale of embeddings and the head's own output head.

    Layers with a window are causal within a block unless an entry says otherwise. Windows of the `speculators` package
    are those before the block, for all its rows.
    """
    entries = read_entries(weights.source)
    windows = read_windows(layer_entries(entries, weights.names(), target))
    fixed = SPECULATORS in entries

    def of_blocks(layer: Layer, window: int | None) -> Layer:
        ahead = window is None or flag(entries, "sliding_window_non_causal")
        if entries.get("is_causal") is not None:
            ahead = not flag(entries, "is_causal")
        if window is not None and fixed:
            return layer.attending(ahead=ahead, window=window + 1, fixed_window=True)
        return layer.attending(ahead=ahead)

    embedding = replace(sizes.embedding, scale=number(entries, EMBEDDING_SCALE, 1.0, *POSITIVE))
    described = replace(sizes, embedding=embedding, layers=tuple(map(of_blocks, sizes.layers, windows)))
    return with_own_head(described, weights, target)


PAGE = HeadPage(
    KIND,
    StateEntry.CONTEXT,
    lambda name: RENAMED.get(name, name),
    read_layers,
    with_blocks,
    norms=lambda folder, target, hidden: {SCALE: (hidden,)},
    norm_after=True,
)
