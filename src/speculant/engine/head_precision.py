"""Chooses the type of a head's weights; draft_loading.py does so for a draft model.

The target draws a text. With the head's weights in each type, the drafter drafts one token after each token of the
text, from the target's states. The mean of sum min(p, q) along the text estimates how often drafts are accepted. The
time of a draft is measured too. The choice is kept on disk if the machine was not busy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from speculant.cache import slotted_cache
from speculant.drafting import Build, Drafter, DrafterContext, complete
from speculant.engine.draft_loading import (
    AUTO,
    DRAWN,
    PROMPT,
    SAMPLE,
    Precision,
    choice_path,
    drawn,
    fastest,
    keep_choice,
    pass_seconds,
    rounded,
    text_cache,
)
from speculant.errors import ConfigError, ModelError, SpeculantError
from speculant.files import Run, read_measured
from speculant.lengths import make_sequence, timed
from speculant.models import CausalLM, Checkpoint, Hidden, RoundsHeads, SequenceInput, build_batch
from speculant.types import CommittedRows, DraftTree, Request

logger = logging.getLogger(__name__)

TEXT_SECONDS = 3.0  # in which the target draws the text, unless its fewest tokens take longer
FEWEST = 8  # tokens of the text
DEPTH = 5  # nodes of the longer draft that is timed
ROOM = 64  # rows of drafts in the cache of a drafter that is measured


def hosting(target: CausalLM, quantization: str | None) -> CausalLM:
    """Return a target for heads in a type; None = that of its cache. Raises ConfigError if it can't compute them."""
    if quantization is None:
        return target
    if not isinstance(target, RoundsHeads):
        raise ConfigError(
            f"draft_quantization={quantization!r} rounds a head on the kernels of its target, and those of this target"
            " compute no rounded heads",
            'use the native kernels for the target, or draft_quantization="auto".',
        )
    return target.rounding_heads(quantization)


@dataclass(frozen=True)
class HeadRounding:
    """The `DrafterContext.round_head` of an engine.

    given: the configured type, see `EngineConfig`. facts: texts that name target, types and kernels. notes: the choice
    is added here, for the user.
    """

    target: Checkpoint
    given: str | None
    facts: Sequence[str]
    notes: list[str] = field(default_factory=list)

    def __call__(self, build: Build, context: DrafterContext) -> DrafterContext:
        """Return the context with a target for heads in the configured type, or in the fastest one."""
        host = self.target.model
        if self.given != AUTO:
            return replace(context, target=hosting(host, rounded(self.given)))
        if not isinstance(host, RoundsHeads):
            return context
        own = [build.__module__, str(context.model), _state_of(context.model), str(sorted(context.options.items()))]
        context, chosen = choose_head_precision(build, context, self.target, [*self.facts, *own])
        own_type = str(host.cache_shape.dtype).removeprefix("torch.")
        self.notes.append(f", draft weights in {chosen or own_type} (fastest here)")
        return context


def _state_of(source: object) -> str:
    """Return sizes and times of the files in a head's folder: another head there has a choice of its own."""
    folder = Path(str(source)).expanduser()
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return str([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def choose_head_precision(
    build: Build, context: DrafterContext, target: Checkpoint, identity: Sequence[str]
) -> tuple[DrafterContext, str | None]:
    """Choose the type that is expected to be fastest; return the context with a target for such heads, and the type.

    identity: as in `choose_precision`.
    """
    path = choice_path(identity)
    with suppress(ValueError, TypeError, KeyError, SpeculantError):
        kept = read_measured(path)["draft_quantization"]
        return replace(context, target=hosting(target.model, kept)), kept
    started, runs = time.perf_counter(), list[Sequence[Run]]()
    chosen = _measure(build, context, target, runs)
    logger.info("chose draft_quantization=%s for a head in %.1f s", chosen, time.perf_counter() - started)
    keep_choice(path, chosen, runs)
    return replace(context, target=hosting(target.model, chosen)), chosen


@torch.inference_mode()
def _measure(build: Build, context: DrafterContext, target: Checkpoint, runs: list[Sequence[Run]]) -> str | None:
    model, pass_s = target.model, pass_seconds(target.model, runs)
    assert isinstance(model, RoundsHeads)
    length = int(min(SAMPLE, max(FEWEST, TEXT_SECONDS / pass_s(1)), model.max_positions - PROMPT))
    sample = DraftSample.of(target, drawn(target, model.vocab_size, max(1, length)))
    found = list[Precision]()
    for quantization in (None, *model.head_quantizations):
        own = replace(
            context,
            target=hosting(model, quantization),
            make_cache=lambda shape: slotted_cache(shape, 1, len(sample.tokens) + ROOM),
            stop_below=0.0,
        )
        with suppress(*[ModelError] if found else []):  # weights that are not finite can't be rounded
            found.append(sample.measure(quantization, complete(build(own)), runs))
            logger.info("a head in %s: acceptance %.3f, %.2g s a token, %.2g s a draft", *vars(found[-1]).values())
    return fastest(found, pass_s)


@dataclass(frozen=True)
class DraftSample:
    """A text, with the target's distributions [n, V] at temperature 1 after each token.

    states: returns the hidden states of layers, [n, hidden] each, see `DrafterNeeds.hidden_layers`.
    """

    tokens: Sequence[int]
    probs: Tensor
    states: Callable[[Sequence[int]], tuple[Tensor, ...]]

    @classmethod
    def of(cls, target: Checkpoint, tokens: Sequence[int]) -> DraftSample:
        """Compute a text in one pass."""
        model = target.model
        probs = torch.softmax(model.logits(_forward(model, tokens, ()).last).double(), -1)

        @cache
        def states(layers: Sequence[int]) -> tuple[Tensor, ...]:
            taps = sorted({layer for layer in layers if layer <= model.num_layers})
            hidden = _forward(model, tokens, taps)
            found = dict(zip(taps, hidden.taps, strict=True))
            return tuple(found.get(layer, hidden.last) for layer in layers)

        return cls(tokens, probs, states)

    def measure(self, quantization: str | None, drafter: Drafter, runs: list[Sequence[Run]]) -> Precision:
        """Draft along the text, and time drafts after it."""
        overlap = [_overlap(tree, probs) for tree, probs in self.drafts(drafter)]
        return Precision(quantization, sum(overlap) / len(overlap), *self.seconds(drafter, runs))

    def drafts(self, drafter: Drafter) -> Iterator[tuple[DraftTree, Tensor]]:
        """Yield a draft of one node at each token after the first ones, and the target's distribution [V] there."""
        states, last = self.states(tuple(drafter.needs.hidden_layers)), len(self.tokens) - 1
        request, seen = self._sequence(min(PROMPT, last)), 0
        drafter.begin(request)
        for place in range(len(request.tokens), last + 1):
            _observe(drafter, request, states, seen)
            seen = place - 1
            (tree,) = drafter.propose([request], [1])
            yield tree, self.probs[place - 1]
            request.tokens.append(self.tokens[place])
        drafter.end(request)

    def seconds(self, drafter: Drafter, runs: list[Sequence[Run]]) -> tuple[float, float]:
        """Time drafts after the text: return the seconds per drafted token, and the fixed seconds per draft."""
        request, states = self._sequence(len(self.tokens)), self.states(tuple(drafter.needs.hidden_layers))
        drafter.begin(request)
        _observe(drafter, request, states, 0)
        depth = min(DEPTH, drafter.needs.max_nodes or DEPTH)
        seconds = timed(lambda limit: drafter.propose([request], [limit]), sorted({1, depth}), runs)
        drafter.end(request)
        token_s = max((seconds[depth] - seconds[1]) / max(1, depth - 1), 1e-9)
        return token_s, max(0.0, seconds[1] - token_s)

    def _sequence(self, length: int) -> Request:
        """Return a sequence that has the first tokens of the text, and whose drafts have probs."""
        return replace(make_sequence(0, self.tokens[:length], DRAWN), shared_noise=False)


def _observe(drafter: Drafter, request: Request, states: Sequence[Tensor], seen: int) -> None:
    """Give a drafter the states of a request's tokens from `seen` to the last but one."""
    known = len(request.tokens) - 1
    rows = tuple(each[seen:known] for each in states)
    drafter.observe(request, CommittedRows(seen, request.tokens[seen:known], request.tokens[-1:], rows))


def _forward(model: CausalLM, tokens: Sequence[int], taps: Sequence[int]) -> Hidden:
    cache, source = text_cache(model, model.vocab_size, len(tokens))
    inputs = SequenceInput(0, tokens, DraftTree.empty(), source=source)
    batch = build_batch([inputs], cache, model.cache_shape.device)
    return model.forward(batch, cache.storage, taps)


def _overlap(tree: DraftTree, probs: Tensor) -> float:
    """Return sum min(p, q) of a draft's first node; a node without probs is q's only token."""
    if not tree.size:
        return 0.0
    if tree.probs is None:
        return float(probs[tree.token_list[0]])
    return float(torch.minimum(probs, tree.probs[0].double()).sum())
