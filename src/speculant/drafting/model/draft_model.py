"""A small model that drafts a chain token by token (arXiv 2211.17192), or a tree level by level (arXiv 2305.09781).

For a beam search it drafts continuations of the target's beams, with a wider beam (arXiv 2211.17192, A.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculant.cache.base import KVCache
from speculant.drafting.base import DrafterContext, Method, read_options, require_no_stop
from speculant.drafting.model.head_tokens import read_head_tokens
from speculant.drafting.model.runner import DraftModelRunner
from speculant.drafting.model.tree_drafter import TreeDrafter
from speculant.drafting.topology import TreeTopology
from speculant.drafting.tree_option import read_tree as read_tree
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM
from speculant.sampling.chance import Chances

METHOD = Method(default_length=5, uses_model=True, preferred=True)  # docs/references.md, configuration


@dataclass(frozen=True)
class Options:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain.

    head_tokens: the file of a short head, see drafting/model/head_tokens.py; None = all tokens can be drawn.
    """

    tree: Any = None
    head_tokens: Any = None


class ModelDrafter(TreeDrafter):
    """Drafts chains, or trees of a topology, with a draft model; see `ChainDrafter`. topology None = chains."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        chances: Chances,
        vocab_size: int,
        max_num_batched_tokens: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | None = None,
        stop_below: float = 0.0,
    ) -> None:
        runner = DraftModelRunner(model, cache, chances, max_num_batched_tokens, stop_below)
        super().__init__(runner, vocab_size, sampler, topology)


def build(context: DrafterContext) -> ModelDrafter:
    """Load the draft checkpoint and give it a cache of its own."""
    options = read_options(context, Options)
    topology = read_tree(options.tree)
    if topology is not None:
        require_no_stop(context)
    model = context.load_draft(str(context.model), read_head_tokens(options.head_tokens))
    cache = context.make_cache(model.cache_shape)
    return ModelDrafter(
        model,
        cache,
        context.chances,
        context.vocab_size,
        context.max_num_batched_tokens,
        context.sampler,
        topology,
        context.stop_below,
    )
