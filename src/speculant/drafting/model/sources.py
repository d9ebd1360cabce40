"""The encoded sources of an encoder-decoder draft model.

The draft model has an encoder of its own, and its cache has a sequence for each source, as the target's has. A source
is encoded before its text's first draft, in a round whose budget and cache have room for all of it. Until then the
text gets no draft. Equal sources of one salt are encoded once; each is released with the last text that holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from speculant.cache import KVCache, Source, Sources
from speculant.models import CausalLM, encode_sources
from speculant.types import Request


class DraftSources:
    """The sources in the cache of a draft model.

    reads_target: their keys and values are computed from the results of the target's encoder, which `observe` gets.
    """

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self._model, self._cache, self._sources = model, cache, Sources(cache)
        self._observed: dict[int, Source] = {}  # the target's sources, by the sequence id of the text
        self.reads_target = False

    def of(self, request: Request) -> Source | None:
        """Return the source of a request's text, which holds it from now on; None = the model reads none."""
        if not self._model.needs.source:
            return None
        held = self._sources.of(request.seq_id)
        return held or self._sources.hold(request.seq_id, request.source, request.cache_salt)

    def id_of(self, request: Request) -> int | None:
        """Return the sequence id of the source of a request's text; see `SequenceInput.source`."""
        source = self.of(request)
        return None if source is None else source.seq_id

    @property
    def most_rows(self) -> int:
        """The length of the longest source that can be encoded; the target's encoder has already read its own."""
        return sys.maxsize if self.reads_target else self._model.max_positions

    def missing_rows(self, source: Source) -> int:
        """Return how many rows have to be computed for a source before its texts; 0 = it is encoded."""
        return 0 if self._sources.is_encoded(source) else len(source.tokens)

    def encode(self, sources: Sequence[Source]) -> None:
        """Encode sources, for which the cache has room; after an error none of them is in the cache."""
        if sources:
            given = [self._result(source) for source in sources] if self.reads_target else None
            encode_sources(self._model, self._cache, sources, given=given)

    def _result(self, source: Source) -> Tensor:
        """Return the result [tokens, hidden] of the target's encoder."""
        states = self._observed[next(iter(source.holders))].states
        assert states is not None, "the states of sources are not kept"
        return states

    def observe(self, request: Request, source: Source) -> None:
        """Keep the target's source of a request."""
        self._observed[request.seq_id] = source

    def release(self, request: Request) -> None:
        """Release the source of a request."""
        self._observed.pop(request.seq_id, None)
        self._sources.release(request.seq_id)

    def check(self) -> None:
        """See `Sources.check`."""
        self._sources.check()


class TargetSources(DraftSources):
    """The target's own sources, for a model that uses the target's cache."""

    @override
    def of(self, request: Request) -> Source | None:
        return self._observed.get(request.seq_id)
