"""Stand-ins that tell what they see: table models that work through the cache, scripted drafters, a rig."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, KVCache
from speculant.cache.slotted import SlottedKVCache
from speculant.config import Limits
from speculant.drafting.base import Drafter, DrafterNeeds
from speculant.drafting.draft_model import ModelDrafter
from speculant.engine.build import load_rules
from speculant.engine.engine import Engine, EngineOptions
from speculant.models.attention import visible_keys
from speculant.models.base import Batch
from speculant.params import SamplingParams
from speculant.sampling.chance import Chances, KeyedChances
from speculant.scheduling.draft_length import Fixed
from speculant.types import DraftTree, Request, StepOutput, StopWatch
from speculant.verification.base import Verifier

History = tuple[int, ...]
Table = Callable[[History], Sequence[float]]  # all tokens so far -> logits of the next

ROOMY = Limits(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=32)


class TableModel:
    """A `CausalLM` whose next token's logits are a function of the whole prefix, read back from the cache.

    A position's key is its token and its value is its place. Each row gathers what it may see and
    asserts that this is a whole prefix, in order, that ends with the row's own token: stale rows, a
    wrong truncation or a neighbour's slot give an error here, or another history and so another law.
    """

    def __init__(self, table: Table, vocab_size: int, max_positions: int = 1024) -> None:
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.cache_shape = CacheShape(1, 1, 1, torch.float64, torch.device("cpu"))
        self.num_rows: list[int] = []  # of each pass
        self._table = table
        self._known: dict[History, Tensor] = {}

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """See `CausalLM.forward`; the hidden states are the logits themselves."""
        assert int(batch.positions.max()) < self.max_positions, "beyond the model's positions"
        cache.write(0, batch.rows, _column(batch.tokens), _column(batch.positions))
        self.num_rows.append(len(batch.tokens))
        return torch.stack([self._logits(history) for history in _histories(batch, cache)])

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return hidden

    def _logits(self, history: History) -> Tensor:
        if history not in self._known:
            self._known[history] = torch.tensor(self._table(history), dtype=torch.float64)
        return self._known[history]


def _column(values: Tensor) -> Tensor:
    return values.to(torch.float64)[:, None, None]


def _histories(batch: Batch, cache: KVCache) -> Iterator[History]:
    first = 0
    for segment in batch.segments:
        rows = slice(first, first + segment.num_rows)
        first = rows.stop
        visible = visible_keys(segment, batch.positions[rows], None).tolist()
        tokens, places = (part.flatten().tolist() for part in cache.read(0, segment.slots.seq))
        for own, position, mask in zip(
            batch.tokens[rows].tolist(), batch.positions[rows].tolist(), visible, strict=True
        ):
            seen = [key for key, is_visible in enumerate(mask) if is_visible]
            assert [places[key] for key in seen] == list(range(position + 1)), "not a whole prefix in order"
            assert tokens[seen[-1]] == own, "the row does not see itself last"
            yield tuple(int(tokens[key]) for key in seen)


class ScriptedDrafter:
    """Proposes whatever a function of the request says, within the limit: a chain of tokens or a tree."""

    def __init__(
        self, propose: Callable[[Request], Sequence[int] | DraftTree], needs: DrafterNeeds | None = None
    ) -> None:
        self.needs = needs or DrafterNeeds()
        self._propose = propose

    def begin(self, seq: Request) -> None:
        """See `Drafter.begin`."""

    def propose(self, seqs: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        return [self._propose_one(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose_one(self, seq: Request, limit: int) -> DraftTree:
        proposal = self._propose(seq)
        if not isinstance(proposal, DraftTree):
            return DraftTree.chain(list(proposal)[:limit])
        return proposal if proposal.size <= limit else DraftTree.empty()

    def observe(self, seq: Request, committed: Sequence[int], hidden: Tensor | None = None) -> None:
        """See `Drafter.observe`."""

    def end(self, seq: Request) -> None:
        """See `Drafter.end`."""


def always_right(continuation: Callable[[Request], Sequence[int]]) -> ScriptedDrafter:
    """Propose what a request will really say; `continuation` knows its whole output."""
    return ScriptedDrafter(lambda request: continuation(request)[request.num_output :])


def never_right(continuation: Callable[[Request], Sequence[int]], vocab_size: int) -> ScriptedDrafter:
    """Propose another token than the request will say, everywhere."""
    return ScriptedDrafter(
        lambda request: [(token + 1) % vocab_size for token in continuation(request)[request.num_output :]]
    )


def sometimes_right(continuation: Callable[[Request], Sequence[int]], vocab_size: int) -> ScriptedDrafter:
    """Propose what the request will say, but for every third token."""
    return ScriptedDrafter(
        lambda request: [
            (token + (place % 3 == 2)) % vocab_size
            for place, token in list(enumerate(continuation(request)))[request.num_output :]
        ]
    )


class WatchedCache(SlottedKVCache):
    """A cache that remembers which tokens a table model had stored for a sequence when it was released."""

    def __init__(self, shape: CacheShape, limits: Limits) -> None:
        super().__init__(shape, limits.max_num_seqs, limits.max_model_len)
        self.num_positions = self.free_tokens()
        self.released: dict[int, list[int]] = {}

    def release(self, seq: int) -> None:
        """See `KVCache.release`."""
        if self.length(seq):
            self.released[seq] = [int(token) for token in self.read(0, seq)[0].flatten().tolist()]
        super().release(seq)


@dataclass
class Rig:
    """An engine over fakes, within reach of the test: every step checks the invariants of its parts."""

    engine: Engine
    cache: WatchedCache
    drafter: Drafter | None = None
    requests: list[Request] = field(default_factory=list)  # all that are not over

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str = "r",
        watch: Callable[[], StopWatch] | None = None,
    ) -> list[Request]:
        """Queue a prompt; return its sequences."""
        added = self.engine.add_request(prompt, params, request_id, watch)
        self.requests += added
        return added

    def abort(self, request_id: str) -> None:
        """End a request at once."""
        self.engine.abort(request_id)

    def step(self) -> list[StepOutput]:
        """Run one step, then check what must hold between steps."""
        outputs = self.engine.step()
        self.engine.check()
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.cache.check()
        for request in self.requests:
            self._check_held(request)
        self.requests = [request for request in self.requests if not request.finished]
        return outputs

    def _check_held(self, request: Request) -> None:
        """The cache holds, and held until the end, all tokens but the newest."""
        if request.finish_reason == "abort" or request.num_output == 0:
            return
        if request.finished:
            assert self.cache.released[request.seq] == request.tokens[:-1], "something behind the end was kept"
        else:
            assert self.cache.length(request.seq) == len(request.tokens) - 1, "all but the newest token are held"

    def finish(self) -> list[StepOutput]:
        """Step until no request is left; return all outputs. Then every slot must be free again."""
        outputs = []
        while self.engine.has_unfinished():
            outputs += self.step()
        caches = [self.cache, *([self.drafter.cache] if isinstance(self.drafter, ModelDrafter) else [])]
        assert all(cache.free_tokens() == self.cache.num_positions for cache in caches), "a slot was not given back"
        return outputs


def build_rig(
    target: TableModel,
    drafter: Drafter | None = None,
    *,
    length: int = 0,
    verification: str = "auto",
    chances: Chances | None = None,
    limits: Limits = ROOMY,
    ends: frozenset[int] = frozenset(),
    seed: int = 0,
) -> Rig:
    """Put the real engine together around fakes; `length` is the number of draft nodes."""
    cache = WatchedCache(target.cache_shape, limits)
    options = EngineOptions(limits, seed, ends, verification)
    engine = Engine(options, target, cache, chances or KeyedChances(), known_rules(), Fixed(length), drafter)
    return Rig(engine, cache, drafter)


@functools.cache
def known_rules() -> dict[str, Verifier]:
    """Return every verification rule; looked up once, for they have no state."""
    return load_rules()


def model_drafter(
    draft: TableModel, vocab_size: int, chances: Chances | None = None, limits: Limits = ROOMY
) -> ModelDrafter:
    """Make the real drafter around a table model, with a cache of its own."""
    cache = SlottedKVCache(draft.cache_shape, limits.max_num_seqs, limits.max_model_len)
    return ModelDrafter(draft, cache, chances or KeyedChances(), vocab_size, limits.max_num_batched_tokens)
