"""A file of results: it grows by whole lines, has one writer, and is continued after a kill."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from speculant.errors import ConfigError, SpeculantError
from speculant.scale.batch_lines import RecordName, is_torn, raw_lines, read_record

_HEAD_BYTES = 128  # of a result: enough for its name
Write = Callable[[int, bytes], int]  # os.write, or one that fails in tests


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
