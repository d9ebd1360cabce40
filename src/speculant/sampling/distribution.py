"""From logits to the distribution that a token is drawn from: one function, for draft and target alike.

Distributions are float64, whatever the logits are, and each row's distribution depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from speculant.kernels.base import Edits, Sampler, SamplingSettings
from speculant.kernels.reference_sampler import REFERENCE
from speculant.params import SamplingParams
from speculant.sampling.edits import edits_of
from speculant.sampling.node import Node as Node


def distribution(logits: Tensor, nodes: Sequence[Node], sampler: Sampler = REFERENCE) -> Tensor:
    """Return distributions [r, V] in float64 for logits [r, V], one node per row (arXiv 2211.17192, section 2.2).

    Order: constraint, bias, end tokens below min_tokens, penalties, temperature, top-k, top-p, min-p. A row without a
    possible token is all zeros; one whose logits have NaN or +infinity is all NaN.
    """
    settings, edits, before = list[SamplingSettings](), list[Edits | None](), None
    for node in nodes:
        if node is not before:  # equal rows may share a node
            before, own = node, (sampling_settings(node.params), edits_of(node) if node.edited else None)
        settings.append(own[0])
        edits.append(own[1])
    return sampler.distribution(logits, settings, edits)


def sampling_settings(params: SamplingParams) -> SamplingSettings:
    """Return the settings by which a sampler turns edited logits into a distribution."""
    return SamplingSettings(params.temperature, params.top_p, params.min_p, params.top_k)
