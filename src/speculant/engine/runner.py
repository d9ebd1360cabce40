"""One target pass: from a flat batch to the logits of the rows that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speculant.cache import MEASURED, KVCache, Source
from speculant.models import CausalLM, Hidden, SequenceInput, build_batch, encode_sources
from speculant.sampling import take_rows, top_tokens
from speculant.scheduling import NO_DRAFT, Scheduled
from speculant.types import CommittedRows, DraftTree, Request, Successors, state_rows

_NO_REQUEST = 0  # a sequence id; those of requests count from 1


class TargetOutput(NamedTuple):
    """One sequence's share of a pass.

    pass_logits: those of all sequences; None while some of this one's tokens are not processed. Its own begin at row
    `first_logits`: those after `nodes`, which are the root and all draft nodes unless it is a beam search.
    prompt_hidden [m, hidden] are the hidden states after prompt tokens whose successor's log-probability is requested.
    hidden: for each layer that drafters announce, the hidden states [count + tree.size, hidden] of the processed tokens
    and of the draft nodes. nodes: see `open_nodes`. successors: for each of `nodes`, see `CommittedRows`; none unless
    the drafter announces it. ahead [1 + tree.size, k, hidden]: the states of the look-ahead rows below the root and
    below each node; None = there are none.
    """

    item: Scheduled
    tree: DraftTree
    pass_logits: Tensor | None
    prompt_hidden: Tensor | None
    hidden: Sequence[Tensor] = ()
    nodes: Sequence[int] = ()
    successors: Successors = ()
    ahead: Tensor | None = None
    first_logits: int = 0

    @property
    def logits(self) -> Tensor | None:
        """Its own logits [len(nodes), V], a view; making it takes microseconds, and few sequences need it."""
        first, logits = self.first_logits, self.pass_logits
        return None if logits is None else logits[first : first + len(self.nodes)]

    @property
    def num_results(self) -> int:
        """The number of rows whose results are used: for a next token, or for a log-probability of the prompt."""
        nodes = 0 if self.pass_logits is None else len(self.nodes)
        return nodes if self.prompt_hidden is None else nodes + len(self.prompt_hidden)

    def committed_rows(self, kept: Sequence[int], gained: Sequence[int]) -> CommittedRows:
        """Return the rows that were committed: those of the tokens and of the `kept` nodes. gained: the new tokens."""
        item, tree, hidden = self.item, self.tree, self.hidden
        tokens = item.tokens
        if tree.size:
            tokens += [tree.token_list[node] for node in kept]
            if not hidden or tuple(kept) == tuple(range(len(kept))):
                hidden = state_rows(hidden, 0, len(tokens))
            else:
                rows = [*range(item.count), *[item.count + node for node in kept]]
                hidden = tuple(states[rows] for states in hidden)
        ahead = None if self.ahead is None else self.ahead[1 + kept[-1] if kept else 0]
        return CommittedRows(item.start, tokens, gained, hidden, self.successors, ahead)


@torch.inference_mode()
def check_target(model: CausalLM, cache: KVCache) -> None:
    """Compute one token that belongs to no request, after a source of one; raises the model's own error.

    If sequences hold all of the cache, nothing is computed: their own next passes show whether the model can compute.
    """
    source, plan = Source(MEASURED, (0,)) if model.needs.source else None, cache.plan()
    if not all(plan.take(seq_id, 1) for seq_id in (_NO_REQUEST, *((MEASURED,) if source else ()))):
        return
    try:
        if source is not None:
            encode_sources(model, cache, [source])
        inputs = SequenceInput(_NO_REQUEST, [0], NO_DRAFT, source=MEASURED if source else None)
        model.logits(model.forward(build_batch([inputs], cache, model.cache_shape.device), cache.storage).last)
    finally:
        cache.release(_NO_REQUEST)
        cache.release(MEASURED)


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
    trees: Iterable[DraftTree],
    layers: Sequence[int] = (),
) -> tuple[list[TargetOutput], Tensor]:
    """Process every sequence's tokens and draft in one pass; logits are computed for the rows that need them.

    layers: those whose input hidden states are needed, ascending: see `DrafterNeeds.hidden_layers`. Returns the
    outputs, and the logits of all of them in order. Sources are encoded already.
    """
    if not scheduled:
        return [], torch.empty(0)
    inputs, shares, wanted, first = list[SequenceInput](), list[_Share](), list[int](), 0
    for item, tree in zip(scheduled, trees, strict=True):
        inputs.append(_input(item, tree))
        nodes: Sequence[int] = range(-1, tree.size)
        if item.request.search is not None:
            nodes = open_nodes(item.request, tree)
        root, completes = first + item.count, item.completes
        shares.append(_Share(item, tree, nodes, first, len(wanted) if completes else None))
        if completes:
            wanted += map(root.__add__, nodes)
        first = root + tree.num_rows
    taps = layers if not layers or layers[-1] <= model.num_layers else layers[:-1]
    hidden = model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage, taps)
    if len(taps) < len(layers):  # the states after the final norm are not a tap
        hidden = hidden._replace(taps=(*hidden.taps, hidden.last))
    chosen = hidden.last if len(wanted) == hidden.last.shape[0] else take_rows(hidden.last, wanted)
    logits = model.logits(chosen) if wanted else chosen
    outputs = list[TargetOutput]()
    for share in shares:
        outputs.append(_output(share, hidden, logits))
    return outputs, logits


class _Share(NamedTuple):
    """One sequence's share of a pass: its rows start at `first`, its logits at `first_logits`; None = it has none."""

    item: Scheduled
    tree: DraftTree
    nodes: Sequence[int]
    first: int
    first_logits: int | None


def _input(item: Scheduled, tree: DraftTree) -> SequenceInput:
    """Return the rows of a sequence: its tokens, its draft, and the look-ahead rows."""
    length, source = item.request.num_positions, None if item.source is None else item.source.seq_id
    if tree.ahead is None:
        return SequenceInput(item.request.seq_id, item.tokens, tree, length=length, source=source)
    first = item.count + tree.size
    own = {first + row: tree.ahead[row % len(tree.ahead)] for row in range(tree.num_look_ahead_rows)}
    return SequenceInput(item.request.seq_id, item.tokens, tree.with_look_ahead_rows(), own, None, length, source)


def _output(share: _Share, hidden: Hidden, logits: Tensor) -> TargetOutput:
    """Cut a sequence's share out of a pass."""
    item, tree, nodes, first, first_logits = share
    last = first + item.count + tree.size
    prompt = None if item.request.params.prompt_logprobs is None else _prompt_rows(item)
    states, ahead = hidden.taps, None
    if states and last - first < hidden.last.shape[0]:
        states = state_rows(states, first, last)
    if tree.ahead is not None:
        ahead = hidden.last[last : last + tree.num_look_ahead_rows].view(tree.size + 1, len(tree.ahead), -1)
    return TargetOutput(
        item,
        tree,
        None if first_logits is None else logits,
        hidden.last[first + prompt.start : first + prompt.stop] if prompt else None,
        states,
        nodes,
        (),
        ahead,
        first_logits or 0,
    )


def _prompt_rows(item: Scheduled) -> range:
    """Return which rows are prompt tokens whose successor's log-probability is requested and not recorded yet."""
    known, num_prompt = len(item.request.prompt_logprobs), len(item.request.prompt)
    if not item.request.wants_prompt_logits:
        return range(0)
    return range(known - item.start, min(item.count, num_prompt - 1 - item.start))


def with_successors(outputs: Sequence[TargetOutput], target_top_k: Callable[[Request], int]) -> list[TargetOutput]:
    """Add the target's most likely next tokens to the outputs of sequences for which `target_top_k` is above 0."""
    return [_with_successors(output, target_top_k(output.item.request)) for output in outputs]


def _with_successors(output: TargetOutput, count: int) -> TargetOutput:
    logits = output.logits
    if not count or logits is None:
        return output
    inputs = [output.item.tokens[-1] if node < 0 else output.tree.token_list[node] for node in output.nodes]
    best: list[list[int]] = top_tokens(logits, count).tolist()
    return output._replace(successors=list(zip(inputs, best, strict=True)))
