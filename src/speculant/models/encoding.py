"""Encodes the sources of an encoder-decoder model into a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache.paged import KVCache
from speculant.cache.sources import Source
from speculant.models.base import CausalLM, EncodesSources, SequenceInput, build_batch, known
from speculant.types import DraftTree


@torch.inference_mode()
def encode_sources(
    model: CausalLM,
    cache: KVCache,
    sources: Sequence[Source],
    keeps_states: bool = False,
    given: Sequence[Tensor] | None = None,
) -> None:
    """Encode whole sources in one pass; after an error none of them is in the cache.

    keeps_states: their `states` are kept. given: the encoder's result [tokens, hidden] of each; None = it is computed.
    """
    assert isinstance(model, EncodesSources), "the model has no encoder"
    states: Sequence[Tensor | None] = [None] * len(sources) if given is None else given
    inputs = [
        SequenceInput(source.seq_id, known(source.tokens, model.vocab_size), DraftTree.empty(), hidden=own)
        for source, own in zip(sources, states, strict=True)
    ]
    try:
        encoded, first = model.encode(build_batch(inputs, cache, model.cache_shape.device), cache.storage), 0
    except BaseException:
        for source in sources:
            cache.release(source.seq_id)
        raise
    for source in sources:
        end = first + len(source.tokens)
        source.states, first = encoded[first:end].clone() if keeps_states else None, end
