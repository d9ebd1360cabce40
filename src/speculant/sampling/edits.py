"""What changes the scores of single tokens before a distribution is made of them.

Order: the constraint's mask, logit_bias, end tokens below min_tokens, penalties. `edit` defines it; csrc/edits.h does
the same in float32, with the same bits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.constraints import checked_mask, unpacked
from speculant.counts import TokenCounts
from speculant.kernels.native import Edits, address
from speculant.params import SamplingParams
from speculant.sampling.node import Node
from speculant.tree import ids
from speculant.types import Request


def edit(row: Tensor, node: Node) -> None:
    """Apply what depends on single tokens to scores [V] in place."""
    params, request = node.params, node.request
    mask = None if request.constraint is None else checked_mask(request.constraint, node.drafted)
    if mask is not None:
        row.masked_fill_(~unpacked(mask, len(row)).to(row.device), -torch.inf)
    if params.logit_bias:
        biases = torch.frombuffer(params.biases, dtype=torch.float64)
        row[ids(params.biased).to(row.device)] += biases.to(row.device, row.dtype)
    if node.ends_banned:
        row[ids(sorted(request.end_token_ids)).to(row.device)] = -torch.inf
    if params.penalised:
        _penalise(row, params, *(each.to(row.device) for each in _counts(request).with_drafted(node.drafted)))


def _penalise(row: Tensor, params: SamplingParams, tokens: Tensor, counts: Tensor) -> None:
    """Repetition looks at the tokens of prompt and output; presence and frequency at the output's counts alone."""
    if params.repetition_penalty != 1:
        scores = row[tokens]
        row[tokens] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        said = counts > 0
        row[tokens[said]] -= params.presence_penalty + params.frequency_penalty * counts[said].to(row.dtype)


def _counts(request: Request) -> TokenCounts:
    counts = request.counts
    assert counts is not None, "its tokens are not counted"
    assert counts.num_tokens == len(request.tokens), "its counts are not those of its tokens"
    return counts


class NativeEdits:
    """The edits of rows, one node for each, as the native kernels read them: they point into what this keeps.

    `address` is that of a pointer for each row; 0 if no row is edited.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._kept: list[object] = []
        self._pointers = array("Q", [self._laid_out(node) if node.edited else 0 for node in nodes])
        self.address = self._pointers.buffer_info()[0] if any(self._pointers) else 0

    def _laid_out(self, node: Node) -> int:
        request, params, drafted = node.request, node.params, array("q", node.drafted)
        made = Edits(drafted=address(drafted), num_drafted=len(drafted))
        mask = None if request.constraint is None else checked_mask(request.constraint, node.drafted)
        if mask is not None:
            made.allowed, made.words, made.masked = mask.data_ptr(), len(mask), 1
        if params.logit_bias:
            biased, biases = params.biased, array("f", params.biases)
            made.biased, made.biases, made.num_biased = address(biased), address(biases), len(biased)
            self._kept += (biased, biases)
        banned = array("q", request.end_token_ids)
        made.banned, made.num_banned = address(banned), len(banned)
        made.ban_below = params.min_tokens - request.num_output
        if params.penalised:
            self._lay_out_penalties(made, params, _counts(request))
        self._kept += (made, mask, banned, drafted)
        return ctypes.addressof(made)

    def _lay_out_penalties(self, made: Edits, params: SamplingParams, counts: TokenCounts) -> None:
        tokens, numbers = counts.tokens, counts.counts
        made.seen, made.counts, made.num_seen = tokens.data_ptr(), numbers.data_ptr(), len(tokens)
        made.penalises, made.repetition = 1, params.repetition_penalty
        made.presence, made.frequency = params.presence_penalty, params.frequency_penalty
        self._kept += (tokens, numbers)
