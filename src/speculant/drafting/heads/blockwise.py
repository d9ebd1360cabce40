"""Blockwise parallel decoding: a feed-forward block on the target's last hidden state for each further token.

Stern, Shazeer and Uszkoreit, "Blockwise Parallel Decoding for Deep Autoregressive Models", 2018. All heads share the
target's output head. A draft is a chain of one token of each head; sampled requests draw it from their distributions.

Memory: one state per sequence, and the heads' weights. Cost: the blocks, and the output head for one row per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from speculant.drafting.base import DrafterContext, Method, read_options, require_no_stop
from speculant.drafting.heads.folder import HeadFolder, HeadParts, Part, Role, renamed, require_target
from speculant.drafting.heads.future import MOST_HEADS, FutureDrafter
from speculant.drafting.heads.short import short_heads, short_tokens
from speculant.drafting.topology import StaticTree
from speculant.models import CausalLM, FeedForwardHeads, FutureShape, PlacedHeads, count

KIND = "blockwise"
METHOD = Method(default_length=3, uses_model=True, uses_head=True)
HEAD = HeadParts({
    r"heads\.\d+\.up\.weight": Part(Role.READER),
    r"heads\.\d+\.up\.bias": Part(Role.READER_BIAS),
    r"heads\.\d+\.down\.weight": Part(Role.WRITER),
    r"heads\.\d+\.down\.bias": Part(Role.STATE),
})  # fmt: skip


@dataclass(frozen=True)
class BlockwiseOptions:
    """head_tokens: the file of a short output head, see drafting/heads/short.py; None = the folder's, or all tokens."""

    head_tokens: Any = None


def build(context: DrafterContext) -> FutureDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, BlockwiseOptions)
    require_no_stop(context)
    target = require_target(context.target.model)
    folder = HeadFolder.open(str(context.model), KIND)
    heads, tokens = load(folder, target), short_tokens(options.head_tokens, folder, target)
    chain = StaticTree.of_widths([1] * heads.shape.num_heads)
    own_heads = short_heads(target, tokens) if tokens else None
    return FutureDrafter(heads, target, context.chances, chain, context.target.sampler, own_heads)


def load(folder: HeadFolder, target: CausalLM) -> PlacedHeads:
    """Read the heads."""
    folder.check_sizes(target)
    num_heads, inner = count(folder.config, "num_heads", most=MOST_HEADS), count(folder.config, "inner_size")
    with torch.device("meta"):  # heads that do not fit take no memory
        heads = FeedForwardHeads(FutureShape(num_heads, target.hidden_size, inner=inner))
    renamed(folder).check(heads.stored(), KIND)
    heads.to_empty(device="cpu")
    heads.load({name: folder.read(name) for name in folder.names()})
    return heads.on(target)
