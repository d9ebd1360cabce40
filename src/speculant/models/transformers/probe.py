"""Chooses how a model of transformers runs, by comparing its results with those of transformers alone.

Two texts go through a cache: chunks, trees, a kept path, a rollback and a longer text. Each row's logits are compared
with those after the row's own text, which transformers computes in one pass without a cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speculant.cache.storage import paged_cache
from speculant.errors import ModelError
from speculant.models.base import SequenceInput, build_batch
from speculant.models.transformers.attention import AttentionSwitch, registered
from speculant.models.transformers.decoders import (
    CachedDecoder,
    RecomputedDecoder,
    TransformersDecoder,
)
from speculant.models.transformers.network import TransformersNetwork
from speculant.types import DraftTree

logger = logging.getLogger(__name__)

# The error that is allowed, as a share of the largest logit, and how many rows may have a larger one.
_ALLOWED = 1e-4, 0
_ALLOWED_16 = 0.05, 2  # in bfloat16, whose rounding can choose another expert for a row
_SEED = 20
_BLOCKS, _BLOCK_SIZE = 32, 4  # of the probe's cache
_FIRST, _SECOND = 1, 2  # sequences
_PARENTS, _PATH = (-1, -1, 0, 2, 0), (0, 2)  # of the first one's tree; the path is kept
_CUT = 5  # tokens of the second one that are left


def choose_decoder(model: Any) -> tuple[TransformersDecoder, str]:
    """Return the fastest decoder whose results are right, and why it has no cache ("" if it has one).

    Raises ModelError if no decoder is right.
    """
    network, usual = TransformersNetwork(model), model.config._attn_implementation
    probe = Probe(network)
    wanted = probe.plain()
    why = ""
    try:
        cached = _cached(network)
        why = probe.difference(cached, wanted)
        if not why:
            return cached, ""
    except Exception as error:  # noqa: BLE001 - whatever a model raises under an attention that it does not know
        why = str(error).strip().split("\n")[0] or type(error).__name__
    logger.debug("%s can't use the cache: %s", type(model).__name__, why)
    model.set_attn_implementation(usual)
    recomputed = RecomputedDecoder(network)
    differs = probe.difference(recomputed, wanted)
    if differs:
        raise ModelError(
            f"{type(model).__name__} of transformers is no causal language model: {differs}",
            'use a model whose tokens depend on earlier tokens alone; or try dtype="float32", which rounds less.',
        )
    return recomputed, why


def _cached(network: TransformersNetwork) -> CachedDecoder:
    name = registered()
    network.model.set_attn_implementation(name)
    return CachedDecoder(network, AttentionSwitch(network.model))


class Probe:
    """The texts that a model is tried with, and the logits that they must have."""

    def __init__(self, network: TransformersNetwork) -> None:
        self._network = network
        generator = torch.Generator().manual_seed(_SEED)
        self._tokens = torch.randint(network.vocab_size, (40,), generator=generator).tolist()

    def plain(self) -> list[Tensor]:
        """Return the logits after each row's own text, as transformers computes them."""
        with torch.inference_mode():
            return [self._network.plain(text) for text in self._texts()]

    def difference(self, decoder: TransformersDecoder, wanted: Sequence[Tensor]) -> str:
        """Return how a decoder's logits differ from the wanted ones, "" if they are the same within rounding."""
        with torch.inference_mode():
            found = self._run(decoder)
        allowed, spared = _ALLOWED_16 if self._network.dtype.itemsize < 4 else _ALLOWED
        error = float(row_errors(torch.stack(found), torch.stack(list(wanted)))[-1 - spared])
        return "" if error <= allowed else f"its logits differ from those of a whole pass by {error:.2g} of the largest"

    def _run(self, decoder: TransformersDecoder) -> list[Tensor]:
        """Return the logits of each row of the passes."""
        cache, found = paged_cache(decoder.cache_shape, _BLOCKS, _BLOCK_SIZE), list[Tensor]()
        for number, inputs in enumerate(self._passes()):
            hidden = decoder.forward(build_batch(inputs, cache, self._network.device), cache.storage)
            found += decoder.logits(hidden.last)
            if number == 1:
                cache.compact(_FIRST, 7, _PATH)
                cache.truncate_to(_SECOND, _CUT)
        return found

    def _passes(self) -> list[list[SequenceInput]]:
        """Return the inputs of each pass."""
        tokens, none = self._tokens, DraftTree.empty()
        tree = DraftTree.of(tokens[7:12], _PARENTS)
        return [
            [SequenceInput(_FIRST, tokens[:6], none), SequenceInput(_SECOND, tokens[20:23], none)],
            [SequenceInput(_FIRST, tokens[6:7], tree), SequenceInput(_SECOND, tokens[23:27], none)],
            [SequenceInput(_SECOND, tokens[27:29], none), SequenceInput(_FIRST, tokens[12:15], none)],
        ]

    def _texts(self) -> list[list[int]]:
        """Return the text of each row of the passes, up to and including the row."""
        first, second, nodes = self._tokens[:7], self._tokens[20:27], self._tokens[7:12]
        drafts = [first + [nodes[node] for node in path] for path in ([0], [1], [0, 2], [0, 2, 3], [0, 4])]
        kept, cut = [*drafts[2], *self._tokens[12:15]], [*second[:_CUT], *self._tokens[27:29]]
        return [
            *_prefixes(first, 1, 6), *_prefixes(second, 1, 3),
            first, *drafts, *_prefixes(second, 4, 7),
            *_prefixes(cut, _CUT + 1, _CUT + 2), *_prefixes(kept, 10, 12),
        ]  # fmt: skip


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Return each row's largest error, as a share of the largest wanted logit, in ascending order.

    Both are logits [rows, V], where -infinity is a logit too. The error of a row with NaN is infinite.
    """
    errors = torch.where(found == wanted, 0.0, (found - wanted).abs().double())
    largest = wanted[wanted.isfinite()].abs().max()
    return (errors / largest).nan_to_num(nan=torch.inf).amax(-1).sort().values


def _prefixes(text: list[int], shortest: int, longest: int) -> list[list[int]]:
    return [text[:length] for length in range(shortest, longest + 1)]
