"""The sampler of the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.counts import TokenCounts
from speculant.kernels.base import Edits, RowDraw, SamplingSettings
from speculant.kernels.native import Kernels, SpEdits, address
from speculant.kernels.reference_sampler import REFERENCE, own_scores


@dataclass(frozen=True)
class NativeSampler:
    """See `Sampler`. The kernels take logits in float32 and weights in float64; the reference takes other types."""

    kernels: Kernels

    def distribution(
        self, logits: Tensor, settings: Sequence[SamplingSettings], edits: Sequence[Edits | None]
    ) -> Tensor:
        """See `Sampler.distribution`."""
        if logits.dtype == torch.float64:
            return REFERENCE.distribution(logits, settings, edits)
        if not any(edits):
            return self.kernels.probs(logits.float(), settings, 0)
        native = NativeEdits(edits)
        return self.kernels.probs(own_scores(logits, edits), settings, native.address)

    def draw(self, weights: Tensor, shared_noise: bool, key: int) -> int:
        """See `Sampler.draw`."""
        if weights.dtype != torch.float64:
            return REFERENCE.draw(weights, shared_noise, key)
        return self.kernels.draw(weights, shared_noise, key)

    def draw_rows(self, weights: Tensor, draws: Sequence[RowDraw]) -> list[int]:
        """See `Sampler.draw_rows`."""
        if weights.dtype != torch.float64:
            return REFERENCE.draw_rows(weights, draws)
        return self.kernels.draw_rows(weights, draws)

    def normalise(self, weights: Tensor) -> Tensor:
        """See `Sampler.normalise`."""
        return REFERENCE.normalise(weights) if weights.dtype != torch.float64 else self.kernels.normalise(weights)


class NativeEdits:
    """The edits of rows in the native kernels' layout. They point to memory that this object owns.

    address: of an array with one pointer per row; 0 if no row is edited.
    """

    def __init__(self, edits: Sequence[Edits | None]) -> None:
        self._owners: list[object] = []
        self.address = 0
        if any(edits):
            self._pointers = array("Q", [0 if own is None else self._convert(own) for own in edits])
            self.address = address(self._pointers)

    def _convert(self, edits: Edits) -> int:
        drafted, banned = array("q", edits.drafted), array("q", edits.banned)
        made = SpEdits(drafted=address(drafted), num_drafted=len(drafted), ban_below=edits.ban_below)
        made.banned, made.num_banned = address(banned), len(banned)
        if edits.mask is not None:
            made.allowed, made.words, made.masked = edits.mask.data_ptr(), len(edits.mask), 1
        if edits.biased is not None and edits.biases is not None:
            biases = array("f", edits.biases)
            made.biased, made.biases, made.num_biased = address(edits.biased), address(biases), len(biases)
            self._owners.append(biases)
        if edits.counts is not None:
            self._convert_penalties(made, edits, edits.counts)
        self._owners += (made, edits, banned, drafted)
        return ctypes.addressof(made)

    def _convert_penalties(self, made: SpEdits, edits: Edits, counts: TokenCounts) -> None:
        tokens, numbers = counts.tokens, counts.counts
        made.seen, made.counts, made.num_seen = tokens.data_ptr(), numbers.data_ptr(), len(tokens)
        made.penalises, made.repetition = 1, edits.repetition
        made.presence, made.frequency = edits.presence, edits.frequency
        self._owners += (tokens, numbers)
