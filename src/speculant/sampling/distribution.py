"""From logits to the distribution that a token is drawn from: one function, for draft and target alike.

Distributions are float64, whatever the logits are, and each row's distribution depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.kernels.base import Sampler, SamplingSettings
from speculant.kernels.reference_sampler import REFERENCE
from speculant.params import SamplingParams
from speculant.types import Request


@dataclass(frozen=True)
class Node:
    """A place where a token is chosen: a request's last token followed by `drafted` ancestors.

    softened: a greedy request's distribution is that at temperature 1, so that there is a second best. That of a
    beam search always is.
    """

    request: Request
    drafted: Sequence[int] = ()
    softened: bool = False

    @property
    def params(self) -> SamplingParams:
        """The settings that make the distribution."""
        softened = self.softened or self.request.beams is not None
        return self.request.params.softened if softened else self.request.params


def distribution(logits: Tensor, nodes: Sequence[Node], sampler: Sampler = REFERENCE) -> Tensor:
    """Return distributions [r, V] in float64 for logits [r, V], one node per row (seed 002 section 2.2).

    Order: bias, end tokens below min_tokens, penalties, then what `Sampler.distribution` does.
    """
    return sampler.distribution(_edited(logits, nodes), [sampling_settings(node.params) for node in nodes])


def sampling_settings(params: SamplingParams) -> SamplingSettings:
    """Return what a sampler makes a distribution by, once the logits are edited."""
    return SamplingSettings(params.temperature, params.top_p, params.min_p, params.top_k)


def _edited(logits: Tensor, nodes: Sequence[Node]) -> Tensor:
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if any(edits(node.params) for node in nodes):
        scores = scores.clone() if scores is logits else scores
        for row, node in zip(scores, nodes, strict=True):
            _edit(row, node)
    return scores


def edits(params: SamplingParams) -> bool:
    """Whether these settings change the logits of single tokens."""
    return bool(params.logit_bias) or params.penalised or params.min_tokens > 0


def _edit(row: Tensor, node: Node) -> None:
    """Apply what depends on single tokens to scores [V] in place."""
    params, request = node.params, node.request
    if params.logit_bias:
        values = list(params.logit_bias.values())
        row[_ids(list(params.logit_bias), row)] += torch.tensor(values, dtype=row.dtype, device=row.device)
    if request.num_output + len(node.drafted) < params.min_tokens and request.end_token_ids:
        row[_ids(sorted(request.end_token_ids), row)] = -torch.inf
    if params.penalised:
        _penalise(row, params, [*request.tokens, *node.drafted], len(request.prompt))


def _penalise(row: Tensor, params: SamplingParams, history: Sequence[int], num_prompt: int) -> None:
    """Repetition counts prompt and output; presence and frequency count the output alone."""
    if params.repetition_penalty != 1:
        seen = torch.unique(_ids(history, row))
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if len(history) > num_prompt and (params.presence_penalty or params.frequency_penalty):
        seen, counts = torch.unique(_ids(history[num_prompt:], row), return_counts=True)
        row[seen] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)


def _ids(tokens: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=like.device)
