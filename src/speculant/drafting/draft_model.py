"""A small model that drafts a chain token by token [000, 001 D3, 002 algorithm 1], or a tree level by level [003].

Where the target keeps beams it searches ahead of them, with more beams [002 A.4].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from speculant.cache.base import KVCache
from speculant.drafting.base import DrafterContext, DrafterNeeds, Method, read_options
from speculant.errors import ConfigError
from speculant.kernels.native import Kernels
from speculant.models.base import CausalLM
from speculant.models.beams import draft_beams
from speculant.models.branching import Branching, Shape
from speculant.models.chains import grow
from speculant.models.follower import Follower
from speculant.models.trees import grow_trees, plan_trees
from speculant.sampling.chance import Chances
from speculant.types import DraftTree, Request

METHOD = Method(default_length=5, uses_model=True, preferred=True)  # seed 001 D8
NODES_PER_BEAM = 2


@dataclass(frozen=True)
class Options:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain."""

    tree: Any = None


class ModelDrafter:
    """Drafts with `model`, all sequences of a round side by side in one flat batch.

    vocab_size is the target's: padded rows of either head are cut or filled up with zeros. branching None = chains.
    max_num_batched_tokens bounds what is caught up in a round.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        chances: Chances,
        vocab_size: int,
        max_num_batched_tokens: int,
        kernels: Kernels | None = None,
        branching: Branching | None = None,
    ) -> None:
        nodes = branching.most_nodes if branching else None
        self.needs = DrafterNeeds(
            max_nodes=nodes,
            emits_probs=True,
            emits_tree=branching is not None,
            usual_nodes=nodes,
            own_cache=True,
            max_positions=model.max_positions,
            nodes_per_beam=NODES_PER_BEAM,
        )
        self._follower = Follower(model, cache, chances, max_num_batched_tokens)
        self._branching, self._vocab_size, self._kernels = branching, vocab_size, kernels

    @property
    def cache(self) -> KVCache:
        """The draft model's own cache."""
        return self._follower.cache

    def begin(self, seq: Request) -> None:
        """See `Drafter.begin`."""
        self._follower.begin(seq)

    def end(self, seq: Request) -> None:
        """See `Drafter.end`."""
        self._follower.end(seq)

    def observe(self, seq: Request, committed: Sequence[int], hidden: Tensor | None = None) -> None:
        """See `Drafter.observe`; the next `propose` looks at the tokens itself."""

    def propose(self, seqs: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        drafting = [(seq, limit) for seq, limit in zip(seqs, limits, strict=True) if limit > 0]
        others = [(seq, limit) for seq, limit in drafting if seq.beams is None]
        made = self._grow_chains(others) if self._branching is None else self._grow_trees(others, self._branching)
        if len(others) < len(drafting):
            made |= self._search([(seq, limit) for seq, limit in drafting if seq.beams is not None])
        return [made.get(seq.seq, DraftTree.empty()) for seq in seqs]

    def _grow_chains(self, drafting: Sequence[tuple[Request, int]]) -> dict[int, DraftTree]:
        follower = self._follower
        chains = follower.plan(drafting)
        grow(follower.model, chains, follower.cache, self._vocab_size, self._kernels)
        for chain in chains:
            follower.note(chain.request, [*chain.feed, *chain.tokens[:-1]])
        return {chain.request.seq: DraftTree.chain(chain.tokens, chain.laws) for chain in chains if chain.tokens}

    def _grow_trees(self, drafting: Sequence[tuple[Request, int]], branching: Branching) -> dict[int, DraftTree]:
        trees = plan_trees([self._follower], drafting)
        grow_trees([self._follower], trees, branching, self._vocab_size, self._kernels)
        return {tree.request.seq: tree.draft() for tree in trees if tree.tokens}

    def _search(self, drafting: Sequence[tuple[Request, int]]) -> dict[int, DraftTree]:
        """Search ahead of the target's beams, no deeper than other trees are."""
        if self._branching is not None:
            level = NODES_PER_BEAM * self._branching.depth
            drafting = [(seq, min(limit, level * seq.beams.width)) for seq, limit in drafting if seq.beams]
        return draft_beams(self._follower, drafting, NODES_PER_BEAM, self._vocab_size, self._kernels)


def build(context: DrafterContext) -> ModelDrafter:
    """Load the draft checkpoint and give it a cache of its own."""
    branching = read_tree(read_options(context, Options).tree)
    model = context.load_draft(str(context.model))
    cache = context.make_cache(model.cache_shape)
    return ModelDrafter(
        model, cache, context.chances, context.vocab_size, context.max_num_batched_tokens, context.kernels, branching
    )


def read_tree(given: Any) -> Shape | None:
    """Read the option `tree`; None stays None."""
    if given is None:
        return None
    error = ConfigError(
        f"tree={given!r} is not the shape of a tree",
        "give children per node at each depth, as [3, 2, 1], or every node's ranks, parents among them: [[0], [0, 0]].",
    )
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise error
    if all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in given):
        return Shape.of_widths(given)
    if not all(isinstance(path, list | tuple) and path and all(_is_rank(rank) for rank in path) for path in given):
        raise error
    shape = Shape(frozenset(tuple(path) for path in given))
    if not shape.is_whole():
        raise error
    return shape


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
