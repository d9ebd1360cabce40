"""Weights whose matrices have types of their own, as GGUF files store them, and the same weights in float32."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from speculant.models import FLOATS, Decoder, QuantizedBlocks, WeightSource, kind_of, read_plain, tensor_shapes
from tests.gguf_blocks import encode


class ModuleWeights(WeightSource):
    """The parameters of a module in memory; a parameter that two layers share has the name of the first."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())

    def names(self) -> Collection[str]:
        return self._parameters.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._parameters[name].shape)

    def kind(self, name: str) -> str:
        return kind_of(self._parameters[name])

    def read(self, name: str) -> Tensor:
        return self._parameters[name].detach()


@dataclass(frozen=True)
class StoredAs(WeightSource):
    """A source in which matrices are stored in other kinds. kinds: by the end of a name; the first match counts."""

    source: WeightSource
    kinds: Mapping[str, str]

    def names(self) -> Collection[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def kind(self, name: str) -> str:
        found = [kind for end, kind in self.kinds.items() if name.endswith(end) and len(self.shape(name)) == 2]
        return (found or [self.source.kind(name)])[0]

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        stored, kind = read_plain(self.source, name), self.kind(name)
        if kind in FLOATS:
            return stored.to(FLOATS[kind])
        blocks = encode(kind, np.asarray(stored.float().numpy()))
        return QuantizedBlocks(kind.lower(), tuple(stored.shape), torch.from_numpy(blocks))


def decoded(decoder: Decoder, weights: WeightSource) -> Decoder:
    """Return a decoder in float32 with the numbers of a source."""
    model = copy.deepcopy(decoder).float()
    for name, parameter in model.named_parameters():
        parameter.copy_(read_plain(weights, name))
    model.tie_head()
    return model


def stored(decoder: Decoder, kinds: Mapping[str, str]) -> StoredAs:
    """Return a decoder's weights in these kinds."""
    assert {name for name, _ in decoder.named_parameters()} == tensor_shapes(decoder.config).keys()
    return StoredAs(ModuleWeights(decoder), kinds)
