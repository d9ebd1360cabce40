"""What drafters learn, kept in a folder for later engines: one file per cache salt and drafting method.

    DIR/<owner>-<salt>-<form>.learned      [ MAGIC | digest of the rest | length of the head | head: JSON | numbers ]

The name has digests alone. owner: of a salt up to its first "/" or ":", which is the digest of an API key on a server,
so that all that one key taught can be found. form: of the vocabulary, whose token ids another one does not share, of
the method, and of what its table needs. Drafts never change a text, so a file can only make drafts better or worse.

A thread reads the files of a salt when its first request comes; those of the empty salt are read before the first
step. It writes what has changed every PERIOD_S seconds, and when the engine ends. Several processes may share a folder:
files are replaced whole, and the last writer's stays. A file that is damaged, foreign or not of this form is deleted.
No error of the disk stops the engine; each kind is logged once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculant.errors import DraftError, Guard
from speculant.files import (
    KeptFile,
    delete_oldest,
    digest_of,
    entries_of,
    owner_of,
    remove_abandoned,
    salt_digest,
    temporary,
)

if TYPE_CHECKING:
    from speculant.drafting import Drafter, Drafters
    from speculant.text import Tokenizer

logger = logging.getLogger(__name__)

SUFFIX = ".learned"
MAGIC = b"spec-lrn"
FORMAT = 1
LIMIT_BYTES = 2**28  # of all files of a folder
MOST_BYTES = 2**26  # of a file; the largest of the tables that are kept is 40 MB
MOST_SALTS = 2**14  # that are remembered as read
PERIOD_S = 30.0  # between two times of writing
LAST_S = 30.0  # that the end of an engine waits for the last files
_HEAD = struct.Struct("<8s16sI")
_CHECKED = struct.calcsize("<8s16s")  # what follows is covered by the digest


class UnusableFileError(ValueError):
    """A file is not what was written, or is of another form."""


def vocabulary_digest(tokenizer: Tokenizer, size: int) -> str:
    """Return a digest of what the token ids of a target of `size` rows mean."""
    return digest_of(str(size), json.dumps(sorted(tokenizer.vocab().items())))


@dataclass(frozen=True)
class LearnedFiles:
    """The files of a folder for one target. vocabulary: a digest, see above. model: its name, for the user."""

    folder: Path
    vocabulary: str
    model: str

    def path(self, method: str, form: str, salt: str) -> Path:
        """Return the file of a method, a form of what it keeps, and a salt; it may not exist."""
        own = digest_of(str(FORMAT), self.vocabulary, method, form)
        return self.folder / f"{owner_of(salt)}-{salt_digest(salt)}-{own}{SUFFIX}"

    @staticmethod
    def entries(folder: Path) -> list[KeptFile]:
        """Return the files of a folder, the one that was used longest ago first."""
        return entries_of(folder.glob("*" + SUFFIX), "learned")

    @staticmethod
    def verify(path: Path) -> str:
        """Return what is wrong with a file; "" = nothing."""
        try:
            _read(path)
        except (OSError, UnusableFileError) as error:
            return str(error)
        return ""

    @staticmethod
    def model_of(path: Path) -> str:
        """Return the name of the model whose drafters wrote a file. Raises OSError, UnusableFileError."""
        return str(_read(path)[0]["model"])

    @staticmethod
    def belongs(path: Path, owner: str | None, salt: str | None) -> bool:
        """Whether a file is of this owner and of this salt, as digests; None = any."""
        own = [*path.stem.split("-"), "", ""]
        return owner in (None, own[0]) and salt in (None, own[1])

    def read(self, path: Path, vocab_size: int) -> list[array[int]]:
        """Return the parts that a file has. Raises OSError, and UnusableFileError for one that can't be used."""
        _, parts = _read(path)
        if any(min(part, default=0) < -1 or max(part, default=0) >= vocab_size for part in parts):
            raise UnusableFileError("it has tokens of another vocabulary")
        with suppress(OSError):
            os.utime(path)  # it was used now, so that other files are deleted first
        return parts

    def write(self, path: Path, method: str, parts: Iterable[array[int]]) -> None:
        """Write a file. Raises OSError."""
        parts = [part for part in parts if part]
        lengths = [len(part) for part in parts]
        head = json.dumps({"name": path.stem, "model": self.model, "method": method, "lengths": lengths}).encode()
        rest = b"".join((struct.pack("<I", len(head)), head, *(part.tobytes() for part in parts)))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with temporary(self.folder) as (file, made):
            file.writelines((MAGIC, _checksum(rest), rest))
            file.flush()
            os.fsync(file.fileno())
            made.replace(path)


def _read(path: Path) -> tuple[dict[str, Any], list[array[int]]]:
    """Return the head and the parts of a file. Raises OSError, and UnusableFileError unless it is what was written."""
    data = _content(path)
    if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise UnusableFileError("it does not begin as such a file does")
    _, digest, length = _HEAD.unpack_from(data)
    if _checksum(data[_CHECKED:]) != digest:
        raise UnusableFileError("it has changed since it was written")
    try:
        head = json.loads(data[_HEAD.size : _HEAD.size + length])
        name, _, _, lengths = (head[key] for key in ("name", "model", "method", "lengths"))
        numbers, end = array("i", data[_HEAD.size + length :]), 0
        parts: list[array[int]] = []
        for size in lengths:
            parts.append(numbers[end : end + size])
            end += size
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnusableFileError("it is of another form") from error
    if name != path.stem or end != len(numbers) or [len(part) for part in parts] != lengths:
        raise UnusableFileError("it is of another form, or has the name of another file")
    return head, parts


def _content(path: Path) -> bytes:
    """Return the bytes of a file of this user. Raises OSError, and UnusableFileError for any other one."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise UnusableFileError("it is no file of this user")
        if status.st_size > MOST_BYTES:
            raise UnusableFileError("it is too large")
        with open(number, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(number)


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class FairLock:
    """A lock, as a context manager, that threads get in the order in which they ask, and may take again within it.

    A thread queues in `_next`, and only the first one waits for `_lock`: a thread that steps again and again keeps
    nobody out.
    """

    def __init__(self) -> None:
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():  # within a garbage collection that ends a request
            self._depth += 1
            return
        with self._next:
            self._lock.acquire()
        self._owner, self._depth = threading.get_ident(), 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()


class Learning:
    """Keeps what an engine's drafters learn. turn: whoever calls the drafters holds it, the engine too."""

    def __init__(self, files: LearnedFiles, drafters: Drafters, vocab_size: int) -> None:
        self.turn = FairLock()
        self._files, self._drafters, self._vocab_size = files, drafters, vocab_size
        self._guard = Guard(logger, "and the engine goes on without it")
        self._met: dict[tuple[str, str], None] = {}  # methods and salts whose files were read
        self._wanted: deque[tuple[str, Drafter, str]] = deque()
        self._wake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="speculant-learning", daemon=True)

    def start(self) -> threading.Thread:
        """Read what the empty salt learned, and return the thread for all else, which is to be started."""
        with suppress(OSError):
            remove_abandoned(self._files.folder)
        self.meet("")
        self._load()
        return self._thread

    def meet(self, salt: str) -> None:
        """Have the files of a salt read, unless they were. Call it within a turn."""
        for method, drafter in self._drafters.lasting().items():
            if (method, salt) not in self._met:
                if len(self._met) >= MOST_SALTS:
                    self._met.pop(next(iter(self._met)))
                self._met[method, salt] = None
                self._wanted.append((method, drafter, salt))
                self._wake.set()

    def close(self) -> None:
        """Write what has changed, and end the thread."""
        self._ended = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(LAST_S)

    def _run(self) -> None:
        saved = time.monotonic()
        ended = False
        while not ended:
            self._wake.wait(max(0.0, saved + PERIOD_S - time.monotonic()))
            self._wake.clear()
            ended = self._ended
            self._load()
            if ended or time.monotonic() >= saved + PERIOD_S:
                self._save()
                saved = time.monotonic()

    def _load(self) -> None:
        while self._wanted:
            method, drafter, salt = self._wanted.popleft()
            path = self._files.path(method, drafter.keeps, salt)
            try:
                for part in self._files.read(path, self._vocab_size):
                    with self.turn:
                        drafter.learn(salt, part)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (UnusableFileError, DraftError) as error:
                logger.warning("%s is deleted, and drafts begin without it: %s", path, error)
                with suppress(OSError):
                    path.unlink()
            except Exception as error:  # noqa: BLE001 - the disk's, or a drafter's
                self._guard.note(f"reading {path}", error)

    def _save(self) -> None:
        """Write the files of the salts for which something was learned."""
        try:
            written = 0
            for method, drafter in self._drafters.lasting().items():
                changed = drafter.learned()
                while True:
                    with self.turn:
                        found = next(changed, None)
                    if found is None:
                        break
                    salt, parts = found
                    self._files.write(self._files.path(method, drafter.keeps, salt), method, parts)
                    written += 1
            if written:
                delete_oldest(self._files.entries(self._files.folder), LIMIT_BYTES)
        except Exception as error:  # noqa: BLE001 - a full disk, a removed folder
            self._guard.note(f"keeping what was learned in {self._files.folder}", error)
