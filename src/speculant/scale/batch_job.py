"""`BatchJob`: which lines of an input have no result yet, and the files of the results."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from speculant.errors import ConfigError
from speculant.scale.batch_lines import BatchLine, LineAnswer, LineError, failure, success
from speculant.scale.batch_origin import SETTINGS, Origin
from speculant.scale.batch_results import ResultFile, Write
from speculant.scale.batch_source import BatchSource

WINDOW_LINES, WINDOW_BYTES = 10_000, 64 * 2**20  # that are read, sorted and held at a time
_SYNC_S = 5.0  # seconds of results that a machine that loses its power may lose; they are computed again
_FAILED = 400  # the first status of a failed request


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
