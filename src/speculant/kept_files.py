"""Files that are kept between runs: written whole, read only by their owner, and deleted by their last use."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

TEMPORARY = ".speculant-part"  # the suffix of files that are being written
HEX = "[0-9a-f]"  # in patterns of names: a folder may also have files of others


class KeptFile(NamedTuple):
    """A file that is kept between runs. used: its last use, in seconds since the epoch. kind: of its content."""

    path: Path
    size: int
    used: float
    kind: str


def entries_of(paths: Iterable[Path], kind: str) -> list[KeptFile]:
    """Return the files that exist, the one that was used longest ago first."""
    found = list[KeptFile]()
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            found.append(KeptFile(path, status.st_size, status.st_mtime, kind))
    return sorted(found, key=lambda entry: entry.used)


def delete(entries: Iterable[KeptFile]) -> list[KeptFile]:
    """Delete files; return those that could be deleted."""
    deleted = list[KeptFile]()
    for entry in entries:
        with suppress(OSError):
            entry.path.unlink(missing_ok=True)
            deleted.append(entry)
    return deleted


def oldest(entries: Iterable[KeptFile], limit: int) -> list[KeptFile]:
    """Return the files to delete, the least recently used ones, so that at most `limit` bytes stay."""
    files, chosen = sorted(entries, key=lambda entry: entry.used), list[KeptFile]()
    over = sum(entry.size for entry in files) - limit
    for entry in files:
        if over <= 0:
            break
        chosen.append(entry)
        over -= entry.size
    return chosen


class UnusableFileError(ValueError):
    """A kept file has changed since it was written, or is another one than its name says."""


def open_kept(path: Path, of_anyone: bool = False) -> FileIO:
    """Open a file for reading, without a buffer. of_anyone: its content is not used, so others may have written it.

    Raises OSError, PermissionError too for a file of another user, and UnusableFileError for what is no file.
    """
    if path.is_symlink():
        raise UnusableFileError("it is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (of_anyone or status.st_uid == os.geteuid()):
        return open(descriptor, "rb", buffering=0)
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    raise UnusableFileError("it is no file")


@contextmanager
def replacing(path: Path, lasting: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file, which becomes `path` when the block ends without an error: nobody ever reads a part of it.

    It is locked and has another name until then. lasting: wait until it is on the disk.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        number, name = tempfile.mkstemp(TEMPORARY, dir=path.parent)
        with open(number, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(number).st_nlink:  # another process took it for an abandoned one
                continue
            try:
                yield file
                file.flush()
                if lasting:
                    os.fsync(number)
                os.replace(name, path)
            finally:
                with suppress(OSError):
                    os.unlink(name)
            return


def remove_abandoned(folder: Path) -> None:
    """Delete the temporary files of processes that died."""
    for path in folder.glob("*" + TEMPORARY):
        with suppress(OSError, UnusableFileError), open_kept(path, of_anyone=True) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer is alive
            path.unlink()


def owner_of(salt: str) -> str:
    """Return a digest of the part of a salt that names its owner; see `speculant.serving.http.clients.salt_of`."""
    return digest_of("owner", salt.partition(":")[0].partition("/")[0])


def salt_digest(salt: str) -> str:
    """Return a digest of the part of a salt that is not its owner's name or user's, but the client's own choice."""
    who, found, own = salt.partition(":")
    return digest_of("salt", own if found else who)


def digest_of(*facts: str) -> str:
    """Return a short name for facts, which does not reveal them."""
    return hashlib.sha256("\0".join(facts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
