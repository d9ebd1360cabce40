"""What drafters learn, kept in a folder for later engines: one file per cache salt and drafting method.

    DIR/<owner>-<salt>-<rest>.learned      [ MAGIC | digest of the rest | length of the head | head: JSON | numbers ]

The name has digests alone. owner, salt: see speculant/kept_files.py; all that one key or one salt taught can be found.
rest: of the whole salt, the target's place and vocabulary, the method, and the form of what it keeps. Drafts never
change a text, so a file can only make drafts better or worse.

A thread reads and writes the files, and the engine's thread does all else, in a small part of its steps: no lock is
needed, which a garbage collection that ends a request might wait for. The files of a salt are read when its first
request comes; those of the empty salt are read before the first step. What has changed is written every PERIOD_S
seconds while the engine works, and when it ends; what can't be written is tried again. Several processes may share a
folder: files are replaced whole, and the last writer's stays. A file that is damaged or not of this form is deleted.
No error of the disk stops the engine; each kind is logged once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculant.errors import DraftError, Guard
from speculant.kept_files import (
    HEX,
    KeptFile,
    UnusableFileError,
    delete,
    digest_of,
    entries_of,
    oldest,
    open_kept,
    owner_of,
    remove_abandoned,
    replacing,
    salt_digest,
)

if TYPE_CHECKING:
    from speculant.drafting import Drafter, Drafters
    from speculant.text import Tokenizer

logger = logging.getLogger(__name__)

SUFFIX = ".learned"
MAGIC = b"spec-lrn"
FORMAT = 1
LIMIT_BYTES = 2**28  # of all files of a folder, and of what waits to be written
MOST_BYTES = 2**26  # of a file; the largest of the tables that are kept is 40 MB
MOST_SALTS = 2**14  # that are remembered as read
PERIOD_S = 30.0  # between two times of writing
SHARE_S = 0.02  # of a step
LAST_S = 30.0  # that the end of an engine waits for the last files
_HEAD = struct.Struct("<8s16sI")
_CHECKED = struct.calcsize("<8s16s")  # what follows is covered by the digest


def target_digest(place: Path, tokenizer: Tokenizer, size: int) -> str:
    """Return a digest of where a target of `size` rows is, and of what its token ids mean."""
    return digest_of(str(place.resolve()), str(size), json.dumps(sorted(tokenizer.vocab().items())))


@dataclass(frozen=True)
class LearnedFiles:
    """The files of a folder for one target. target: a digest, see above. model: its name, for the user."""

    folder: Path
    target: str
    model: str

    def path(self, method: str, form: str, salt: str) -> Path:
        """Return the file of a method, a form of what it keeps, and a salt; it may not exist."""
        own = digest_of(str(FORMAT), self.target, method, form, salt)
        return self.folder / f"{owner_of(salt)}-{salt_digest(salt)}-{own}{SUFFIX}"

    @staticmethod
    def entries(folder: Path) -> list[KeptFile]:
        """Return the files of a folder, the one that was used longest ago first."""
        return entries_of(folder.glob("-".join([HEX * 16] * 3) + SUFFIX), "learned")

    @staticmethod
    def verify(path: Path) -> str:
        """Return the fault of a file; "" = it is sound. Raises OSError if it can't be read."""
        try:
            _read(path, of_anyone=True)
        except UnusableFileError as error:
            return str(error)
        return ""

    @staticmethod
    def model_of(path: Path) -> str:
        """Return the name of the model whose drafters wrote a file. Raises OSError, UnusableFileError."""
        return str(_read(path, of_anyone=True)[0]["model"])

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
        with replacing(path) as file:
            file.writelines((MAGIC, _checksum(rest), rest))


def _read(path: Path, of_anyone: bool = False) -> tuple[dict[str, Any], list[array[int]]]:
    """Return the head and the parts of a file. Raises OSError, and UnusableFileError unless it is what was written."""
    with open_kept(path, of_anyone) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise UnusableFileError("it is too large")
        data = file.read()
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


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class Learning:
    """Keeps what an engine's drafters learn. Only `_run` and its calls are the thread's, which owns all at the end."""

    def __init__(self, files: LearnedFiles, drafters: Drafters, vocab_size: int) -> None:
        self.due, self.ended = False, False  # due: there is something for `work`
        self._files, self._drafters, self._vocab_size = files, drafters, vocab_size
        self._guard = Guard(logger, "and the engine goes on without it")
        self._met: dict[tuple[str, str], None] = {}  # methods and salts whose files were read
        self._wanted: deque[tuple[str, Drafter, str]] = deque()
        self._read: deque[tuple[Path, Drafter, str, Iterator[array[int]]]] = deque()
        self._changes: Iterator[tuple[Path, str, Sequence[array[int]]]] | None = None
        self._asked = self._took = False  # the thread wants what has changed, and has got all of it
        self._taken: dict[Path, tuple[str, Sequence[array[int]]]] = {}  # what waits to be written
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speculant-learning", daemon=True)

    def start(self) -> threading.Thread:
        """Read what the empty salt learned, and return the thread for all else, which is to be started."""
        with suppress(OSError):
            remove_abandoned(self._files.folder)
        for drafter in self._drafters.lasting().values():
            for _ in drafter.learned():
                pass
        self.meet("")
        self._load()
        self._work_all()
        return self._thread

    def meet(self, salt: str) -> None:
        """Have the files of a salt read, unless they were."""
        for method, drafter in self._drafters.lasting().items():
            if (method, salt) not in self._met:
                if len(self._met) >= MOST_SALTS:
                    self._met.pop(next(iter(self._met)))
                self._met[method, salt] = None
                self._wanted.append((method, drafter, salt))
                self._wake.set()

    def work(self) -> None:
        """Teach drafters what was read, and take what they have learned, for about SHARE_S."""
        until, self.due = time.perf_counter() + SHARE_S, False
        try:
            while self._work_once():
                if time.perf_counter() >= until:
                    self.due = True
                    break
        except Exception as error:  # noqa: BLE001 - a drafter's
            self.due = True
            self._guard.note("learning", error)

    def close(self) -> None:
        """Write what has changed, and end the thread. The drafters are not used any more."""
        self.ended = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(LAST_S)

    def _work_once(self) -> bool:
        """Do a small part of what `work` does; return whether there may be more."""
        if self._read:
            self._teach()
        elif self._wanted:  # nothing is taken before it, which would replace a file that was not read
            return False
        elif self._changes is not None:
            if (found := next(self._changes, None)) is not None:
                path, method, parts = found
                self._taken[path] = method, parts
            else:
                self._changes, self._took = None, True
                self._wake.set()
        elif self._asked:
            self._asked, self._changes = False, self._changed()
        else:
            return False
        return True

    def _teach(self) -> None:
        """Teach a drafter the next part that was read."""
        path, drafter, salt, parts = self._read[0]
        try:
            if (part := next(parts, None)) is not None:
                drafter.learn(salt, part)
                return
        except DraftError as error:
            self._refuse(path, error)
        except Exception as error:  # noqa: BLE001 - a drafter's
            self._guard.note(f"learning from {path}", error)
        self._read.popleft()

    def _changed(self) -> Iterator[tuple[Path, str, Sequence[array[int]]]]:
        """Yield what is to be written: for each method and salt for which something was learned, all that is known."""
        for method, drafter in self._drafters.lasting().items():
            for salt, parts in drafter.learned():
                yield self._files.path(method, drafter.keeps, salt), method, parts

    def _work_all(self) -> None:
        self.due = True
        while self.due:
            self.work()

    def _run(self) -> None:
        asked = time.monotonic()
        while not self.ended:
            self._wake.wait(max(0.0, asked + PERIOD_S - time.monotonic()))
            self._wake.clear()
            self._load()
            if time.monotonic() >= asked + PERIOD_S:
                asked = time.monotonic()
                self._save()
                self._asked = self.due = True
            elif self._took:
                self._took = False
                self._save()
        self._load()
        self._asked = True
        self._work_all()
        self._save()

    def _load(self) -> None:
        """Read the files that are wanted."""
        while self._wanted:
            method, drafter, salt = self._wanted[0]
            path = self._files.path(method, drafter.keeps, salt)
            try:
                self._read.append((path, drafter, salt, iter(self._files.read(path, self._vocab_size))))
            except (FileNotFoundError, NotADirectoryError):
                pass
            except UnusableFileError as error:
                self._refuse(path, error)
            except Exception as error:  # noqa: BLE001 - the disk's
                self._guard.note(f"reading {path}", error)
            self._wanted.popleft()
            self.due = True

    @staticmethod
    def _refuse(path: Path, error: Exception) -> None:
        logger.warning("%s is deleted, and drafts begin without it: %s", path, error)
        with suppress(OSError):
            path.unlink()

    def _save(self) -> None:
        """Write what waits. What can't be written waits on, and replaces nothing newer."""
        written, failed = 0, 0
        for path in [*self._taken]:
            method, parts = self._taken.pop(path)
            try:
                self._files.write(path, method, parts)
                written += 1
            except Exception as error:  # noqa: BLE001 - a full disk, a removed folder
                self._guard.note(f"keeping what was learned in {self._files.folder}", error)
                failed += sum(len(part) * part.itemsize for part in parts)
                if failed <= LIMIT_BYTES:
                    self._taken.setdefault(path, (method, parts))
        if written:
            with suppress(OSError):
                delete(oldest(self._files.entries(self._files.folder), LIMIT_BYTES))
