"""One target pass: a flat batch in, the logits that somebody needs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from speculant.cache.base import KVCache
from speculant.models.base import CausalLM, SequenceInput, build_batch
from speculant.scheduling.scheduler import Scheduled
from speculant.types import DraftTree


@dataclass(frozen=True)
class TargetOutput:
    """One sequence's share of a pass.

    logits [n + 1, V] are those after the root and after each draft node; None while its tokens are
    not all fed. prompt_hidden [m, hidden] are the hidden states after the fed prompt tokens whose successor's
    log-probability is asked for.
    """

    item: Scheduled
    tree: DraftTree
    logits: Tensor | None
    prompt_hidden: Tensor | None


def forward_target(
    model: CausalLM, cache: KVCache, scheduled: Sequence[Scheduled], trees: Sequence[DraftTree]
) -> list[TargetOutput]:
    """Feed every sequence's tokens and draft in one pass; logits are computed for the rows that need them."""
    feeds = [SequenceInput(item.request.seq_id, item.tokens, tree) for item, tree in zip(scheduled, trees, strict=True)]
    hidden = model.forward(build_batch(feeds, cache, model.cache_shape.device), cache)
    spans: list[tuple[int, int]] = []
    rows: list[int] = []
    own: list[Tensor] = []  # hidden states of each sequence
    first = 0
    for item, tree in zip(scheduled, trees, strict=True):
        wanted = _wanted_rows(item, tree, first)
        spans.append((len(rows), len(rows) + len(wanted)))
        rows += wanted
        own.append(hidden[first : first + item.count])
        first += item.count + tree.size
    chosen = hidden if len(rows) == hidden.shape[0] else hidden[rows]
    logits = model.logits(chosen) if rows else chosen
    parts = zip(scheduled, trees, own, spans, strict=True)
    return [_fed(item, tree, states, logits[start:end]) for item, tree, states, (start, end) in parts]


def _wanted_rows(item: Scheduled, tree: DraftTree, first: int) -> range:
    """Rows in the batch that get logits: the root and its draft, once all of its tokens are fed."""
    root = first + item.count - 1
    return range(root, root + 1 + tree.size) if item.completes else range(0)


def _prompt_rows(item: Scheduled) -> range:
    """Which of the fed tokens are prompt tokens whose successor's log-probability is asked for and not noted yet."""
    request = item.request
    if not request.wants_prompt_logits:
        return range(0)
    return range(len(request.prompt_logprobs) - item.start, min(item.count, len(request.prompt) - 1 - item.start))


def _fed(item: Scheduled, tree: DraftTree, hidden: Tensor, logits: Tensor) -> TargetOutput:
    prompt = _prompt_rows(item)
    return TargetOutput(
        item,
        tree,
        logits if item.completes else None,
        hidden[prompt.start : prompt.stop] if prompt else None,
    )
