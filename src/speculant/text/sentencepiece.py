"""SentencePiece: its Unigram, the most likely of all ways to divide a text into tokens, and its files of T5 and Marian.

Folders without tokenizer.json have these. A file is a message of protocol buffers, with pieces (a text, a score and a
type) and the rules that normalise texts.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from speculant.errors import Converts, ModelError
from speculant.files import read_json

SPACE = "\u2581"  # SentencePiece's mark of a space
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # tokens of bytes of unknown characters
T5_FILE = "spiece.model"
SOURCE_FILE, IDS_FILE = "source.spm", "vocab.json"  # of Marian
SENTENCEPIECE_ROLES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}  # of both
_EXTRA = re.compile(r"<extra_id_([0-9]{1,4})>", re.ASCII)  # sentinels of T5
_LANGUAGE = re.compile(r">>.+<<")  # which a text for Marian may begin with
_UNIGRAM = 1
# Scores of tokens that Marian's source model lacks: of characters, and of longer tokens. They are so low that a text
# gets such tokens only for characters that the source model does not know.
_OTHER_CHARACTER, _OTHER_TOKEN = -1e3, -5e3
_FIX = "download the file again, or save the tokenizer as tokenizer.json with a fast tokenizer of transformers."
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of fields


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


class Piece(NamedTuple):
    """A token, its log-probability and its `TokenType`."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceFile:
    """The content of a file."""

    pieces: Sequence[Piece]
    normalisation: Normalisation

    @classmethod
    def read(cls, path: Path) -> SentencePieceFile:
        """Read a file. Raises ModelError if it is damaged, or no Unigram model."""
        with Converts(ModelError, f"{path} can't be read", "check that you may read it."):
            content = path.read_bytes()
        with Converts(ModelError, f"{path} is no usable SentencePiece file", _FIX):
            fields = list(_fields(memoryview(content)))
            trained = dict(_fields(_last(fields, 2)))
            kind = trained.get(3, _UNIGRAM)
            if kind != _UNIGRAM:
                raise ModelError(f"{path} has a model of the kind {kind}, and only Unigram models are read", _FIX)
            pieces = [_piece(value) for number, value in fields if number == 1]
            if not pieces or any(not math.isfinite(piece.score) for piece in pieces):
                raise ModelError(f"{path} has no pieces, or scores that are not numbers", _FIX)
            rules = dict(_fields(_last(fields, 3)))
            return cls(pieces, Normalisation(bytes(rules.get(2, b"")), bool(rules.get(3, 1)), bool(rules.get(4, 1))))


def find_sentencepiece(folder: Path, settings: Mapping[str, Any]) -> Backend | None:
    """Return the tokenizer of a folder's SentencePiece files; None = it has none of T5 or Marian.

    settings: the content of tokenizer_config.json. Raises ModelError.
    """
    if (folder / T5_FILE).is_file():
        return _of_t5(folder / T5_FILE, settings)
    if (folder / SOURCE_FILE).is_file() and (folder / IDS_FILE).is_file():
        return _of_marian(folder)
    return None


def _of_t5(path: Path, settings: Mapping[str, Any]) -> Backend:
    """Return the tokenizer of T5: sentinels of spans follow the pieces, the last one first."""
    file = SentencePieceFile.read(path)
    texts = [piece.text for piece in file.pieces]
    extra = {int(hit[1]): hit[0] for hit in map(_EXTRA.fullmatch, _additional(settings)) if hit and hit[0] not in texts}
    pieces = [*file.pieces, *(Piece(extra[number], 0.0, TokenType.CONTROL) for number in sorted(extra, reverse=True))]
    return _finished(path, pieces, file.normalisation)


def _additional(settings: Mapping[str, Any]) -> Iterator[str]:
    given = settings.get("additional_special_tokens")
    for each in given if isinstance(given, list) else ():
        content = each.get("content") if isinstance(each, dict) else each
        if isinstance(content, str):
            yield content


def _of_marian(folder: Path) -> Backend:
    """Return the tokenizer of Marian: the tokens of vocab.json, with the scores of the source's model.

    Source and target share one vocabulary. A text gets tokens that only the target's model has where the source's model
    does not know a character. Pieces of the source's model that vocab.json lacks are not used.
    """
    file, path = SentencePieceFile.read(folder / SOURCE_FILE), folder / IDS_FILE
    ids = read_json(path)
    texts = sorted(ids, key=lambda text: (not isinstance(ids[text], int), ids[text]))
    if not texts or [ids[text] for text in texts] != list(range(len(texts))):
        raise ModelError(f"{path} does not give tokens the ids from 0 on", "download it again.")
    known = {piece.text: piece for piece in file.pieces if piece.type == TokenType.NORMAL}
    special = {
        SENTENCEPIECE_ROLES["unk_token"]: TokenType.UNKNOWN,
        **dict.fromkeys(("</s>", "<pad>"), TokenType.CONTROL),
    }

    def piece_of(text: str) -> Piece:
        if text in special:
            return Piece(text, 0.0, special[text])
        if _LANGUAGE.fullmatch(text):
            return Piece(text, 0.0, TokenType.USER_DEFINED)
        other = _OTHER_CHARACTER if len(text) == 1 else _OTHER_TOKEN
        return known.get(text, Piece(text, other, TokenType.NORMAL))

    return _finished(path, [piece_of(text) for text in texts], file.normalisation)


def _finished(path: Path, pieces: Sequence[Piece], of: Normalisation) -> Backend:
    """Return the tokenizer of pieces by id; it adds the end token to texts."""
    texts, scores, types = zip(*pieces, strict=True)
    if len({*texts}) < len(texts):
        raise ModelError(f"{path} has a token twice", _FIX)
    end, unknown = SENTENCEPIECE_ROLES["eos_token"], SENTENCEPIECE_ROLES["unk_token"]
    if end not in texts or unknown not in texts:
        raise ModelError(f"{path} has no token {end}, or no token {unknown}", _FIX)
    with Converts(ModelError, f"{path} is no usable tokenizer", _FIX):
        backend = unigram(scored(texts, scores, types), texts.index(unknown), of)
        special = (TokenType.CONTROL, TokenType.UNKNOWN)
        backend.add_tokens([
            AddedToken(piece.text, special=piece.type in special, normalized=False)
            for piece in pieces if piece.type in (*special, TokenType.USER_DEFINED)
        ])  # fmt: skip
        backend.post_processor = processors.TemplateProcessing(
            single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, texts.index(end))]
        )
    return backend


def _piece(message: memoryview) -> Piece:
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(bytes(fields[1]).decode("utf-8"), score, int(fields.get(3, TokenType.NORMAL)))


def _last(fields: Sequence[tuple[int, Any]], number: int) -> memoryview:
    """Return the last of a message's fields with a number; an empty message if there is none."""
    found = [value for each, value in fields if each == number]
    return found[-1] if found else memoryview(b"")


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: whole numbers, and others as bytes. Raises ValueError."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(message, place)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field of the kind {kind}")
        if size > len(message) - place:
            raise ValueError("a field beyond the end")
        yield number, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Return a whole number and the place after it."""
    value = 0
    for count in range(10):
        if place + count >= len(message):
            break
        byte = message[place + count]
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value, place + count + 1
    raise ValueError("a number beyond the end")
