"""A backend that another package could bring: it counts its calls, and draws greedy chains by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculant.cache import KVCache
from speculant.kernels import REFERENCE, Edits, RowDraw, Sampler, SamplingSettings
from speculant.models import (
    CausalLM,
    Chain,
    Decoder,
    DecoderConfig,
    ReferenceBackend,
    SequenceInput,
    WeightSource,
    build_batch,
)
from speculant.types import DraftTree


@dataclass(frozen=True)
class CountingSampler:
    """The reference's distributions and draws, counted."""

    calls: Counter[str]

    def distribution(
        self, logits: Tensor, settings: Sequence[SamplingSettings], edits: Sequence[Edits | None]
    ) -> Tensor:
        self.calls["distribution"] += 1
        return REFERENCE.distribution(logits, settings, edits)

    def draw(self, weights: Tensor, shared_noise: bool, key: int) -> int:
        self.calls["draw"] += 1
        return REFERENCE.draw(weights, shared_noise, key)

    def draw_rows(self, weights: Tensor, draws: Sequence[RowDraw]) -> list[int]:
        self.calls["draw"] += len(draws)
        return REFERENCE.draw_rows(weights, draws)

    def normalise(self, weights: Tensor) -> Tensor:
        return REFERENCE.normalise(weights)


class ChainModel(Decoder):
    """A decoder that draws the chains of greedy requests by itself."""

    calls: Counter[str]

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        own = [
            chain
            for chain in chains
            if chain.request.params.greedy and chain.request.drafts.shared_noise and not chain.widths
        ]
        for chain in own:
            self._draw(chain, cache)
        self.calls["chains"] += len(own)
        return [chain for chain in chains if chain not in own]

    def _draw(self, chain: Chain, cache: KVCache) -> None:
        fed = list(chain.input_tokens)
        while True:
            batch = build_batch(
                [SequenceInput(chain.request.seq_id, fed, DraftTree.empty())], cache, torch.device("cpu")
            )
            hidden = self.forward(batch, cache.storage).last
            if len(chain.tokens) < chain.limit:
                fed = [int(self.logits(hidden[-1:]).argmax())]
                chain.tokens = [*chain.tokens, *fed]
            if len(chain.tokens) >= chain.limit:
                return


@dataclass(frozen=True)
class FakeBackend:
    """See `Backend`. reason: what keeps it from computing anything, if anything does."""

    calls: Counter[str] = field(default_factory=Counter)
    reason: str | None = None
    priority: int = 5  # before the reference, behind the native kernels
    name: str = "fake"
    devices: Sequence[str] | None = ("cpu",)
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32)
    quantizations: Sequence[str] = ("fp8",)
    layouts: Collection[str] = ()
    row_invariant: bool = False

    @property
    def sampler(self) -> Sampler:
        return CountingSampler(self.calls)

    def why_not(self, config: DecoderConfig) -> str | None:
        return self.reason

    def describe(self) -> str:
        return "of a test"

    def load(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> CausalLM:
        self.calls[f"load {quantization}"] += 1
        model = ReferenceBackend().load(config, weights, dtype, device)
        model.__class__ = ChainModel
        assert isinstance(model, ChainModel)
        model.calls = self.calls
        return model
