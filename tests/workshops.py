"""What builds each drafter for a target of each kind: a decoder, or an encoder-decoder model on either backend."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from speculant import LLM, SamplingParams, plugins
from speculant.cache import CacheShape, KVCache, Source, paged_cache
from speculant.drafting import Drafter, Method, StatelessDrafter
from speculant.models import Checkpoint, encode_sources, load_model
from speculant.types import CommittedRows, Request
from tests.drafters import model_of, options_of
from tests.fakes import drafter_context
from tests.heads import Shown
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, make_request

KIND = "speculant.drafting"
NUM_SEQS, MAX_LEN, BLOCK = 4, 96, 4
PROMPT = [7, 1, 2, 3, 4, 1, 2, 3, 5, 1, 2]
CONTINUATION = [3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 9, 9, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2, 3, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SOURCE = -1  # the sequence of every request's source in the target's cache


@dataclass(frozen=True)
class Kind:
    """A kind of target, and what its encoder reads; () = it has none."""

    kernels: str = "reference"
    dtype: str = "float64"
    source: tuple[int, ...] = ()


KINDS = {
    "decoder": Kind(),
    "encoder-decoder": Kind(source=(4, 1, 2, 3)),
    "native encoder-decoder": Kind("native", "float32", (4, 1, 2, 3)),
}


@functools.cache
def load_once(folder: str, kind: Kind, head_tokens: tuple[int, ...] = ()) -> Checkpoint:
    """Load a model, which has no state, once for all drafters."""
    return load_model(folder, kind.dtype, "cpu", kernels=kind.kernels, head_tokens=head_tokens)


@dataclass
class Workshop:
    """Builds one drafter as often as a test wants, and keeps the caches that it asked for."""

    name: str
    checkpoints: Checkpoints
    kind: Kind = KINDS["decoder"]
    caches: list[KVCache] = field(default_factory=list)

    @functools.cached_property
    def target(self) -> Checkpoint:
        """The target."""
        return load_once(self.checkpoints.target, self.kind)

    @functools.cached_property
    def target_cache(self) -> KVCache:
        """The target's cache, which holds no sequence but the source."""
        cache = paged_cache(self.target.model.cache_shape, NUM_SEQS * MAX_LEN // BLOCK, BLOCK)
        if self.kind.source:
            encode_sources(self.target.model, cache, [Source(SOURCE, self.kind.source)])
        return cache

    @property
    def method(self) -> Method:
        """The facts about its method."""
        method: Method = plugins.load(KIND, self.name).METHOD
        return method

    @property
    def model(self) -> str | None:
        """The draft model or the head."""
        return model_of(self.name, self.checkpoints.near, HIDDEN_SIZE, VOCAB_SIZE)

    @property
    def options(self) -> dict[str, Any]:
        """The options that its method needs."""
        return options_of(self.name, VOCAB_SIZE, [[*PROMPT, *CONTINUATION]])

    def llm(self, **speculation: Any) -> LLM:
        """Make an engine that drafts with it."""
        return LLM(
            self.checkpoints.target,
            draft_model=self.model,
            speculative_config={"method": self.name, **self.options, **speculation},
            dtype=self.kind.dtype,
            kernels=self.kind.kernels,
            max_model_len=128,
        )

    def plain_llm(self) -> LLM:
        """Make an engine without drafts."""
        return LLM(
            self.checkpoints.target, use_speculative_decoding=False, dtype=self.kind.dtype, kernels=self.kind.kernels,
            max_model_len=128,
        )  # fmt: skip

    def request(
        self, seq_id: int = 1, output: Sequence[int] = (), params: SamplingParams = GREEDY, **fields: Any
    ) -> Request:
        """Make a request with a prediction, which most drafters don't read."""
        fields = {"prediction": tuple(CONTINUATION), "source": self.kind.source, **fields}
        return make_request(PROMPT, output, params, seq_id, **fields)

    def build(self, budget: int = 256) -> Drafter:
        """Make a drafter that has seen what PROMPT leads to, if it learns."""
        context = drafter_context(
            VOCAB_SIZE,
            self.options,
            self.model,
            load=lambda source, head_tokens=(): load_once(source, self.kind, head_tokens).model,
            make_cache=self.make_cache,
            target=self.target.model,
            target_cache=lambda: self.target_cache,
            sampler=self.target.backend.sampler,
            budget=budget,
        )
        drafter: Drafter = plugins.load(KIND, self.name).build(context)
        if drafter.needs.reads.target_cache and self.kind.source:
            drafter = Sourced(drafter, Source(SOURCE, self.kind.source))
        if drafter.needs.hidden_layers or drafter.needs.target_inputs:
            drafter = Shown(drafter, self.target.model, self.kind.source)
        if self.method.learns:
            self._teach(drafter, CONTINUATION)
        return drafter

    def _teach(self, drafter: Drafter, output: Sequence[int]) -> None:
        """Let a drafter see a whole request."""
        request = self.request(999, output, reason="length")
        drafter.begin(request)
        drafter.observe(request, CommittedRows(0, request.tokens[:-1], output))
        drafter.end(request)

    def make_cache(self, shape: CacheShape) -> KVCache:
        """Make a cache for the drafter."""
        self.caches.append(paged_cache(shape, NUM_SEQS * MAX_LEN // BLOCK, BLOCK))
        return self.caches[-1]

    def check(self) -> None:
        """Check the caches; the target's is left as it was."""
        for cache in self.caches:
            cache.check()
        self.target_cache.check()
        free = NUM_SEQS * MAX_LEN // BLOCK * BLOCK - len(self.kind.source)
        assert self.target_cache.free_tokens() == free, "it is left as it was"


class Sourced(StatelessDrafter):
    """A drafter whose sequences all have one source in the target's cache."""

    def __init__(self, drafter: Drafter, source: Source) -> None:
        self.drafter, self._source = drafter, source
        self.needs, self.caches = drafter.needs, drafter.caches
        self.propose, self.catch_up, self.end = drafter.propose, drafter.catch_up, drafter.end  # type: ignore[method-assign]
        self.observe, self.roll_back = drafter.observe, drafter.roll_back  # type: ignore[method-assign]

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self.drafter.begin(request)
        self.drafter.observe_source(request, self._source)
