"""How far a model's distributions are from a reference model's along a text.

For each scored position: the divergence KL(reference || judged) in nats, whether both give the highest probability to
the same token, and the negative log-probability that each gives to the next token of the text.

Positions are as in llama.cpp's llama-perplexity. The text is tokenised once, by the reference's tokenizer, and cut
into chunks of `context` tokens; the rest is left out. Chunks are read one by one. The first half of a chunk is context
alone; each later position predicts its next token, so the last one is not scored. If the tokenizer begins texts with a
token, each chunk's first token is replaced by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculant.config import EngineConfig
from speculant.errors import ConfigError, ModelError, PairError, RequestError
from speculant.lab.bench.pair import NORMAL, Array, Model, read_text
from speculant.models import PLAIN, CausalLM, Checkpoint, KnowsSizes, load_model, resolve_source
from speculant.text import Tokenizer, compare_vocabularies

LEAST_CONTEXT = 8
_PERCENTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}  # of the divergence
_FEW = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646)  # Student's quantiles for 1 to 7
_LOGITS = 2**23  # that are computed at a time: 64 MiB in float64


class ChunkScores(NamedTuple):
    """The figures of a chunk's scored positions, [n] each. nll: negative log-probabilities in nats."""

    divergence: Array
    agrees: Array  # 1 or 0
    reference_nll: Array
    judged_nll: Array


@dataclass(frozen=True)
class Interval:
    """A mean over positions with its 95% interval. error: the standard error of the mean. None = there is one chunk."""

    mean: float
    low: float | None = None
    high: float | None = None
    error: float | None = None

    @classmethod
    def of(cls, chunks: Sequence[Array], least: float = -math.inf, most: float = math.inf) -> Interval:
        """Return the mean over chunks of equal length, whose means are taken as independent.

        least, most: the values that a mean can have at all.
        """
        means = np.array([chunk.mean() for chunk in chunks])
        mean = float(means.mean())
        if len(means) == 1:
            return cls(mean)
        error = float(means.std(ddof=1) / math.sqrt(len(means)))
        half = _student(len(means) - 1) * error
        return cls(mean, max(least, mean - half), min(most, mean + half), error)

    def exp(self) -> Interval:
        """Return the interval of the exponential: the perplexity of a mean negative log-probability."""
        low, high = (None if each is None else _exp(each) for each in (self.low, self.high))
        mean = _exp(self.mean)
        return Interval(mean, low, high, None if self.error is None else mean * self.error)


@dataclass(frozen=True)
class QualityText:
    """A text that is cut into chunks of tokens. tokens: of the whole text."""

    chunks: Sequence[Sequence[int]]
    tokens: int

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer, context: int, most: int) -> QualityText:
        """Read a file in UTF-8 and cut its first `most` tokens.

        Raises RequestError for a file that can't be read or is shorter than a chunk, ConfigError for other sizes.
        """
        if context < LEAST_CONTEXT:
            raise ConfigError(f"context={context} is too few tokens", f"use --context {LEAST_CONTEXT} or more.")
        if most < context:
            raise ConfigError(f"tokens={most} is less than a chunk of {context}", f"use --tokens {context} or more.")
        try:
            tokens = tokenizer.encode(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the text {str(path)!r} can't be read: {error}", "name a UTF-8 text file.") from error
        if len(tokens) < context:
            raise RequestError(
                f"{path} has {len(tokens)} tokens, and a chunk has {context}",
                "name a longer text, best of 10,000 tokens or more, or lower --context.",
            )
        begins = tokenizer.encode("")[:1]
        count = min(len(tokens), most) // context
        cut = [tokens[place * context : (place + 1) * context] for place in range(count)]
        return cls([[*begins, *chunk[len(begins) :]] for chunk in cut], len(tokens))


@dataclass(frozen=True)
class Compared:
    """A reference model and the one that is judged, which have the same vocabulary.

    columns: logits that are compared; a head may have more, for padding.
    """

    reference: Checkpoint
    judged: Checkpoint
    columns: int

    @classmethod
    def load(cls, reference: EngineConfig, judged: EngineConfig) -> Compared:
        """Load both models. Raises PairError if their vocabularies differ, and the errors of `load_model`.

        Raises RequestError for an encoder-decoder model.
        """
        sides = reference, judged
        _check_vocabularies(*(Tokenizer.load(resolve_source(side.model)) for side in sides))
        a, b = (
            load_model(
                side.model, side.dtype, side.device, kernels=side.kernels, quantization=side.quantization,
                weight_packing=PLAIN, weight_cache=side.weight_cache_folder(), kv_cache_dtype=side.kv_cache_dtype,
            )
            for side in sides
        )  # fmt: skip
        for each in (a, b):
            if each.model.needs.source:
                raise RequestError(
                    f"{each.name} is an encoder-decoder: its distributions depend on a source, which a text lacks",
                    "compare models without an encoder.",
                )
        return cls(a, b, min(a.model.vocab_size, b.model.vocab_size))

    def check(self, text: QualityText) -> None:
        """Check that both models can read a text. Raises RequestError."""
        context, largest = len(text.chunks[0]), max(map(max, text.chunks))
        for each in (self.reference, self.judged):
            if context > (most := each.model.max_positions):
                raise RequestError(f"{each.name} reads at most {most} tokens, not {context}", f"use --context {most}.")
            if largest >= each.model.vocab_size:
                raise RequestError(
                    f"the text has the token {largest}, and {each.name} has {each.model.vocab_size}",
                    "use a text without this token, or a model that has it.",
                )

    def scores(self, text: QualityText) -> Iterator[ChunkScores]:
        """Yield the scores of each chunk. Raises ModelError for logits that are not finite."""
        for chunk in text.chunks:
            yield self._chunk(chunk)

    @torch.inference_mode()
    def _chunk(self, tokens: Sequence[int]) -> ChunkScores:
        first = len(tokens) // 2
        reference, judged = (read_text(each.model, tokens)[first:-1] for each in (self.reference, self.judged))
        next_tokens = torch.tensor(tokens[first + 1 :], device=reference.device)
        step = max(1, _LOGITS // self.columns)
        parts = []
        for start in range(0, len(next_tokens), step):
            rows = slice(start, start + step)
            p, q = self._logits(self.reference, reference[rows]), self._logits(self.judged, judged[rows])
            parts.append(compare_logits(p, q, next_tokens[rows]))
        return ChunkScores(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _logits(self, of: Checkpoint, states: Tensor) -> Tensor:
        """Return a model's logits [r, columns] in float64."""
        logits = of.model.logits(states)[:, : self.columns].double()
        if not bool(logits.isfinite().all()):
            raise ModelError(
                f"{of.name} ({of.kernels}) has logits that are not finite",
                "check the checkpoint, or load it in another type: its weights may be damaged or too large.",
            )
        return logits


def compare_logits(reference: Tensor, judged: Tensor, next_tokens: Tensor) -> ChunkScores:
    """Compare logits [r, V] in float64 of positions that the tokens [r] follow."""
    p, q = reference.log_softmax(1), judged.log_softmax(1)
    divergence = (p.exp() * (p - q)).sum(1).clamp(min=0)  # rounding can make it negative
    agrees = reference.argmax(1) == judged.argmax(1)
    given = [-each.gather(1, next_tokens[:, None])[:, 0] for each in (p, q)]
    return ChunkScores(*(each.double().cpu().numpy() for each in (divergence, agrees, *given)))


def quality_document(models: Compared, path: Path, text: QualityText, scores: Sequence[ChunkScores]) -> dict[str, Any]:
    """Return the figures of the chunks that were compared, at least one, as `--json` prints them."""
    divergence, agrees, reference, judged = zip(*scores, strict=True)
    tail = zip(_PERCENTILES, np.percentile(np.concatenate(divergence), [*_PERCENTILES.values()]), strict=True)
    return {
        "benchmark": "quality",
        "reference": _model(models.reference),
        "judged": _model(models.judged),
        "text": {
            "file": str(path),
            "tokens": text.tokens,
            "context": len(text.chunks[0]),
            "chunks": len(scores),
            "chunks_of_text": len(text.chunks),
            "scored": sum(map(len, divergence)),
        },
        "kl": asdict(Interval.of(divergence, least=0)) | {name: float(value) for name, value in tail},
        "top_1": asdict(Interval.of(agrees, least=0, most=1)),
        "perplexity": {
            "reference": asdict(Interval.of(reference).exp()),
            "judged": asdict(Interval.of(judged).exp()),
            "ratio": asdict(Interval.of([b - a for a, b in zip(reference, judged, strict=True)]).exp()),
        },
    }


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # the exponential of a larger number overflows


def _student(free: int) -> float:
    """Return Student's quantile of a two-sided 95% interval; free >= 1. Large ones by an expansion's first terms."""
    if free <= len(_FEW):
        return _FEW[free - 1]
    z = NORMAL
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / float(free) ** power for power, term in enumerate(terms, start=1))


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**asdict(Model.of(checkpoint)), "weight_bytes": weight_bytes(checkpoint.model)}


def weight_bytes(model: CausalLM) -> int | None:
    """Return the bytes of a model's matrices in memory; None = it does not know them."""
    return model.weight_bytes if isinstance(model, KnowsSizes) else None


def _check_vocabularies(reference: Tokenizer, judged: Tokenizer) -> None:
    """Check that ids that both have are the same tokens. Raises PairError."""
    try:
        compare_vocabularies(reference, judged)
    except PairError as error:
        detail = error.problem.partition(": ")[2].replace("the target", "A").replace("the draft", "B")
        raise PairError(
            f"A and B have different vocabularies: {detail}", "compare models that have the same tokenizer."
        ) from None
