"""Edits of single tokens' logits at a node, before the logits become a distribution."""

from __future__ import annotations

from speculant.constraints import checked_mask
from speculant.counts import TokenCounts
from speculant.kernels.base import Edits
from speculant.sampling.node import Node
from speculant.types import Request


def edits_of(node: Node) -> Edits:
    """Return the edits of a node's row: those of its request, with the drafted ancestors."""
    params, request = node.params, node.request
    return Edits(
        drafted=node.drafted,
        mask=None if request.constraint is None else checked_mask(request.constraint, node.drafted),
        biased=params.biased if params.logit_bias else None,
        biases=params.biases if params.logit_bias else None,
        banned=request.end_token_ids,
        ban_below=params.min_tokens - request.num_output,
        counts=_counts(request) if params.penalised else None,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


def _counts(request: Request) -> TokenCounts:
    counts = request.counts
    assert counts is not None, "its tokens are not counted"
    assert counts.num_tokens == len(request.tokens), "its counts are not those of its tokens"
    return counts
