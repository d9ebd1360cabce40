"""Reads the headers of GGUF files, versions 2 and 3, little-endian: metadata, and the place of each tensor.

    "GGUF", version, number of tensors, number of metadata entries
    metadata    key, type, value
    tensors     name, dimensions (the fastest first), type, offset in the data
    data        each tensor at a multiple of `general.alignment`

A header may be damaged or hostile. Every count and size is compared with the rest of the file before memory is
allocated for it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from speculant.errors import ModelError
from speculant.files import Stamp, TensorPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

# Tokens of these names end a text, because few files have an entry for the end of a turn. Old files give some of them
# the type of ordinary text.
END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<|return|>", "<|call|>"),
        *("<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
CALLS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})  # beside these, <|end|> ends a part of a message
CONTROL = 3  # the type of special tokens
SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_ELEMENTS = 2**22  # of all arrays of a header; Gemma's, with 262,144 tokens, have a third of that
ARRAY_COST = 64  # an array within an array counts as this many elements
MOST_ENTRIES = 2**20  # of metadata, and of tensors
MOST_TEXT = 2**26  # bytes
MOST_DIMENSIONS = 4
MOST_NESTED = 4  # arrays within arrays
MOST_WEIGHTS = 2**48  # in one tensor
LEAST_ALIGNMENT, MOST_ALIGNMENT = 8, 2**20
KEPT_OPEN = 4  # headers that are kept, because the model and the tokenizer read the same one
_SHOWN = 3  # missing parts in a message
_PART = re.compile(r"(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE | re.DOTALL)
_DOWNLOAD = "download the file again."

_OPENING = Lock()
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TENSOR_END = struct.Struct("<IQ")  # type, offset
_BOOL, _STRING, _ARRAY = 7, 8, 9  # types of metadata
_NUMBERS = MappingProxyType(dict(zip((0, 1, 2, 3, 4, 5, 6, 10, 11, 12), "BbHhIifQqd", strict=True)))


class _BrokenError(Exception):
    """A header is malformed; the text says why."""


@dataclass(frozen=True, eq=False)
class GgufFile:
    """The header of a GGUF file, or of all parts of a split one. path: the file, or the first part."""

    path: Path
    metadata: Mapping[str, Any]  # str, int, float, bool, and lists of them
    tensors: Mapping[str, TensorPlace]
    parts: tuple[Path, ...]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header of a file. Any part of a split file stands for all of them.

        Raises ModelError if a part is missing, or a header is malformed or of an unknown version.
        """
        parts = parts_of(path)
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ModelError(
                f"{path.parent} lacks {', '.join(missing[:_SHOWN])}{more}, of the {len(parts)} parts of this model"
                if len(parts) > 1
                else f"there is no file {path}",
                "download the missing files into the same folder." if len(parts) > 1 else "check the path.",
            )
        try:
            stamps, now = tuple(map(Stamp.of, parts)), time.time()
            read = _open if all(stamp.is_before(now) for stamp in stamps) else _open.__wrapped__
            with _OPENING:  # a model and its tokenizer are loaded at the same time
                return read(parts, stamps)
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error}", "check that it is a file you may read.") from error


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that has the suffix or the first bytes of a GGUF file."""
    try:
        return path.is_file() and (path.suffix.lower() == SUFFIX or _magic(path) == MAGIC)
    except OSError:
        return False


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all parts of a split file, by its name and in order; else the file alone."""
    hit = _PART.fullmatch(path.name)
    if not hit or int(hit["count"]) < 2:
        return (path,)
    suffix = path.name[-len(SUFFIX) :]
    return tuple(
        path.with_name(f"{hit['name']}-{number:05d}-of-{hit['count']}{suffix}")
        for number in range(1, int(hit["count"]) + 1)
    )


def model_name(path: Path) -> str:
    """Return the name of the model in a file: that of the file without its suffix and part number."""
    hit = _PART.fullmatch(path.name)
    return hit["name"] if hit else path.stem


def name_of(source: str) -> str:
    """Return a model's name: its hub id, or that of its folder or file, without the path; see `model_name`."""
    path = Path(source)
    return model_name(path) if path.is_file() else path.resolve().name if path.exists() else source


def end_tokens(texts: Sequence[Any], types: Sequence[Any] | None) -> set[int]:
    """Return the ids of the tokens whose names say that they end a text.

    texts: all tokens of a file. types: their `tokenizer.ggml.token_type`, or None. The type matters for </s> alone,
    which is a tag of HTML in the vocabularies of Qwen and Gemma.
    """
    found = {text: index for index, text in enumerate(texts) if isinstance(text, str) and text in END_TEXTS}
    if types and "</s>" in found and types[found["</s>"]] != CONTROL:
        del found["</s>"]
    if any(names <= found.keys() for names in CALLS):
        found.pop("<|end|>", None)
    return set(found.values())


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(MAGIC))


@lru_cache(maxsize=KEPT_OPEN)
def _open(parts: tuple[Path, ...], _stamps: tuple[Stamp, ...]) -> GgufFile:
    """Read the headers of all parts. The stamps make the cache miss if a file has changed."""
    headers = [_read(part) for part in parts]
    metadata: Mapping[str, Any] = headers[0][0]
    for number, (part, (own, _)) in enumerate(zip(parts, headers, strict=True)):
        _check_part(part, own, number, len(parts))
    tensors = {name: tensor for _, found in headers for name, tensor in found.items()}
    doubled = sum(len(found) for _, found in headers) - len(tensors)
    if doubled:
        raise ModelError(f"the parts of {parts[0]} have {doubled} tensors in common", _DOWNLOAD)
    total = metadata.get("split.tensors.count", len(tensors)) if len(parts) > 1 else len(tensors)
    if total != len(tensors):
        raise ModelError(
            f"the parts of {parts[0]} hold {len(tensors)} tensors, but split.tensors.count says {total}", _DOWNLOAD
        )
    return GgufFile(parts[0], MappingProxyType(metadata), MappingProxyType(tensors), parts)


def _check_part(part: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Compare the part in a file's name with the one in its metadata; `number` is counted from 0."""
    stated = metadata.get("split.no", 0), metadata.get("split.count", 1)
    if stated == (number, count) or (count == 1 and stated[1] in (0, 1)):
        return
    named = f"its name says part {number + 1} of {count}" if count > 1 else "its name does not say so"
    what = f"part {int(stated[0]) + 1} of {stated[1]}" if all(isinstance(each, int) for each in stated) else "a part"
    raise ModelError(
        f"{part} is {what} of a split model by its metadata, but {named}",
        "name the parts as they were published: NAME-00001-of-00003.gguf.",
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """Return the metadata and the tensors of one file."""
    try:
        with _mapped(path) as data:
            return _Header(path, data).read()
    except _BrokenError as error:
        raise ModelError(f"{path} is not a usable GGUF file: {error}", _DOWNLOAD) from error


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            raise _BrokenError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


class _Header:
    """Reads a header from front to back; `_at` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        self._at, self._elements = 0, 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
        """Return metadata and tensors."""
        if self._data[: len(MAGIC)] != MAGIC:
            raise _BrokenError(f"it begins with {bytes(self._data[:4])!r}, not {MAGIC!r}")
        self._at = len(MAGIC)
        self._check_version(self._number(_U32))
        num_tensors = self._count("tensors", MOST_ENTRIES, 32)
        num_entries = self._count("metadata entries", MOST_ENTRIES, 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text("a metadata key")
            if key in metadata:
                raise _BrokenError(f"it has the metadata key {_shown(key)} twice")
            metadata[key] = self._value(key, self._number(_U32), 0)
        return metadata, self._tensors(num_tensors, _alignment(metadata))

    def _check_version(self, version: int) -> None:
        if version & 0xFFFF == 0 and version:
            raise _BrokenError("it is big-endian, and only little-endian files can be read")
        if version not in VERSIONS:
            raise _BrokenError(f"its version is {version}, and {' and '.join(map(str, VERSIONS))} can be read")

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorPlace]:
        listed = [self._tensor() for _ in range(count)]
        start = self._at + -self._at % alignment
        found: dict[str, TensorPlace] = {}
        for name, shape, type_, offset in listed:
            if name in found:
                raise _BrokenError(f"it has the tensor {_shown(name)} twice")
            if offset % alignment:
                raise _BrokenError(f"{_shown(name)} is at {offset}, which is not a multiple of {alignment}")
            kind, size = _size(name, shape, type_)
            if start + offset + size > self._size:
                raise _BrokenError(f"{_shown(name)} ends at byte {start + offset + size} and the file has {self._size}")
            found[name] = TensorPlace(self._path, shape, kind, start + offset, size)
        _check_overlaps(found)
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape, type and offset in the data."""
        name = self._text("a tensor's name")
        dimensions = self._number(_U32)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise _BrokenError(f"{_shown(name)} has {dimensions} dimensions, not 1 to {MOST_DIMENSIONS}")
        shape = struct.unpack(f"<{dimensions}Q", self._bytes(8 * dimensions))[::-1]
        type_, offset = _TENSOR_END.unpack(self._bytes(_TENSOR_END.size))
        return name, shape, type_, offset

    def _value(self, key: str, type_: int, depth: int) -> Any:
        if type_ == _STRING:
            return self._text(_shown(key))
        if type_ == _ARRAY:
            return self._array(key, depth + 1)
        return self._numbers(key, type_, 1)[0]

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth > MOST_NESTED:
            raise _BrokenError(f"{_shown(key)} has arrays nested over {MOST_NESTED} deep")
        type_ = self._number(_U32)
        cost = ARRAY_COST if type_ == _ARRAY else 1
        count = self._count(f"elements in {_shown(key)}", (MOST_ELEMENTS - self._elements) // cost, 1)
        self._elements += cost * count
        if type_ == _STRING:
            return self._texts(key, count)
        if type_ == _ARRAY:
            return [self._array(key, depth + 1) for _ in range(count)]
        return self._numbers(key, type_, count)

    def _numbers(self, key: str, type_: int, count: int) -> list[Any]:
        if type_ == _BOOL:
            return [bool(each) for each in self._bytes(count)]
        if type_ not in _NUMBERS:
            raise _BrokenError(f"{_shown(key)} is of the unknown type {type_}")
        form = struct.Struct(f"<{count}{_NUMBERS[type_]}")
        return list(form.unpack(self._bytes(form.size)))

    def _texts(self, key: str, count: int) -> list[str]:
        """Read an array of texts, which takes most of the time: a vocabulary has 150,000, and as many merges."""
        data, first, size_of, places = self._data, self._at, _U64.unpack_from, array("q", [0])
        at, end = 0, self._size - first
        try:
            for _ in range(count):
                at += 8 + size_of(data, first + at)[0]
                if at > end:
                    raise _BrokenError(f"it ends within {_shown(key)}")
                places.append(at)
        except struct.error as error:
            raise _BrokenError(f"element {len(places) - 1} of {_shown(key)} is beyond the end of the file") from error
        content = self._bytes(at)
        return _split_texts(content, places.tobytes()) or _texts_one_by_one(key, content, places)

    def _text(self, what: str) -> str:
        size = self._number(_U64)
        if size > MOST_TEXT:
            raise _BrokenError(f"{what} has {size} bytes, more than {MOST_TEXT}")
        try:
            return self._bytes(size).decode()
        except UnicodeDecodeError as error:
            raise _BrokenError(f"{what} is not valid UTF-8") from error

    def _count(self, what: str, most: int, least_size: int) -> int:
        """Read a number of things that take at least `least_size` bytes each."""
        count = self._number(_U64)
        if count > most or count * least_size > self._size - self._at:
            raise _BrokenError(f"it states {count} {what}, more than it can hold")
        return count

    def _number(self, form: struct.Struct) -> int:
        return int(form.unpack(self._bytes(form.size))[0])

    def _bytes(self, size: int) -> bytes:
        first, self._at = self._at, self._at + size
        if self._at > self._size:
            raise _BrokenError(f"its header needs {self._at} bytes and the file has {self._size}")
        return self._data[first : self._at]


@lru_cache(maxsize=4)  # a draft and its target have equal ones
def _split_texts(content: bytes, places: bytes) -> list[str]:
    """Return the texts of an array, each of which follows its size; nothing if some have zeros or are not valid UTF-8.

    A zero in place of each size separates the texts, so all are decoded at once. places: of the sizes, and the end, as
    int64. Callers must not change the list.
    """
    import numpy as np  # see `_size`

    own, at = np.frombuffer(content, np.uint8).copy(), np.frombuffer(places, np.int64)
    kept, sizes = np.ones(len(own), bool), at[:-1, None]
    own[sizes], kept[sizes + np.arange(1, _U64.size)] = 0, False
    try:
        _, *texts = own[kept].tobytes().decode().split("\0")
    except UnicodeDecodeError:
        return []
    return texts if len(texts) == len(at) - 1 else []


def _texts_one_by_one(key: str, content: bytes, places: Sequence[int]) -> list[str]:
    found = list[str]()
    try:
        for first, end in pairwise(places):
            found.append(content[first + _U64.size : end].decode())
    except UnicodeDecodeError as error:
        raise _BrokenError(f"element {len(found)} of {_shown(key)} is not valid UTF-8") from error
    return found


def _alignment(metadata: Mapping[str, Any]) -> int:
    found = metadata.get("general.alignment", 32)
    if not isinstance(found, int) or not LEAST_ALIGNMENT <= found <= MOST_ALIGNMENT or found & (found - 1):
        raise _BrokenError(
            f"general.alignment is {_shown(found)}, not a power of two from {LEAST_ALIGNMENT} to {MOST_ALIGNMENT}"
        )
    return found


def _size(name: str, shape: tuple[int, ...], type_: int) -> tuple[str, int]:
    """Return the name of a tensor's type, and its bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # a command that reads no file starts without it

    try:
        kind = GGMLQuantizationType(type_)
    except ValueError as error:
        raise _BrokenError(f"{_shown(name)} is of the type {type_}, which is unknown") from error
    weights, (of_block, size) = math.prod(shape), GGML_QUANT_SIZES[kind]
    if not 0 < weights <= MOST_WEIGHTS:
        raise _BrokenError(f"{_shown(name)} has the shape {list(shape)}, which is empty or too large")
    if shape[-1] % of_block:
        raise _BrokenError(f"{_shown(name)} has rows of {shape[-1]} weights, and {kind.name} has blocks of {of_block}")
    return kind.name, weights // of_block * size


def _check_overlaps(tensors: Mapping[str, TensorPlace]) -> None:
    placed = sorted((tensor.offset, tensor.size, name) for name, tensor in tensors.items())
    for (first, size, name), (second, _, other) in pairwise(placed):
        if first + size > second:
            raise _BrokenError(f"{_shown(name)} and {_shown(other)} overlap")


def _shown(value: object) -> str:
    """Return a name or value for a message, truncated if it is long."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
