"""A small model that drafts a chain token by token [000, 001 D3, 002 algorithm 1], or a tree level by level [003 2.1].

Its cache holds what was fed: committed tokens, and the last round's drafts. What turned out
differently is rolled back and what is missing is fed in the next `propose`:

    fed        p p p t t x x x          x = the drafts of the last round
    tokens     p p p t t x y            y = the target's correction
    keep       p p p t t x              the longest common prefix; then feed y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from speculant.cache.base import KVCache
from speculant.drafting.base import DrafterContext, DrafterNeeds, Method, read_options
from speculant.errors import ConfigError
from speculant.kernels.native import Kernels
from speculant.models.base import CausalLM, Chain
from speculant.models.chains import grow
from speculant.models.trees import Branching, Shape, Tree, grow_trees
from speculant.sampling.chance import Chances
from speculant.types import DraftTree, Request

METHOD = Method(default_length=5, uses_model=True, preferred=True)  # seed 001 D8


@dataclass(frozen=True)
class Options:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain."""

    tree: Any = None


@dataclass
class _Fed:
    """What one sequence's cache holds; the first `agreed` tokens are known to be committed."""

    tokens: list[int] = field(default_factory=list)
    agreed: int = 0


class ModelDrafter:
    """Drafts with `model`, all sequences of a round side by side in one flat batch.

    vocab_size is the target's: padded rows of either head are cut or filled up with zeros.
    A backlog beyond max_num_batched_tokens is caught up over several rounds, without drafting. branching None = chains.
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
        )
        self._branching = branching
        self.cache = cache
        self._model, self._chances, self._kernels = model, chances, kernels
        self._vocab_size, self._budget = vocab_size, max_num_batched_tokens
        self._fed: dict[int, _Fed] = {}

    def begin(self, seq: Request) -> None:
        """See `Drafter.begin`; nothing is fed before the first draft (lazy prefill, seed 001)."""
        self._fed[seq.seq] = _Fed()

    def end(self, seq: Request) -> None:
        """See `Drafter.end`."""
        self._fed.pop(seq.seq, None)
        self.cache.release(seq.seq)

    def observe(self, seq: Request, committed: Sequence[int], hidden: Tensor | None = None) -> None:
        """See `Drafter.observe`; the next `propose` looks at the tokens itself."""

    def propose(self, seqs: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        drafting = [(seq, limit) for seq, limit in zip(seqs, limits, strict=True) if limit > 0]
        for seq, _ in drafting:
            self._roll_back(seq)
        chains = self._plan(drafting)
        made = self._grow_chains(chains) if self._branching is None else self._grow_trees(chains, self._branching)
        return [made.get(seq.seq, DraftTree.empty()) for seq in seqs]

    def _grow_chains(self, chains: Sequence[Chain]) -> dict[int, DraftTree]:
        grow(self._model, chains, self.cache, self._vocab_size, self._kernels)
        for chain in chains:
            self._fed[chain.request.seq].tokens += [*chain.feed, *chain.tokens[:-1]]
        return {chain.request.seq: _tree(chain) for chain in chains if chain.tokens}

    def _grow_trees(self, chains: Sequence[Chain], branching: Branching) -> dict[int, DraftTree]:
        """Draw a tree where there would be a chain; its nodes do not stay in the cache."""
        trees = [Tree(chain.request, chain.feed, chain.limit, chain.chance) for chain in chains]
        if trees:
            grow_trees(self._model, trees, branching, self.cache, self._vocab_size, self._kernels)
        for tree in trees:
            self._fed[tree.request.seq].tokens += tree.feed
        return {tree.request.seq: tree.draft() for tree in trees if tree.tokens}

    def _plan(self, drafting: Sequence[tuple[Request, int]]) -> list[Chain]:
        """Decide what is fed and drawn, as far as budget and memory go; a chain that finds none ends sooner."""
        budget, plan, chains = self._budget, self.cache.plan(), list[Chain]()
        for request, limit in drafting:
            start = len(self._fed[request.seq].tokens)
            missing = request.tokens[start : start + min(budget, plan.room(request.seq))]
            plan.take(request.seq, len(missing))
            budget -= len(missing)
            ready = start + len(missing) == len(request.tokens)
            if missing:
                chains.append(Chain(request, missing, limit if ready else 0, self._chances.draft(request)))
        growing = [chain for chain in chains if chain.limit > 1]
        for length in range(1, max((limit for _, limit in drafting), default=0)):  # a position each, in turn
            for chain in growing:
                if plan.room(chain.request.seq):
                    plan.take(chain.request.seq, 1)
                else:
                    chain.limit = length
            growing = [chain for chain in growing if chain.limit > length + 1]
        return chains

    def _roll_back(self, request: Request) -> None:
        """Drop what was fed and then not committed, or reserved by a pass that failed; feed the newest token anew.

        A sequence that begins takes over what others fed of its tokens.
        """
        fed = self._fed[request.seq]
        if not fed.tokens and not self.cache.length(request.seq):
            self.cache.release(request.seq)
            fed.tokens = request.tokens[: self.cache.adopt_prefix(request.seq, request.tokens, request.salt)]
        keep = fed.agreed
        while keep < min(len(fed.tokens), len(request.tokens) - 1) and fed.tokens[keep] == request.tokens[keep]:
            keep += 1
        fed.agreed = keep
        del fed.tokens[keep:]
        if keep < self.cache.length(request.seq):
            self.cache.truncate_to(request.seq, keep)
        self.cache.index_prefix(request.seq, request.tokens)


def _tree(chain: Chain) -> DraftTree:
    """Return what a chain drew, up to the first law that is no law: the model failed there."""
    if chain.request.coupled or chain.laws is None:
        return DraftTree.chain(chain.tokens)
    sound = chain.laws.sum(-1).isfinite().tolist()
    size = sound.index(False) if False in sound else len(sound)
    return DraftTree.chain(chain.tokens[:size], chain.laws[:size])


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
