"""Stand-ins that record their calls: scripted drafters, caches, and a rig around table models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from speculant.cache import CacheShape, KVCache, paged_cache, slotted_cache
from speculant.config import Limits
from speculant.constraints import Constraint
from speculant.drafting import (
    Drafter,
    DrafterContext,
    DrafterNeeds,
    Drafters,
    DraftModelRunner,
    DraftModels,
    ModelDrafter,
    StatelessDrafter,
    Target,
    TreeTopology,
)
from speculant.engine import Engine, EngineOptions, Learning, load_verifiers
from speculant.kernels import REFERENCE, Sampler
from speculant.lab.exactness import TableModel
from speculant.lengths import DraftLength, Fixed
from speculant.models import CausalLM
from speculant.params import SamplingParams
from speculant.sampling import Chances, KeyedChances
from speculant.types import ANYONE, NO_WORK, Client, DraftTree, Request, StepOutput, StopChecker
from speculant.verification import Verifier
from tests.beams import is_fed
from tests.caches import read

MakeCache = Callable[[CacheShape, Limits], KVCache]

BLOCK = 4  # positions in a block of the paged caches
MANY_STEPS = 10_000
ROOMY = Limits(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=32)


def never(*arguments: object) -> Any:
    """Load or make nothing."""
    raise AssertionError("nothing is loaded")


def drafter_context(
    vocab_size: int,
    options: Mapping[str, Any] | None = None,
    model: str | None = None,
    *,
    load: Callable[..., CausalLM] = never,
    make_cache: Callable[[CacheShape], KVCache] = never,
    target: CausalLM | None = None,
    target_cache: Callable[[], KVCache | None] = lambda: None,
    chances: Chances | None = None,
    sampler: Sampler = REFERENCE,
    budget: int = 64,
) -> DrafterContext:
    """Return the context that a drafter is built from, on the CPU."""
    known = Target(vocab_size, torch.device("cpu"), sampler, target, cache=target_cache)
    chances = KeyedChances(sampler) if chances is None else chances
    return DrafterContext(options or {}, model, known, DraftModels(load), make_cache, chances, budget)


class ScriptedDrafter(StatelessDrafter):
    """Proposes the result of a function of the request, within the limit: a chain of tokens or a tree."""

    def __init__(
        self, propose: Callable[[Request], Sequence[int] | DraftTree], needs: DrafterNeeds | None = None
    ) -> None:
        self.needs = needs or DrafterNeeds()
        self._propose = propose

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        return [self._propose_one(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _propose_one(self, request: Request, limit: int) -> DraftTree:
        proposal = self._propose(request)
        if not isinstance(proposal, DraftTree):
            return DraftTree.chain(list(proposal)[:limit])
        return proposal if proposal.size <= limit else DraftTree.empty()


def always_right(continuation: Callable[[Request], Sequence[int]]) -> ScriptedDrafter:
    """Propose a request's real continuation; `continuation` gives its whole output."""
    return ScriptedDrafter(lambda request: continuation(request)[request.num_output :])


def never_right(continuation: Callable[[Request], Sequence[int]], vocab_size: int) -> ScriptedDrafter:
    """Propose a wrong token everywhere."""
    return ScriptedDrafter(
        lambda request: [(token + 1) % vocab_size for token in continuation(request)[request.num_output :]]
    )


def sometimes_right(continuation: Callable[[Request], Sequence[int]], vocab_size: int) -> ScriptedDrafter:
    """Propose the request's real continuation, except for every third token."""
    return ScriptedDrafter(
        lambda request: [
            (token + (place % 3 == 2)) % vocab_size
            for place, token in list(enumerate(continuation(request)))[request.num_output :]
        ]
    )


def slotted(shape: CacheShape, limits: Limits) -> KVCache:
    """Make a cache of one slot for each sequence."""
    return slotted_cache(shape, limits.max_num_seqs, limits.max_model_len)


def paged(shape: CacheShape, limits: Limits) -> KVCache:
    """Make a cache of small blocks, with enough for every sequence."""
    return paged_cache(shape, limits.max_num_seqs * -(-limits.max_model_len // BLOCK), BLOCK)


def few_blocks(num_blocks: int, keep_prefixes: bool = True) -> MakeCache:
    """Return a maker of caches with this number of small blocks, too few for all sequences."""
    return lambda shape, limits: paged_cache(shape, num_blocks, BLOCK, keep_prefixes)


both_caches = pytest.mark.parametrize("cache", [paged, slotted], ids=lambda make: make.__name__)


def stored_tokens(cache: KVCache, request: int) -> list[int]:
    """Return the tokens that a table model stored for a sequence, in order."""
    return [int(token) for token in read(cache, 0, request)[0].flatten().tolist()]


def watch_releases(cache: KVCache) -> dict[int, list[int]]:
    """Note from now on which tokens each sequence held when it was released."""
    released: dict[int, list[int]] = {}
    release = cache.release

    def noting(seq_id: int) -> None:
        released.update({seq_id: stored_tokens(cache, seq_id)} if cache.length(seq_id) else {})
        release(seq_id)

    cache.release = noting
    return released


@dataclass
class Rig:
    """An engine over fakes, within reach of the test: every step checks the invariants of its parts.

    A request's error is raised, for it may be an assertion of a fake, unless it is of the `expected` kind. An error
    of the drafter fails the test unless `drafter_may_fail`, one of a step that fails for no sequence alone unless
    `pass_may_fail`.
    """

    engine: Engine
    caches: tuple[KVCache, ...]  # the target's, then the drafter's
    released: dict[int, list[int]]
    requests: list[Request] = field(default_factory=list)  # all that are not over
    expected: type[Exception] | tuple[()] = ()
    drafter_may_fail: bool = False
    pass_may_fail: bool = False

    @property
    def cache(self) -> KVCache:
        """The target's cache."""
        return self.caches[0]

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str = "r",
        stop_checker: Callable[[], StopChecker] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        constraint: Callable[[], Constraint] | None = None,
        client: Client = ANYONE,
        source: Sequence[int] = (),
    ) -> list[Request]:
        """Queue a prompt; return its sequences. How a step is divided does not depend on measured time."""
        added = self.engine.add_request(
            prompt,
            params,
            request_id,
            stop_checker,
            priority=priority,
            cache_salt=cache_salt,
            constraint=constraint,
            client=client,
            source=source,
        )
        for request in added:
            request.work = NO_WORK
        self.requests += added
        return added

    def abort(self, request_id: str) -> None:
        """End a request at once."""
        self.engine.abort(request_id)

    def step(self) -> list[StepOutput]:
        """Run one step, then check the invariants that hold between steps."""
        outputs = self.engine.step()
        self.engine.check()
        metrics = self.engine.metrics
        assert self.drafter_may_fail or not metrics.drafter_errors, "the drafter failed; see the log"
        assert self.pass_may_fail or not metrics.transient_errors, "a step failed, but for no sequence alone"
        gained = {(output.request_id, output.index) for output in outputs if output.token is not None}
        for request in self.requests:
            if request.ending.error is not None and not isinstance(request.ending.error, self.expected):
                raise request.ending.error
            if is_fed(request):
                self._check_held(request, (request.request_id, request.index) in gained)
        self.requests = [request for request in self.requests if not request.finished]
        return outputs

    def _check_held(self, request: Request, has_gained: bool) -> None:
        """The cache holds, or held at the end, all tokens but the newest; fewer while it catches up with them.

        A beam search gains its tokens when it is over, and held what they have in common with what was fed last.
        """
        if request.ending.reason in ("abort", "error"):
            return
        held = self.released[request.seq_id] if request.finished else stored_tokens(self.cache, request.seq_id)
        assert held == request.tokens[: len(held)], "something was kept that was not committed"
        assert len(held) < len(request.tokens), "the newest token was fed"
        catching_up = not has_gained or request.search is not None
        assert len(held) == len(request.tokens) - 1 or catching_up, "a committed token was dropped"

    def finish(self) -> list[StepOutput]:
        """Step until no request is left; return all outputs. Then all memory must be free again."""
        outputs = []
        for _ in range(MANY_STEPS):
            if not self.engine.has_unfinished():
                break
            outputs += self.step()
        assert not self.engine.has_unfinished(), "the engine does not come to an end"
        for cache in self.caches:
            assert cache.free_tokens() == cache.num_blocks * cache.block_size, "memory was not given back"
        return outputs


def build_rig(
    target: TableModel,
    drafter: Drafter | Drafters | None = None,
    *,
    length: int = 0,
    verification: str = "auto",
    chances: Chances | None = None,
    limits: Limits = ROOMY,
    ends: frozenset[int] = frozenset(),
    seed: int = 0,
    cache: MakeCache = paged,
    draft_length: DraftLength | None = None,
    learning: Learning | None = None,
) -> Rig:
    """Put the real engine together around fakes; `length` is the number of draft nodes unless a policy chooses it."""
    drafters = drafter if isinstance(drafter, Drafters) else Drafters.of(drafter)
    caches = (cache(target.cache_shape, limits), *drafters.caches)
    options = EngineOptions(limits, seed, ends, verification)
    released = watch_releases(caches[0])
    chances = chances or KeyedChances()
    policy = draft_length or Fixed(length)
    engine = Engine(options, target, caches[0], chances, known_verifiers(), policy, drafters, learning=learning)
    return Rig(engine, caches, released)


@functools.cache
def known_verifiers() -> dict[str, Verifier]:
    """Return every verification rule; looked up once, for they have no state."""
    return load_verifiers()


def model_drafter(
    draft: TableModel,
    vocab_size: int,
    chances: Chances | None = None,
    limits: Limits = ROOMY,
    cache: MakeCache = paged,
    topology: TreeTopology | None = None,
    stop_below: float = 0.0,
) -> ModelDrafter:
    """Make the real drafter around a table model, with a cache of its own; topology None = chains."""
    made, chances = cache(draft.cache_shape, limits), chances or KeyedChances()
    runner = DraftModelRunner(draft, made, chances, limits.max_num_batched_tokens, stop_below)
    return ModelDrafter(runner, vocab_size, topology=topology)
