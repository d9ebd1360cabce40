"""SentencePiece's Unigram: the most likely of all ways to divide a text into tokens, by their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import Regex, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers

SPACE = "\u2581"  # SentencePiece's mark of a space
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # tokens of bytes of unknown characters


class TokenType(IntEnum):
    """SentencePiece's types of tokens, which GGUF files have too."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Normalisation:
    """How a text is normalised before it is divided into tokens.

    charsmap: SentencePiece's table of replacements; b"" = none. prefixed: a space is put before the text. trimmed:
    spaces are removed at both ends, and repeated spaces become one.
    """

    charsmap: bytes = b""
    prefixed: bool = True
    trimmed: bool = True

    @property
    def marks_words(self) -> bool:
        """Whether all kinds of spaces separate words, and each word gets a mark, as in transformers for T5."""
        return self.prefixed and self.trimmed


def unigram(pieces: Sequence[tuple[str, float]], unknown: int | None, of: Normalisation) -> Backend:
    """Return a tokenizer of tokens with scores, without added tokens and without tokens around a text.

    unknown: the token of unknown characters, unless there are tokens of all bytes; None = there is none.
    """
    falls_back = {text for text, _ in pieces} >= set(BYTES)
    backend = Backend(models.Unigram(list(pieces), unknown, falls_back))
    steps: list[normalizers.Normalizer] = []
    if of.charsmap:
        steps.append(normalizers.Precompiled(of.charsmap))
    if of.trimmed and not of.prefixed:
        steps.append(normalizers.Replace(Regex(r"^ +| +$|(?<= ) +"), ""))
    if of.prefixed and not of.trimmed:
        steps.append(normalizers.Prepend(SPACE))
    if steps:
        backend.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
    # Without a division into words, runs of spaces can be tokens.
    spaces = pre_tokenizers.Metaspace(SPACE, "always" if of.marks_words else "never", split=of.trimmed)
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    backend.pre_tokenizer = words if of.marks_words else spaces
    marks = [decoders.ByteFallback(), decoders.Metaspace(SPACE, "always")]
    marked = decoders.Sequence(marks if falls_back else marks[1:])
    backend.decoder = marked if of.marks_words else joining_decoder(of.prefixed)
    return backend


def joining_decoder(prefixed: bool) -> decoders.Decoder:
    """Return the decoder that joins tokens and bytes to a text. prefixed: it removes the first space."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)


def scored(texts: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, float]]:
    """Return all tokens but unused ones at the end, by id, with their scores.

    The tokenizer scores an unknown character a little below the lowest of these scores. So only normal tokens set the
    lowest: unused tokens and bytes get the lowest score of normal tokens, and all other tokens get 0.
    """
    lowest = min((score for score, kind in zip(scores, types, strict=True) if kind == TokenType.NORMAL), default=0.0)
    count = max((place + 1 for place, kind in enumerate(types) if kind != TokenType.UNUSED), default=0)
    others: dict[int, float] = {TokenType.UNUSED: lowest, TokenType.BYTE: lowest}
    return [
        (text, score if kind == TokenType.NORMAL else others.get(kind, 0.0))
        for text, score, kind in zip(texts[:count], scores, types, strict=False)
    ]
