"""The acceptance of a draft model's tokens along texts that the target writes: each model reads them in one pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculant.cache import MEASURED, Source, slotted_cache
from speculant.config import EngineConfig
from speculant.drafting import fit_vocabulary
from speculant.kernels import Sampler
from speculant.lab.theory import acceptance
from speculant.metrics import SpeculationMetrics
from speculant.models import (
    CausalLM,
    Checkpoint,
    MappedVocabulary,
    SequenceInput,
    build_batch,
    encode_sources,
    known,
    load_model,
)
from speculant.params import SamplingParams
from speculant.sampling import sampling_settings
from speculant.types import DraftTree

Array = NDArray[np.float64]
Split = Callable[[Sequence[int]], list[list[int]]]

CHUNK = 512  # rows per pass
BLOCK = 16  # tokens that count as one observation: the acceptance of neighbours is correlated
MANY = 16  # texts whose own variance is known well enough
NORMAL = 1.959964  # the quantile of a two-sided 95% interval
NOTHING = 1e-12  # a variance below this is rounding


@dataclass(frozen=True)
class Text:
    """A prompt and the target's output, as token ids. source: that of an encoder-decoder model."""

    prompt: Sequence[int]
    output: Sequence[int]
    source: Sequence[int] = ()


@dataclass(frozen=True)
class TextAcceptance:
    """Acceptance of a draft model along one text of T output tokens.

    overlap [T]: sum over the vocabulary of min(p, q), the probability that a drafted token is accepted there
    (`lab.theory.acceptance`). given [T]: min(1, q / p) at the output token (`lab/theory/speedup.py`).
    """

    overlap: Array
    given: Array


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens, with a 95% confidence interval."""

    mean: float
    low: float
    high: float
    tokens: int


class TextReader:
    """A model that reads whole texts and returns the distributions of their output tokens.

    split: returns the ids that the model reads for each token of a text, at least one; None = the token itself.
    """

    def __init__(self, model: CausalLM, sampler: Sampler, vocab_size: int, split: Split | None = None) -> None:
        self._model, self._sampler, self._vocab_size = model, sampler, vocab_size
        self._split = split or (lambda tokens: [[token] for token in tokens])

    def distributions(self, text: Text, params: SamplingParams) -> Tensor:
        """Return probs [T, V] of the output's tokens, by temperature, top-k, top-p and min-p alone."""
        logits = self.logits(text)
        settings = [sampling_settings(params)] * len(logits)
        return self._sampler.distribution(fit_vocabulary(logits, self._vocab_size), settings, [None] * len(logits))

    @torch.inference_mode()
    def logits(self, text: Text) -> Tensor:
        """Return the model's logits of the output's tokens, [T, rows of its head]."""
        read = self._split([*text.prompt, *text.output[:-1]])
        last = list(accumulate(map(len, read)))  # one more than the row of each token's last id
        states = read_text(self._model, self._known(read), self._known(self._split(text.source) if text.source else []))
        return self._model.logits(states[[row - 1 for row in last[len(text.prompt) - 1 :]]])

    def _known(self, read: Sequence[Sequence[int]]) -> Sequence[int]:
        return known([each for ids in read for each in ids], self._model.vocab_size)


@torch.inference_mode()
def read_text(model: CausalLM, tokens: Sequence[int], source: Sequence[int] = ()) -> Tensor:
    """Return a model's hidden states of a text, [tokens, hidden]: the inputs of its `logits`.

    source: what the encoder of an encoder-decoder model reads; other models ignore it.
    """
    encoded = Source(MEASURED, tuple(source)) if model.needs.source else None
    cache = slotted_cache(model.cache_shape, 1 if encoded is None else 2, max(len(tokens), len(source)))
    if encoded is not None:
        encode_sources(model, cache, [encoded])
    hidden, name = [], None if encoded is None else encoded.seq_id
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        rows = SequenceInput(1, part, DraftTree.empty(), length=len(tokens), source=name)
        hidden.append(model.forward(build_batch([rows], cache, model.cache_shape.device), cache.storage).last)
    return torch.cat(hidden)


def measure_acceptance(
    target: TextReader, draft: TextReader, texts: Sequence[Text], params: SamplingParams
) -> list[TextAcceptance]:
    """Return the acceptance along each text, without its first token, which comes with the prompt."""
    found = list[TextAcceptance]()
    for text in texts:
        whole = compare_probs(target.distributions(text, params), draft.distributions(text, params), text.output)
        found.append(TextAcceptance(whole.overlap[1:], whole.given[1:]))
    return found


def compare_probs(p: Tensor, q: Tensor, output: Sequence[int]) -> TextAcceptance:
    """Compare the target's probs p [T, V] and the draft model's q [T, V] at the output tokens [T].

    This pass may decide a near-tie otherwise, so that p excludes an output token; such a token counts as accepted with
    probability q.
    """
    chosen = torch.tensor(output, device=p.device)[:, None]
    own, drafted = p.gather(1, chosen)[:, 0], q.gather(1, chosen)[:, 0]
    given = torch.where(own > 0, drafted / own, drafted).clamp(max=1.0)
    return TextAcceptance(acceptance(p.cpu().numpy(), q.cpu().numpy()), given.cpu().numpy())


def pooled(requests: Sequence[SpeculationMetrics]) -> Estimate | None:
    """Return accepted / tested over all steps of requests (docs/references.md, metrics); None if nothing was tested.

    Under `rejection` it estimates the same alpha as the mean overlap along texts that the target writes (arXiv
    2211.17192, section 4.2). `block` and trees accept more.
    """
    texts = [_tests(each) for each in requests]
    return estimate(texts) if any(map(len, texts)) else None


def _tests(metrics: SpeculationMetrics) -> Array:
    """Return 1 for each accepted token and 0 for each rejected one, in order."""
    steps = zip(metrics.per_step_accepted, metrics.per_step_tested, strict=True)
    return np.array([float(place < accepted) for accepted, tested in steps for place in range(tested)])


def estimate(values: Sequence[Array]) -> Estimate:
    """Return the mean over the tokens of all texts, with Wilson's interval.

    The interval uses the effective number of observations: that of independent tokens for which the means of blocks
    would have the observed variance. If all blocks are alike, each counts as one observation. With MANY texts, each
    text is a block, as some are easier than others from end to end, for example one that repeats itself.
    """
    texts = [text for text in values if len(text)]
    parts = [np.array_split(text, max(1, len(text) // BLOCK)) for text in texts]
    blocks = texts if len(texts) >= MANY else [part for text in parts for part in text]
    tokens = sum(len(block) for block in blocks)
    mean = sum(float(block.sum()) for block in blocks) / tokens
    free = max(1, len(blocks) - 1)
    variance = sum(float((block - mean).sum()) ** 2 for block in blocks) / tokens**2 * len(blocks) / free
    alone = max(0.0, mean * (1 - mean))  # the variance of one token
    number = alone / variance if min(alone, variance) > NOTHING and len(blocks) > 1 else float(len(blocks))
    quantile = NORMAL * (1 + (NORMAL**2 + 1) / (4 * free))  # Student's, by the first term of its expansion
    share = quantile**2 / number
    centre = (mean + share / 2) / (1 + share)
    half = quantile / (1 + share) * math.sqrt(alone / number + share / number / 4)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), tokens)


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
