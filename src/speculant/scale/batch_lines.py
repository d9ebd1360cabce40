"""The format of batch files, which is OpenAI's: one request a line, one result a line.

A result's `id` is `batch_req_<number>_<digest>_<origin>`: the number of its line in the input, a digest of that line,
and those of its `Origin`. By these a later run knows which lines are done, also those without a `custom_id`, and with
which model and settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from speculant.config import EngineConfig
from speculant.files import parse_json
from speculant.serving import ServerOptions, encode

# Others change speed, or which requests are refused: with a lossless rule, neither drafts nor neighbours change a text.
SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "model_backend", "kernels", "seed", "device")
_OPTIONS = ("tool_parser", "per_request_spec_decode_metrics")
_KINDS = frozenset({".gguf", ".jinja", ".json", ".model", ".safetensors", ".txt"})
_SAMPLES, _SAMPLE = 64, 16_384  # of a file: how many, and their bytes; weights of two models differ almost everywhere
_BYTES = 4  # of each digest
URLS = ("/v1/chat/completions", "/v1/completions")
MOST_BYTES = 64 * 2**20  # of a line
RECORD_HEAD = b'{"id":"batch_req_'  # the beginning of every result
_RECORD = re.compile(rb'\{\s*"id"\s*:\s*"batch_req_(\d{1,15})_([0-9a-f]{16})_([0-9a-f]{8})([0-9a-f]{8})"')
_REST = 2**20  # bytes of a long line to skip at a time
_FORM = 'write {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'


@dataclass(frozen=True)
class Origin:
    """The digests of a model and of settings."""

    model: str = "0" * 2 * _BYTES
    settings: str = "0" * 2 * _BYTES

    @classmethod
    def of(cls, places: Iterable[Path], config: EngineConfig, options: ServerOptions) -> Origin:
        """Return the origin of a server's answers. places: of the target, and of a tokenizer that replaces its own."""
        drafting = config.speculative()
        settings = [getattr(config, name) for name in SETTINGS] + [getattr(options, name) for name in _OPTIONS]
        settings.append("auto" if drafting is None else drafting.verification)
        return cls(_digest(_facts(places)), _digest([json.dumps(settings, default=str).encode()]))


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _facts(places: Iterable[Path]) -> Iterator[bytes]:
    """Yield names, sizes and samples of models' files. A folder may have moved."""
    for place in places:
        inner = sorted(each for each in place.iterdir() if each.suffix.lower() in _KINDS) if place.is_dir() else [place]
        for path in inner:
            size = path.stat().st_size
            yield from (path.name.encode(), str(size).encode())
            with path.open("rb") as file:
                for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                    file.seek(start)
                    yield file.read(_SAMPLE)


@dataclass(frozen=True)
class LineError:
    """The reason why a line has no response."""

    code: str
    message: str


@dataclass(frozen=True)
class BatchLine:
    """One line of the input. number: counted from 1. digest: of its bytes, not 0.

    problem: why it is no request; url, body, sequences and order are then empty. body: JSON. sequences: how many run in
    the engine for it. order: lines that are sorted by it have those with the same beginning of the prompt side by side.
    """

    number: int
    digest: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    sequences: int = 0
    order: tuple[str, ...] = ()
    problem: LineError | None = None


@dataclass(frozen=True)
class LineAnswer:
    """A server's response to a line. body: one JSON document."""

    status: int
    request_id: str
    body: bytes


class RawLine(NamedTuple):
    """A line of a file. data: its first bytes, size: how many there are. whole: it ends with a newline."""

    offset: int
    data: bytes
    size: int
    whole: bool


class RecordName(NamedTuple):
    """The parts of a result's `id`: the number of a line, its digest, and a digest of the model and the settings."""

    number: int
    digest: int
    origin: Origin


def raw_lines(file: BinaryIO, most: int = MOST_BYTES + 1) -> Iterator[RawLine]:
    """Yield the lines of a file from its current position, with at most this many bytes of each."""
    offset = file.tell()
    while data := file.readline(most):
        size, last = len(data), data
        while not last.endswith(b"\n") and (last := file.readline(_REST)):
            size += len(last)
        yield RawLine(offset, data, size, last.endswith(b"\n"))
        offset += size


def digest_of(data: bytes) -> int:
    """Return the digest of a line; 0 stands for an empty one."""
    text = data.removeprefix(b"\xef\xbb\xbf").strip()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) or 1 if text else 0


def custom_id_of(data: bytes) -> str | None:
    """Return the custom_id of a line, if it has one."""
    try:
        return _custom_id(_parse(data))
    except _RefusedError:
        return None


def read_line(number: int, data: bytes) -> BatchLine:
    """Return a line; if it is no request, with the reason."""
    digest, custom_id = digest_of(data), None
    try:
        value = _parse(data)
        custom_id = _custom_id(value)
        _check(value, custom_id)
        url, body = value["url"], value["body"]
        return BatchLine(number, digest, custom_id, url, _encoded(body), _sequences(body), _order(url, body))
    except _RefusedError as error:
        problem = LineError(error.code, f"line {number}: {error.message}")
        return BatchLine(number, digest, custom_id, problem=problem)


def duplicate(line: BatchLine, first: int) -> BatchLine:
    """Return a line as one whose custom_id an earlier line has."""
    text = f"line {line.number}: custom_id {line.custom_id!r} is that of line {first} too; give each line its own"
    return BatchLine(line.number, line.digest, line.custom_id, problem=LineError("duplicate_custom_id", text))


def success(line: BatchLine, answer: LineAnswer, origin: Origin) -> bytes:
    """Return the result of a line with a response, which may be an error of the server."""
    body = answer.body if b"\n" not in answer.body else encode(json.loads(answer.body))
    response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (answer.status, encode(answer.request_id), body)
    return _record(line, origin, response, b"null")


def failure(line: BatchLine, error: LineError, origin: Origin) -> bytes:
    """Return the result of a line without a response."""
    return _record(line, origin, b"null", encode({"code": error.code, "message": error.message, "line": line.number}))


def read_record(data: bytes) -> RecordName | None:
    """Return the name in the beginning of a result; None if it is no result."""
    found = _RECORD.match(data)
    if found is None:
        return None
    return RecordName(int(found[1]), int(found[2], 16), Origin(found[3].decode(), found[4].decode()))


def is_torn(data: bytes) -> bool:
    """Whether a last line without a newline is the beginning of a result. A system that crashed may leave zeros."""
    text = data.rstrip(b"\0")
    return RECORD_HEAD.startswith(text[: len(RECORD_HEAD)])


def _record(line: BatchLine, origin: Origin, response: bytes, error: bytes) -> bytes:
    made_with = f"{origin.model}{origin.settings}".encode("ascii")
    name, custom_id = b"%d_%016x_%s" % (line.number, line.digest, made_with), encode(line.custom_id)
    return b'%s%s","custom_id":%s,"response":%s,"error":%s}\n' % (RECORD_HEAD, name, custom_id, response, error)


class _RefusedError(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def _parse(data: bytes) -> dict[str, Any]:
    if len(data) > MOST_BYTES:
        raise _RefusedError("line_too_long", f"it has over {MOST_BYTES} bytes; split it")
    try:
        value = parse_json(data.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _RefusedError("invalid_json", f"it is not UTF-8 ({error}); encode it in UTF-8") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise _RefusedError("invalid_json", f"it is not valid JSON ({reason}); {_FORM}") from None
    if not isinstance(value, dict):
        raise _RefusedError("invalid_json", f"it is not a JSON object; {_FORM}")
    return value


def _custom_id(value: Mapping[str, Any]) -> str | None:
    custom_id = value.get("custom_id")
    return custom_id if isinstance(custom_id, str) and custom_id else None


def _check(value: Mapping[str, Any], custom_id: str | None) -> None:
    if custom_id is None:
        raise _RefusedError("missing_custom_id", "custom_id is missing or no text; give each line its own")
    if (method := value.get("method")) != "POST":
        raise _RefusedError("invalid_method", f"method is {_shown(method)}; write POST")
    if (url := value.get("url")) not in URLS:
        raise _RefusedError("invalid_url", f"url is {_shown(url)}; write {' or '.join(URLS)}")
    if not isinstance(body := value.get("body"), dict):
        raise _RefusedError("invalid_body", f"body is {_shown(body)}; write the JSON object of a request")
    if body.get("stream"):
        raise _RefusedError("invalid_body", "body.stream is set, and results are whole; leave it out")


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return encode(body)
    except RecursionError:
        raise _RefusedError("invalid_json", "body is nested too deep") from None


def _sequences(body: Mapping[str, Any]) -> int:
    """Return how many sequences a request becomes; the server checks the numbers."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    counts = [body.get(name) for name in ("n", "best_of", "beam_width")]
    widest = max((count for count in counts if isinstance(count, int)), default=1)
    return max(1, widest) * (len(prompt) if several and isinstance(prompt, list) else 1)


def _order(url: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a key for sorting: what prompts with a common beginning have in common, then the prompt's text."""
    named = [json.dumps(body.get(name), sort_keys=True) for name in ("model", "cache_salt", "tools")]
    return (url, *named, json.dumps(body.get("messages", body.get("prompt"))))
