"""What a target and a draft of another tokenizer share: tokens, probability, and the cost of reading texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.config import EngineConfig
from speculant.lab.bench.acceptance import Split, Text, TextReader
from speculant.models import Checkpoint, MappedVocabulary, TargetVocabulary, load_model


@dataclass(frozen=True)
class SharedTokens:
    """Figures along texts that the target writes.

    shared: tokens that both have, of the target's `size`. target_mass, draft_mass: the mean probability of these tokens
    in each model's own distribution, at temperature 1 and before the draft's is renormalised. No draft is accepted with
    a higher probability than target_mass. draft_tokens_per_token: how many tokens the draft reads for each of the
    target's. read_us_per_token: microseconds for each of the target's tokens to find them, if it has come before.
    """

    shared: int
    size: int
    target_mass: float
    draft_mass: float
    draft_tokens_per_token: float
    read_us_per_token: float

    @property
    def verdict(self) -> str:
        """The figures in words."""
        return (
            f"the vocabularies differ: they share {self.shared} of the target's {self.size} tokens, which have"
            f" {self.target_mass:.1%} of the target's probability and {self.draft_mass:.1%} of the draft's, so at most"
            f" {self.target_mass:.1%} of the drafted tokens can be accepted at temperature 1; for a token of the target"
            f" the draft reads {self.draft_tokens_per_token:.2f} of its own, found in {self.read_us_per_token:.2g} us"
        )


def split_of(vocabulary: TargetVocabulary | None) -> Split | None:
    """Return how a draft model with a vocabulary reads texts, see `TextReader`."""
    return vocabulary.split if isinstance(vocabulary, MappedVocabulary) else None


def measure_shared(
    config: EngineConfig, target: Checkpoint, vocabulary: MappedVocabulary, texts: Sequence[Text]
) -> SharedTokens:
    """Measure on texts how much the configured pair shares. Loads the draft again, with its whole head."""
    draft = load_model(
        str(config.draft_model), config.dtype, config.device, role="draft", kernels=config.kernels,
        kv_cache_dtype=config.kv_cache_dtype,
    )  # fmt: skip

    def split(tokens: Sequence[int]) -> list[list[int]]:
        return [vocabulary.draft_tokens(each) for each in vocabulary.split(tokens)]

    sampler, tokens = target.backend.sampler, [each for text in texts for each in (*text.prompt, *text.output)]
    rows = [row for row in vocabulary.shared.values() if row < draft.model.vocab_size]
    vocabulary.read(tokens)  # each token is spelt once
    started = time.perf_counter()
    read = vocabulary.read(tokens)
    seconds = time.perf_counter() - started
    return SharedTokens(
        len(vocabulary.shared),
        vocabulary.size,
        _mass(TextReader(target.model, sampler, vocabulary.size).logits, texts, [*vocabulary.shared]),
        _mass(TextReader(draft.model, sampler, draft.model.vocab_size, split).logits, texts, rows),
        len(read) / len(tokens),
        1e6 * seconds / len(tokens),
    )


def _mass(logits: Callable[[Text], Tensor], texts: Sequence[Text], tokens: Sequence[int]) -> float:
    """Return the mean probability of some tokens along texts."""
    return float(torch.cat([logits(text).double().softmax(-1)[:, tokens].sum(-1) for text in texts]).mean())
