"""Files of batches: their lines, which of these have no result yet, and what answers them.

The format is OpenAI's: one request a line, one result a line. A result's `id` is
`batch_req_<number>_<digest>_<origin>`: the number of its line in the input, a digest of that line, and digests of its
`Origin`. By these a later run knows which lines are done, also those without a `custom_id`, and with which model and
settings.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

import numpy as np
from fastapi import FastAPI
from starlette.types import ASGIApp

from speculant.config import EngineConfig
from speculant.errors import ConfigError, RequestError, ServerError, SpeculantError
from speculant.files import parse_json
from speculant.serving import InsideRequest, ServerOptions, encode, whole_response

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


logger = logging.getLogger(__name__)

Answerer = Callable[[BatchLine], Awaitable[LineAnswer]]
_BUSY = frozenset({429, 503})  # a server that may accept the line later
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0  # between two tries
_TRIES_ALONE = 8  # refusals of a line beside which no other runs: about 6 seconds. It is not refused for its neighbours


class Lines(Protocol):
    """Lines without results, and where results go; such as a `BatchJob`."""

    def pending(self) -> Iterator[BatchLine]:
        """Yield the lines."""

    def record(self, line: BatchLine, result: LineAnswer | LineError) -> None:
        """Keep a line's result."""


async def answer_lines(job: Lines, answerer: Answerer, places: int) -> None:
    """Give every pending line to an answerer and write its result. Cancelling this cancels the answers.

    places: how many sequences run or wait at a time; a line with more runs alone. A busy answer (429, 503) is asked for
    again. A SpeculantError of the answerer, or of the files, ends the run; any other error is the line's result.
    """
    room = Room(places)
    try:
        async with asyncio.TaskGroup() as tasks:
            for line in job.pending():
                if line.problem is not None:
                    job.record(line, line.problem)
                    continue
                await room.take(line.sequences)
                tasks.create_task(_answer(job, line, answerer, room))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _answer(job: Lines, line: BatchLine, answerer: Answerer, room: Room) -> None:
    try:
        result: LineAnswer | LineError = await _patient(line, answerer, room)
    except SpeculantError:
        raise
    except Exception as error:
        logger.exception("line %d failed", line.number)
        result = LineError("internal_error", f"line {line.number}: {type(error).__name__}: {error}")
    finally:
        room.give(line.sequences)
    job.record(line, result)


async def _patient(line: BatchLine, answerer: Answerer, room: Room) -> LineAnswer:
    """Return a line's answer; a busy one only if the line is refused without any other."""
    wait, alone = _FIRST_WAIT_S, 0
    while True:
        answer = await answerer(line)
        if answer.status not in _BUSY:
            return answer
        alone = alone + 1 if room.held == line.sequences else 0
        if alone == _TRIES_ALONE:
            return answer
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)


class Room:
    """Places for sequences. `take` is for one task alone, the one that reads the lines."""

    def __init__(self, places: int) -> None:
        self._places, self._freed = places, asyncio.Event()
        self.held = 0

    async def take(self, count: int) -> None:
        """Wait until there are so many places, or until none is taken."""
        while self.held and self.held + count > self._places:
            self._freed.clear()
            await self._freed.wait()
        self.held += count

    def give(self, count: int) -> None:
        """Return places."""
        self.held -= count
        self._freed.set()


def places_of(app: FastAPI) -> int:
    """Return how many sequences fill an application's engine: all that run, and as many that wait."""
    limits = app.state.server.engine.limits
    return int(limits.max_num_seqs + min(limits.max_num_seqs, limits.max_waiting))


def inside(app: ASGIApp) -> Answerer:
    """Return what asks an application in this process, which answers as it answers its clients.

    Raises ServerError once its engine has failed.
    """

    async def answer(line: BatchLine) -> LineAnswer:
        request = InsideRequest("POST", line.url, line.body, ((b"content-type", b"application/json"),))
        head, body = await whole_response(app, request)
        if head.status == 503 and json.loads(body)["error"]["code"] == "engine_failed":
            raise ServerError("the engine has failed", "give the same command again: it goes on from here.")
        return LineAnswer(head.status, dict(head.headers).get(b"x-request-id", b"").decode("ascii"), body)

    return answer


_ID_BYTES = 16  # of a custom_id's digest: two of 10**9 ids are the same with a probability of 10**-20
_HEAD_BYTES = 128  # of a result: enough for its name
Write = Callable[[int, bytes], int]  # os.write, or one that fails in tests
WINDOW_LINES, WINDOW_BYTES = 10_000, 64 * 2**20  # that are read, sorted and held at a time
_SYNC_S = 5.0  # seconds of results that a machine that loses its power may lose; they are computed again
_FAILED = 400  # the first status of a failed request


class BatchSource:
    """The lines of a file. It keeps the place and the digest of each, 16 bytes, and no text.

    While it is made, it takes about 70 bytes a line, to find equal custom_ids.

    digests: by line, the first one at place 0; 0 = an empty line, which is none. count: of the others.
    """

    def __init__(self, path: Path) -> None:
        """Read the whole file. Raises ConfigError if it can't be read."""
        if not path.is_file():
            problem = "is no file that can be read again" if path.exists() or str(path) == "-" else "does not exist"
            raise ConfigError(f"the input {path} {problem}", "name a file; a run that goes on reads it again.")
        self.path, self.digests, self._offsets = path, array("Q"), array("Q")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(
                f"the input {path} can't be read: {error.strerror}", "name a file you may read."
            ) from None
        owners, ids = array("Q"), bytearray()
        for line in raw_lines(self._file):
            self._offsets.append(line.offset)
            self.digests.append(digest_of(line.data))
            if (custom_id := custom_id_of(line.data)) is not None:
                owners.append(len(self.digests))
                ids += hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest()
        self.count = sum(digest != 0 for digest in self.digests)
        self._firsts = _first_owners(owners, ids)

    def read(self, number: int) -> BatchLine:
        """Return a line. Raises RequestError if the file has changed since it was read."""
        offset = self._offsets[number - 1]
        if self._file.tell() != offset:
            self._file.seek(offset)
        data = self._file.readline(MOST_BYTES + 1)
        line = read_line(number, data)
        if line.digest != self.digests[number - 1]:
            raise RequestError(
                f"line {number} of {self.path} has changed during the run", "leave the file as it is, and run again."
            )
        first = self._firsts.get(number)
        return line if first is None else duplicate(line, first)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _first_owners(owners: array[int], ids: bytearray) -> dict[int, int]:
    """Return, for each line with the custom_id of an earlier one, the first line that has it."""
    digests = np.frombuffer(ids, dtype=np.uint64).reshape(-1, _ID_BYTES // 8)
    order = np.lexsort(digests.T)  # stable: lines with the same id keep their order
    ordered = digests[order]
    firsts: dict[int, int] = {}
    for place in np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1)):
        before, number = owners[order[place]], owners[order[place + 1]]
        firsts[number] = firsts.get(before, before)
    return firsts


class ResultFile:
    """A file that grows by whole lines.

    Each line is written by one call at the end of the file. A kill in the middle of it leaves the beginning of a line
    at the end, which `records` cuts off.
    """

    def __init__(self, path: Path, write: Write = os.write) -> None:
        """Open or make the file. Raises ConfigError if another run has it, or if it can't be written."""
        self.path, self._write = path, write
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}", "name a file you may write.") from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise ConfigError(f"{path} is no file that can be read again", "name a file for results.")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"another run of `speculant batch` writes to {path}", "wait until it ends, or name another file."
            ) from None
        self._size = self._synced = os.fstat(self._file).st_size
        self._is_on_disk = self._size == 0

    def records(self) -> Iterator[RecordName]:
        """Yield the results that the file has, then cut off a half-written last line.

        Raises ConfigError for a line that is no result of a batch; the file is then left as it is. Raises as `sync`.
        """
        end = 0
        with self.path.open("rb") as file:
            for place, line in enumerate(raw_lines(file, _HEAD_BYTES), 1):
                name = read_record(line.data)
                if line.whole and name is not None:
                    yield name
                    end = line.offset + line.size
                elif line.whole or not is_torn(line.data):
                    raise ConfigError(
                        f"line {place} of {self.path} is no result of `speculant batch`",
                        "name another file for results.",
                    )
        if end < self._size:
            os.ftruncate(self._file, end)
            self._size = self._synced = end
        self.sync()

    def append(self, record: bytes) -> None:
        """Write a line. Raises SpeculantError if the system refuses; the file has whole lines then."""
        rest, self._is_on_disk = record, False
        try:
            while rest:
                rest = rest[self._write(self._file, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise SpeculantError(
                f"{self.path} can't be written: {error.strerror}",
                "make room or correct the cause, and give the same command again: it goes on from here.",
            ) from error
        self._size += len(record)

    def sync(self) -> None:
        """Wait until the lines are on the disk.

        Raises SpeculantError if they can't be written. The file then loses those since the last time: the system
        forgets what it could not write, and a later run would find them in memory and count them as done.
        """
        if self._is_on_disk:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            lost, self._size, self._is_on_disk = self._size - self._synced, self._synced, True
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise SpeculantError(
                f"{self.path} can't be written to the disk: {error.strerror}; its last {lost} bytes are given up",
                "correct the cause or name another file, and give the same command again: it computes them again.",
            ) from error
        self._synced, self._is_on_disk = self._size, True

    def close(self) -> None:
        """Close the file, so that another run may have it."""
        os.close(self._file)


class BatchJob:
    """The lines of an input, in groups, and their results, each written once.

    Who answers is not its business: take lines from `pending`, and give each result to `record`, in any order and from
    anywhere. count: the lines of the input; resumed: lines that had a result before; succeeded, failed: lines of this
    run, with their prompt_tokens and completion_tokens.
    """

    def __init__(self, source: BatchSource, out: ResultFile, errors: ResultFile) -> None:
        self._source, self._out, self._errors = source, out, errors
        self._done = bytearray(digest == 0 for digest in source.digests)
        self.count, self.resumed, self.succeeded, self.failed = source.count, 0, 0, 0
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self._synced, self._origin = time.monotonic(), Origin()
        self._origins: dict[Origin, Path] = {}  # of the results of earlier runs, and a file that has one
        for file in (out, errors):
            self._resume(file)

    @classmethod
    def open(cls, source: Path, out: Path, errors: Path, write: Write = os.write) -> Self:
        """Open the three files.

        Raises ConfigError for files that are the same, can't be used, or belong to another input or another run.
        """
        if len({os.path.realpath(path) for path in (source, out, errors)}) < 3:
            raise ConfigError(f"two of {source}, {out} and {errors} are the same file", "name three different files.")
        lines, opened = BatchSource(source), list[ResultFile]()
        try:
            for path in (out, errors):
                opened.append(ResultFile(path, write))
            return cls(lines, *opened)
        except BaseException:
            for file in opened:
                file.close()
            lines.close()
            raise

    @property
    def left(self) -> int:
        """How many lines have no result."""
        return self.count - self.resumed - self.succeeded - self.failed

    def made_with(self, origin: Origin, name: str) -> None:
        """Set the model and the settings of the next results. name: the model's.

        Raises ConfigError if earlier ones were made with another model or other settings.
        """
        for other, path in self._origins.items():
            if other != origin:
                what = f"another model than {name}" if other.model != origin.model else "other settings"
                raise ConfigError(
                    f"{path} has results that were made with {what}",
                    "give the arguments of the first run again, or name another file for results. These have to be the "
                    f"same: the model and its tokenizer, verification, tool_parser, {', '.join(SETTINGS)}.",
                )
        self._origin = origin

    def pending(self) -> Iterator[BatchLine]:
        """Yield each line that has no result, those with the same beginning of the prompt side by side.

        Lines with a `problem` come too: it is their result. Lines are sorted within windows, so memory is bounded.
        """
        window, size = list[BatchLine](), 0
        for place in range(len(self._done)):
            if not self._done[place]:
                line = self._source.read(place + 1)
                window.append(line)
                size += len(line.body)
                if len(window) == WINDOW_LINES or size >= WINDOW_BYTES:
                    yield from _grouped(window)
                    window, size = [], 0
        yield from _grouped(window)

    def record(self, line: BatchLine, result: LineAnswer | LineError) -> None:
        """Write a line's result. A line that has one keeps it, so a second answer does no harm.

        Raises SpeculantError if the file can't be written.
        """
        if self._done[line.number - 1]:
            return
        document = _document(result) if isinstance(result, LineAnswer) else None
        if isinstance(result, LineAnswer) and document is None:
            result = LineError("invalid_answer", f"line {line.number}: its response ({result.status}) is no JSON")
        succeeded = isinstance(result, LineAnswer) and result.status < _FAILED
        if isinstance(result, LineAnswer):
            written = success(line, result, self._origin)
        else:
            written = failure(line, result, self._origin)
        (self._out if succeeded else self._errors).append(written)
        self._done[line.number - 1] = 1
        self.succeeded, self.failed = self.succeeded + succeeded, self.failed + (not succeeded)
        self._count_tokens(document)
        if time.monotonic() - self._synced > _SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Wait until the results are on the disk. Raises SpeculantError if the system can't write them."""
        for file in (self._out, self._errors):
            file.sync()
        self._synced = time.monotonic()

    def close(self) -> None:
        """Close the files; the results are on the disk then, or it raises as `sync` does."""
        try:
            self.sync()
        finally:
            for file in (self._source, self._out, self._errors):
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _resume(self, file: ResultFile) -> None:
        digests = self._source.digests
        for number, digest, origin in file.records():
            self._origins.setdefault(origin, file.path)
            if not 0 < number <= len(digests) or digests[number - 1] != digest:
                raise ConfigError(
                    f"{file.path} has a result for line {number} of another input than {self._source.path}",
                    "name another file for results, or the input that these results are for. A line whose result was "
                    "written must not change.",
                )
            if self._done[number - 1]:
                raise ConfigError(
                    f"{file.path} has a second result for line {number}", "delete one of the two, or use another file."
                )
            self._done[number - 1] = 1
            self.resumed += 1

    def _count_tokens(self, document: Any) -> None:
        usage = document.get("usage") if isinstance(document, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or 0
            self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _grouped(window: list[BatchLine]) -> list[BatchLine]:
    return sorted(window, key=lambda line: (line.order, line.number))


def _document(answer: LineAnswer) -> Any:
    """Return a response's JSON document; None if it has none."""
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
