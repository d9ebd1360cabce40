"""Texts of the user's own pair: made by its engine, and read again by the target alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, KVCache
from speculant.cache.factory import slotted_cache
from speculant.config import EngineConfig
from speculant.engine.build import Runtime, build_drafters
from speculant.errors import SpeculantError
from speculant.exactness.scores import Scores
from speculant.models.base import SequenceInput, build_batch
from speculant.params import SamplingParams
from speculant.sampling.distribution import Node, distribution
from speculant.text.stop import compile_stops
from speculant.text.stream import TextStream
from speculant.types import DraftTree, Request


def complete(
    runtime: Runtime, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], alone: bool = False
) -> list[Request]:
    """Run tokenised prompts to their ends, as many at once as the engine takes or one by one.

    Raises the first error that a request ended by, as a SpeculantError.
    """
    requests: list[Request] = []
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        while runtime.engine.has_unfinished() and (alone or not runtime.engine.accepts(1)):
            runtime.engine.step()
        checker = partial(TextStream, runtime.tokenizer, each, compile_stops(each.stop))
        requests += runtime.engine.add_request(prompt, each, f"check-{number}", checker)
    while runtime.engine.has_unfinished():
        runtime.engine.step()
    for request in requests:
        _raise_error(request)
    return requests


def _raise_error(request: Request) -> None:
    """Raise what a request ended by, if that was an error."""
    error = request.error
    if isinstance(error, SpeculantError):
        raise error
    if error is not None:
        raise SpeculantError(
            f"a text broke off by {type(error).__name__}: {error}", "mend its drafter or rule."
        ) from error


class Reader:
    """The target by itself: no scheduler, no draft, a cache of its own."""

    def __init__(self, runtime: Runtime, num_seqs: int, longest: int) -> None:
        self._model, self._sampler = runtime.checkpoint.model, runtime.checkpoint.backend.sampler
        self._cache = slotted_cache(self._model.cache_shape, num_seqs, longest)
        self._most_rows = runtime.limits.max_num_batched_tokens

    @torch.inference_mode()
    def distributions(self, nodes: Sequence[Node]) -> Tensor:
        """Return probs [r, V] after each request's tokens, which may have grown since the last call."""
        for node in nodes:
            self._catch_up(node.request)
        feeds = [SequenceInput(node.request.seq_id, node.request.tokens[-1:], DraftTree.empty()) for node in nodes]
        return distribution(self._model.logits(self._feed(feeds)), nodes, self._sampler)

    def end(self, request: Request) -> None:
        """Forget a request."""
        self._cache.release(request.seq_id)

    def _catch_up(self, request: Request) -> None:
        """Feed all tokens but the newest."""
        while (start := self._cache.length(request.seq_id)) < len(request.tokens) - 1:
            chunk = request.tokens[start : min(start + self._most_rows, len(request.tokens) - 1)]
            self._feed([SequenceInput(request.seq_id, chunk, DraftTree.empty())])

    def _feed(self, feeds: Sequence[SequenceInput]) -> Tensor:
        batch = build_batch(feeds, self._cache, self._model.cache_shape.device)
        return self._model.forward(batch, self._cache.storage).last


class Second:
    """A second drafter like the engine's, which has learned nothing from the texts that it is asked about.

    What it would draft next depends on the tokens so far alone, so that a test may look at it.
    """

    def __init__(self, config: EngineConfig, runtime: Runtime, num_seqs: int, longest: int) -> None:
        def make_cache(shape: CacheShape) -> KVCache:
            return slotted_cache(shape, num_seqs, longest + 1)

        drafters = build_drafters(config, runtime.checkpoint, runtime.tokenizer, make_cache)
        assert drafters.default is not None, "nothing drafts"
        drafter = self._drafter = drafters.find(drafters.default)
        self._longest = min(drafter.needs.max_positions or longest, longest)

    def begin(self, request: Request) -> None:
        """Hear of a text."""
        self._drafter.begin(request)

    @torch.inference_mode()
    def distributions(self, requests: Sequence[Request], p: Tensor) -> tuple[Tensor, list[int]]:
        """Return distributions [k, V] of the next drafted token, like p [r, V], and the rows of those that have one."""
        limits = [int(len(request.tokens) < self._longest) for request in requests]
        trees = self._drafter.propose(requests, limits)
        rows = [row for row, tree in enumerate(trees) if tree.size]
        distributions = torch.zeros(len(rows), p.shape[-1], dtype=p.dtype, device=p.device)
        for row_probs, row in zip(distributions, rows, strict=True):
            tree = trees[row]
            if tree.probs is None:
                row_probs[tree.token_list[0]] = 1.0
            else:
                row_probs.copy_(tree.probs[0])
        return distributions, rows

    def end(self, request: Request) -> None:
        """Forget a text."""
        self._drafter.end(request)


def score_texts(config: EngineConfig, runtime: Runtime, texts: Sequence[Request]) -> Scores:
    """Hold every token of finished requests against the target's own distribution at its place."""
    scores, width = Scores(), runtime.limits.max_num_seqs
    longest = max(len(text.tokens) for text in texts)
    reader, second = Reader(runtime, width, longest), Second(config, runtime, width, longest)
    for first in range(0, len(texts), width):
        _score(scores, reader, second, texts[first : first + width])
    return scores


def _score(scores: Scores, reader: Reader, second: Second, texts: Sequence[Request]) -> None:
    again = {text: reread(text) for text in texts}
    for copy in again.values():
        second.begin(copy)
    for growing in _in_step(again):
        p = reader.distributions([Node(copy) for copy in growing.values()])
        q, rows = second.distributions(list(growing.values()), p)
        chosen = torch.tensor([text.tokens[len(copy.tokens)] for text, copy in growing.items()], device=p.device)
        scores.add(p, chosen, q, rows)
    for copy in again.values():
        reader.end(copy)
        second.end(copy)


def _in_step(again: dict[Request, Request]) -> Iterator[dict[Request, Request]]:
    """Yield the texts that have a next token, with their copies so far; then all grow by it."""
    for _ in itertools.count():
        growing = {text: copy for text, copy in again.items() if len(copy.tokens) < len(text.tokens)}
        if not growing:
            return
        yield growing
        for text, copy in growing.items():
            copy.extend([text.tokens[len(copy.tokens)]])


def reread(text: Request, num_output: int = 0) -> Request:
    """Return a request at its place after `num_output` tokens, which checks nothing and shares no noise."""
    tokens = text.tokens[: len(text.prompt) + num_output]
    return replace(text, tokens=tokens, shared_noise=False, stop_checker=None, finish_reason=None)
