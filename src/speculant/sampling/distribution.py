"""From logits to the distribution that a token is drawn from: one function, for draft and target alike.

Distributions are float64, whatever the logits are, and each row's distribution depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speculant.constraints import checked_mask
from speculant.counts import TokenCounts
from speculant.errors import ConstraintError
from speculant.kernels import REFERENCE, Edits, Sampler, SamplingSettings
from speculant.params import SamplingParams
from speculant.types import Request


class Node(NamedTuple):
    """A place where a token is chosen: a request's last token followed by `drafted` ancestors.

    softened: a greedy request's distribution is that at temperature 1, so that tokens can be ranked. A beam search's
    always is.
    """

    request: Request
    drafted: Sequence[int] = ()
    softened: bool = False

    @property
    def params(self) -> SamplingParams:
        """The settings that make the distribution."""
        softened = self.softened or self.request.search is not None
        return self.request.params.softened if softened else self.request.params

    @property
    def edited(self) -> bool:
        """Whether the logits of single tokens change before the distribution is made."""
        if self.request.constraint is not None:
            return True
        params = self.request.params
        return params.edits and (bool(params.logit_bias) or params.penalised or self.ends_banned)

    @property
    def ends_banned(self) -> bool:
        """Whether fewer than min_tokens output tokens precede it, so that end tokens are banned."""
        return self.request.num_output + len(self.drafted) < self.params.min_tokens


def distribution(logits: Tensor, nodes: Sequence[Node], sampler: Sampler = REFERENCE) -> Tensor:
    """Return distributions [r, V] in float64 for logits [r, V], one node per row (arXiv 2211.17192, section 2.2).

    Order: constraint, bias, end tokens below min_tokens, penalties, temperature, top-k, top-p, min-p. A row without a
    possible token, as after an error of a constraint, is all zeros; one whose logits have NaN or +infinity is all NaN.
    """
    settings, edits, node, params = list[SamplingSettings](), list[Edits | None](), None, None
    for each in nodes:
        if each is not node:  # equal rows may share a node, and requests their parameters
            node, own, now = each, edits_of(each) if each.edited else None, each.params
            if now is not params:
                params, setting = now, sampling_settings(now)
        settings.append(setting)
        edits.append(own)
    return sampler.distribution(logits, settings, edits)


def row_maxima(probs: Tensor) -> list[float]:
    """Return the largest probability of each row [r, V]; 0 or NaN for a row that is not a distribution."""
    maxima: list[float] = (probs.numpy().max(axis=1) if is_numpys(probs) else probs.amax(-1)).tolist()
    return maxima


def is_numpys(tensor: Tensor) -> bool:
    """Whether numpy can read the tensor in place."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def sampling_settings(params: SamplingParams) -> SamplingSettings:
    """Return the settings by which a sampler turns edited logits into a distribution."""
    return SamplingSettings(params.temperature, params.top_p, params.min_p, params.top_k)


def edits_of(node: Node) -> Edits:
    """Return the edits of single logits in a node's row: those of its request, with the drafted ancestors."""
    params, request = node.params, node.request
    with request.work:
        return Edits(
            drafted=node.drafted,
            mask=_mask_of(node),
            biased=params.biased if params.logit_bias else None,
            biases=params.biases if params.logit_bias else None,
            banned=request.end_token_ids,
            ban_below=params.min_tokens - request.num_output,
            counts=_counts(request) if params.penalised else None,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )


def _mask_of(node: Node) -> Tensor | None:
    """Return a constraint's mask. One that fails allows no token, so that rows of other requests are not affected."""
    request = node.request
    if request.constraint is None:
        return None
    try:
        return checked_mask(request.constraint, node.drafted)
    except ConstraintError:
        return torch.zeros(1, dtype=torch.int32)


def _counts(request: Request) -> TokenCounts:
    counts = request.counts
    assert counts is not None, "its tokens are not counted"
    assert counts.num_tokens == len(request.tokens), "its counts are not those of its tokens"
    return counts
