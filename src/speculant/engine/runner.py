"""One target pass: a flat batch in, the logits that somebody needs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from speculant.cache.base import KVCache
from speculant.errors import SpeculantError
from speculant.models.base import CausalLM, SequenceInput, build_batch
from speculant.scheduling.scheduler import Scheduled
from speculant.types import DraftTree, Request


@dataclass(frozen=True)
class TargetOutput:
    """One sequence's share of a pass.

    logits [len(nodes), V] are those after `nodes`, which are the root and all draft nodes unless it is a beam search;
    None while its tokens are not all fed. prompt_logits [m, V] are those after the fed prompt tokens, if the request
    wants them.
    """

    item: Scheduled
    tree: DraftTree
    logits: Tensor | None
    prompt_logits: Tensor | None

    @cached_property
    def nodes(self) -> Sequence[int]:
        """The nodes that a next token may follow; -1 = the root."""
        return open_nodes(self.item.request, self.tree)


def open_nodes(request: Request, tree: DraftTree) -> Sequence[int]:
    """Return the nodes of a fed tree that a next token may follow, -1 = the root.

    In a beam search they are as deep as the live hypotheses, or deeper.
    """
    ahead = request.num_positions - len(request.tokens)
    if not ahead:
        return range(-1, tree.size)
    return [node for node, depth in enumerate(tree.depths) if depth >= ahead]


def forward_target(
    model: CausalLM, cache: KVCache, scheduled: Sequence[Scheduled], trees: Sequence[DraftTree]
) -> list[TargetOutput]:
    """Feed every sequence's tokens and draft in one pass; logits are computed for the rows that need them."""
    feeds = [SequenceInput(item.request.seq_id, item.tokens, tree) for item, tree in zip(scheduled, trees, strict=True)]
    hidden = model.forward(build_batch(feeds, cache, model.cache_shape.device), cache.storage).last
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
    """Rows in the batch: those of the prompt if asked for, then those that a next token may follow."""
    chosen = [item.count + node for node in open_nodes(item.request, tree)] if item.completes else []
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
