"""One target pass: a flat batch in, the logits of the rows that need them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.models.base import CausalLM, Hidden, SequenceInput, build_batch
from speculant.sampling.rows import top_tokens
from speculant.scheduling.scheduler import Scheduled
from speculant.types import DraftTree, Request, Successors, state_rows

_NOBODY = 0  # a sequence id; those of requests count from 1


class TargetOutput(NamedTuple):
    """One sequence's share of a pass.

    logits [len(nodes), V] are those after `nodes`, which are the root and all draft nodes unless it is a beam search;
    None while some of its tokens are not processed. prompt_hidden [m, hidden] are the hidden states after prompt tokens
    whose successor's log-probability is asked for. hidden: for each layer that drafters announce, the hidden states
    [count + tree.size, hidden] of the processed tokens and of the draft nodes. nodes: see `open_nodes`. successors: for
    each of `nodes`, see `CommittedRows`; none unless the drafter asks for them. ahead [1 + tree.size, k, hidden]: the
    states of the drafter's own rows below the root and below each node; None = there are none.
    """

    item: Scheduled
    tree: DraftTree
    logits: Tensor | None
    prompt_hidden: Tensor | None
    hidden: Sequence[Tensor] = ()
    nodes: Sequence[int] = ()
    successors: Successors = ()
    ahead: Tensor | None = None


@torch.inference_mode()
def check_target(model: CausalLM, cache: KVCache) -> None:
    """Compute one token of a text of its own, which no request can be blamed for; raises what the model raises."""
    try:
        batch = build_batch([SequenceInput(_NOBODY, [0], DraftTree.empty())], cache, model.cache_shape.device)
        model.logits(model.forward(batch, cache.storage).last)
    finally:
        cache.release(_NOBODY)


def open_nodes(request: Request, tree: DraftTree) -> Sequence[int]:
    """Return the nodes of a tree that a next token may follow, -1 = the root.

    In a beam search they are as deep as the live hypotheses, or deeper.
    """
    ahead = 0 if request.search is None else request.num_positions - len(request.tokens)
    if not ahead:
        return range(-1, tree.size)
    return [node for node, depth in enumerate(tree.depths) if depth >= ahead]


def forward_target(
    model: CausalLM,
    cache: KVCache,
    scheduled: Sequence[Scheduled],
    trees: Sequence[DraftTree],
    layers: Sequence[int] = (),
) -> tuple[list[TargetOutput], Tensor]:
    """Feed every sequence's tokens and draft in one pass; logits are computed for the rows that need them.

    layers: those whose input hidden states are wanted, ascending: see `DrafterNeeds.hidden_layers`. Returns the
    outputs, and the logits of all of them in order.
    """
    pairs = list(zip(scheduled, trees, strict=True))
    inputs = [_input(item, tree) for item, tree in pairs]
    taps = [layer for layer in layers if layer <= model.num_layers]
    hidden = model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage, taps)
    if len(taps) < len(layers):  # the states after the final norm are no tap
        hidden = hidden._replace(taps=(*hidden.taps, hidden.last))
    starts = [0, *accumulate(item.count + tree.num_rows for item, tree in pairs)]
    nodes = [open_nodes(item.request, tree) for item, tree in pairs]
    wanted = [_wanted_rows(item, own, first) for (item, _), own, first in zip(pairs, nodes, starts, strict=False)]
    rows = [row for own in wanted for row in own]
    chosen = hidden.last if len(rows) == hidden.last.shape[0] else hidden.last[rows]
    logits = model.logits(chosen) if rows else chosen
    outputs, end = list[TargetOutput](), 0
    for (item, tree), own_nodes, own, first in zip(pairs, nodes, wanted, starts, strict=False):
        end += len(own)
        share = logits if len(own) == len(rows) else logits[end - len(own) : end]
        outputs.append(_output(item, tree, own_nodes, hidden, first, share))
    return outputs, logits


def _input(item: Scheduled, tree: DraftTree) -> SequenceInput:
    """Return the rows of a sequence: its tokens, its draft, and the drafter's own."""
    if tree.ahead is None:
        return SequenceInput(item.request.seq_id, item.tokens, tree)
    first = item.count + tree.size
    own = {first + row: tree.ahead[row % len(tree.ahead)] for row in range(tree.num_own_rows)}
    return SequenceInput(item.request.seq_id, item.tokens, tree.with_own_rows(), own)


def _wanted_rows(item: Scheduled, nodes: Sequence[int], first: int) -> list[int]:
    """Return the rows that get logits: those that a next token may follow, once the whole sequence is processed."""
    root = first + item.count
    return [root + node for node in nodes] if item.completes else []


def _prompt_rows(item: Scheduled) -> range:
    """Return which rows are prompt tokens whose successor's log-probability is asked for and not recorded yet."""
    request = item.request
    if not request.wants_prompt_logits:
        return range(0)
    return range(len(request.prompt_logprobs) - item.start, min(item.count, len(request.prompt) - 1 - item.start))


def _output(
    item: Scheduled, tree: DraftTree, nodes: Sequence[int], hidden: Hidden, first: int, logits: Tensor
) -> TargetOutput:
    """Return the share of a sequence whose rows begin at `first`."""
    prompt, end = _prompt_rows(item), first + item.count + tree.size
    is_all = end - first == hidden.last.shape[0]  # then views are not needed; each takes microseconds
    own = None
    if tree.ahead is not None:
        own = hidden.last[end : end + tree.num_own_rows].view(tree.size + 1, len(tree.ahead), -1)
    return TargetOutput(
        item,
        tree,
        logits if item.completes else None,
        hidden.last[first + prompt.start : first + prompt.stop] if prompt else None,
        hidden.taps if is_all else state_rows(hidden.taps, first, end),
        nodes,
        ahead=own,
    )


def with_successors(outputs: Sequence[TargetOutput], target_top_k: Callable[[Request], int]) -> list[TargetOutput]:
    """Add the target's most likely next tokens to the outputs of sequences for which `target_top_k` is above 0."""
    return [_with_successors(output, target_top_k(output.item.request)) for output in outputs]


def _with_successors(output: TargetOutput, count: int) -> TargetOutput:
    if not count or output.logits is None:
        return output
    fed = [output.item.tokens[-1] if node < 0 else output.tree.token_list[node] for node in output.nodes]
    best: list[list[int]] = top_tokens(output.logits, count).tolist()
    return output._replace(successors=list(zip(fed, best, strict=True)))
