"""`BatchJob`: the lines of an input file, which of them have no result yet, and the files of the results."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from speculant.errors import ConfigError, RequestError, SpeculantError
from speculant.scale.batch_lines import (
    MOST_BYTES,
    SETTINGS,
    BatchLine,
    LineAnswer,
    LineError,
    Origin,
    RecordName,
    custom_id_of,
    digest_of,
    duplicate,
    failure,
    is_torn,
    raw_lines,
    read_line,
    read_record,
    success,
)

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
    anywhere. count: the lines of the input; resumed: those that had a result before; succeeded, failed: those of this
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
