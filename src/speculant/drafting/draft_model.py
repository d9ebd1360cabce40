"""A small model that drafts a chain token by token [000, 001 D3, 002 algorithm 1].

Its cache holds what was fed: committed tokens, and the last round's drafts. What turned out
differently is rolled back and what is missing is fed in the next `propose`:

    fed        p p p t t x x x          x = the drafts of the last round
    tokens     p p p t t x y            y = the target's correction
    keep       p p p t t x              the longest common prefix; then feed y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.drafting.base import DrafterContext, DrafterNeeds, Method, no_options
from speculant.models.base import CausalLM, Feed, build_batch
from speculant.sampling.chance import Chance, Chances
from speculant.sampling.distribution import Node, distribution
from speculant.types import DraftTree, Request

METHOD = Method(default_length=5, uses_model=True, preferred=True)  # seed 001 D8


@dataclass
class _Fed:
    """What one sequence's cache holds; the first `agreed` tokens are known to be committed."""

    tokens: list[int] = field(default_factory=list)
    agreed: int = 0


class _Draft:
    """One sequence's chain while it grows."""

    def __init__(self, request: Request, limit: int, chance: Chance) -> None:
        self.request, self.limit, self.chance = request, limit, chance
        self.tokens: list[int] = []
        self.laws: list[Tensor] = []

    @property
    def wants_more(self) -> bool:
        return len(self.tokens) < self.limit

    def tree(self) -> DraftTree:
        if not self.tokens:
            return DraftTree.empty()
        return DraftTree.chain(self.tokens, None if self.request.coupled else torch.stack(self.laws))


class ModelDrafter:
    """Drafts with `model`, all sequences of a round side by side in one flat batch.

    vocab_size is the target's: padded rows of either head are cut or filled up with zeros.
    A backlog beyond max_num_batched_tokens is caught up over several rounds, without drafting.
    """

    def __init__(
        self, model: CausalLM, cache: KVCache, chances: Chances, vocab_size: int, max_num_batched_tokens: int
    ) -> None:
        self.needs = DrafterNeeds(emits_probs=True, own_cache=True, max_positions=model.max_positions)
        self.cache = cache
        self._model, self._chances = model, chances
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
        drafts = [_Draft(seq, limit, self._chances.draft(seq)) for seq, limit in zip(seqs, limits, strict=True)]
        growing = self._catch_up([draft for draft in drafts if draft.limit > 0])
        while growing:
            growing = self._extend(growing)
        return [draft.tree() for draft in drafts]

    def _catch_up(self, drafts: list[_Draft]) -> list[_Draft]:
        """Feed what the cache has not seen, as far as budget and memory go; draw a token where that was everything."""
        for draft in drafts:
            self._roll_back(draft.request)
        feeds, budget, plan = [], self._budget, self.cache.plan()
        for draft in drafts:
            seq, start = draft.request.seq, len(self._fed[draft.request.seq].tokens)
            missing = draft.request.tokens[start : start + min(budget, plan.room(seq))]
            plan.take(seq, len(missing))
            budget -= len(missing)
            feeds.append(missing)
        ready = [
            draft
            for draft, feed in zip(drafts, feeds, strict=True)
            if len(self._fed[draft.request.seq].tokens) + len(feed) == len(draft.request.tokens)
        ]
        return self._grow(drafts, feeds, ready)

    def _extend(self, drafts: list[_Draft]) -> list[_Draft]:
        """Feed each draft's newest token and draw the next; a draft that finds no memory stays as long as it is."""
        plan, growing = self.cache.plan(), list[_Draft]()
        for draft in drafts:
            if plan.room(draft.request.seq):
                plan.take(draft.request.seq, 1)
                growing.append(draft)
        return self._grow(growing, [draft.tokens[-1:] for draft in growing], growing)

    def _grow(self, drafts: list[_Draft], feeds: list[list[int]], ready: list[_Draft]) -> list[_Draft]:
        """Feed each draft's tokens, draw for the ready ones, and return those that want more."""
        fed = [(draft, feed) for draft, feed in zip(drafts, feeds, strict=True) if feed]
        if not fed:
            return []
        hidden = self._feed([(draft.request, feed) for draft, feed in fed])
        rows = [i for i, (draft, _) in enumerate(fed) if draft in ready]
        if rows:
            self._draw([fed[i][0] for i in rows], hidden[rows])
        return [draft for draft in ready if draft.wants_more]

    def _feed(self, feeds: list[tuple[Request, list[int]]]) -> Tensor:
        """Run one pass and return the hidden state of each sequence's last row."""
        batch = build_batch(
            [Feed(request.seq, self._known(tokens), DraftTree.empty()) for request, tokens in feeds],
            self.cache,
            self._model.cache_shape.device,
        )
        hidden = self._model.forward(batch, self.cache)
        last = -1
        rows = [last := last + len(tokens) for _, tokens in feeds]
        for request, tokens in feeds:
            self._fed[request.seq].tokens += tokens
        return hidden[rows]

    def _known(self, tokens: list[int]) -> list[int]:
        """Replace tokens beyond the draft's own vocabulary by its first one: any guess is legal, no lookup is."""
        return [token if token < self._model.vocab_size else 0 for token in tokens]

    def _draw(self, drafts: list[_Draft], hidden: Tensor) -> None:
        logits = fit_vocabulary(self._model.logits(hidden), self._vocab_size)
        laws = distribution(logits, [Node(draft.request, draft.tokens) for draft in drafts])
        for draft, law in zip(drafts, laws, strict=True):
            draft.tokens = [*draft.tokens, draft.chance.draw(law)]
            draft.laws.append(law)

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


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad logits [r, v] to [r, vocab_size]; padding is impossible to draw."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


def build(context: DrafterContext) -> ModelDrafter:
    """Load the draft checkpoint and give it a cache of its own."""
    no_options(context)
    model = context.load_draft(str(context.model))
    cache = context.make_cache(model.cache_shape)
    return ModelDrafter(model, cache, context.chances, context.vocab_size, context.max_num_batched_tokens)
