"""The input of a batch: a file that is read once from end to end, and again where lines are answered."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from speculant.errors import ConfigError, RequestError
from speculant.scale.batch_lines import MOST_BYTES, BatchLine, custom_id_of, digest_of, duplicate, raw_lines, read_line

_ID_BYTES = 16  # of a custom_id's digest: two of 10**9 ids are the same with a probability of 10**-20


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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


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
