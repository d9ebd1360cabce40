"""One target pass: a flat batch in, the logits that somebody needs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from speculant.cache.base import KVCache
from speculant.errors import SpeculantError
from speculant.models.base import CausalLM, SequenceInput, build_batch
from speculant.scheduling.scheduler import Scheduled
from speculant.types import DraftTree


@dataclass(frozen=True)
class TargetOutput:
    """One sequence's share of a pass.

    logits [n + 1, V] are those after the root and after each draft node; None while its tokens are
    not all fed. prompt_logits [m, V] are those after the fed prompt tokens, if the request wants them.
    """

    item: Scheduled
    tree: DraftTree
    logits: Tensor | None
    prompt_logits: Tensor | None


def forward_target(
    model: CausalLM, cache: KVCache, scheduled: Sequence[Scheduled], trees: Sequence[DraftTree]
) -> list[TargetOutput]:
    """Feed every sequence's tokens and draft in one pass; logits are computed for the rows that need them."""
    feeds = [SequenceInput(item.request.seq_id, item.tokens, tree) for item, tree in zip(scheduled, trees, strict=True)]
    hidden = model.forward(build_batch(feeds, cache, model.cache_shape.device), cache).last
    spans: list[tuple[int, int]] = []
    rows: list[int] = []
    first = 0
    for item, tree in zip(scheduled, trees, strict=True):
        wanted = _wanted_rows(item, tree, first)
        spans.append((len(rows), len(rows) + len(wanted)))
        rows += wanted
        first += item.count + tree.size
    chosen = hidden if len(rows) == hidden.shape[0] else hidden[rows]
    logits = model.logits(chosen) if rows else chosen
    if bool(logits.sum().isnan()):  # one number to look at; -inf stays what it is
        raise SpeculantError("the target model produced NaN logits", "check the checkpoint, or load it in float32.")
    return [
        _fed(item, tree, logits[start:end]) for item, tree, (start, end) in zip(scheduled, trees, spans, strict=True)
    ]


def _wanted_rows(item: Scheduled, tree: DraftTree, first: int) -> list[int]:
    """Rows in the batch: those of the prompt if asked for, then the root and its draft."""
    chosen = range(item.count - 1, item.count + tree.size) if item.completes else range(0)
    return [first + row for row in [*_prompt_rows(item), *chosen]]


def _prompt_rows(item: Scheduled) -> range:
    """Which of the fed tokens are prompt tokens whose successor's log-probability is asked for and not noted yet."""
    request = item.request
    if not request.wants_prompt_logits:
        return range(0)
    return range(len(request.prompt_logprobs) - item.start, min(item.count, len(request.prompt) - 1 - item.start))


def _fed(item: Scheduled, tree: DraftTree, logits: Tensor) -> TargetOutput:
    prompt_rows = len(_prompt_rows(item))
    return TargetOutput(
        item,
        tree,
        logits[prompt_rows:] if item.completes else None,
        logits[:prompt_rows] if prompt_rows else None,
    )
