"""The prompt cache on disk: blocks of keys and values, and states at the ends of blocks, in files.

Each block of each group of layers is a file of its own. Its name is a digest of the model, the salt, and all tokens up
to the block's end, so that a file is found without an index, and several processes share one folder:

    DIR/3f/3f9c...kv    [ magic | CRC of the rest | model | salt | name | place | sizes ][ tokens ][ content ]

salt: digests of its owner and of the client's own part. place: the group of layers, or that of states. A source of an
encoder-decoder model is one file. A file is written under a temporary name, then renamed. It is used only if its CRC,
its name and its tokens are right; any other file of this form is deleted. Errors of the disk are logged, once for each
kind, and prompts are computed as without a cache.

Files are written in a thread, for which nothing waits: while it is far behind, nothing more is kept. When all files
take more bytes than they may, or the disk is full, the least recently used ones are deleted. A sequence that ends marks
its files as used, the first block last, so that a text loses its end first.

Content is read only if that takes less time than computing it again, by what both took before.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from speculant.kept_files import (
    HEX,
    KeptFile,
    UnusableFileError,
    delete,
    entries_of,
    oldest,
    open_kept,
    owner_of,
    remove_abandoned,
    replacing,
    salt_digest,
)

logger = logging.getLogger(__name__)

SUFFIX = ".kv"
STATES, SOURCE = 0xFFFE, 0xFFFF  # places of a file that is no group's block
MOST_WAITING = 2**28  # bytes that wait to be written
MARK_BYTES = 2**12
MOST_BYTES = 2**30  # of a file
FLUSH_S = 30.0  # for what waits when an engine ends
PAUSE_S = 60.0  # after an error, until files are written again
SCAN_S, SCAN_SHARE = 300.0, 0.1  # seconds, and own bytes of the limit, between looks: other processes write there too
LEAST_LEFT = 0.9  # of the limit, once files were deleted
RETRY = 16  # reads that did not pay are tried again after as many others
_MAGIC = b"spec-kv\x01"
_REST = "16s8s8s16sHxxIQ"  # model, owner of the salt, salt, name, place, number of tokens, bytes of content
_HEADER = struct.Struct(f"<8sI{_REST}")  # magic, CRC of the rest
_CRC_END = 12
_DIGEST = 16

Content = bytes | memoryview


@dataclass
class Speed:
    """What reading and computing took so far: bytes and seconds of files, tokens and seconds of passes."""

    read_bytes: float = 0.0
    read_s: float = 0.0
    tokens: float = 0.0
    computed_s: float = 0.0
    refused: int = 0  # reads in a row

    def note_read(self, size: int, seconds: float) -> None:
        """Count a read; earlier ones count for less and less."""
        self.read_bytes, self.read_s = 0.9 * self.read_bytes + size, 0.9 * self.read_s + seconds

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Count a pass over tokens of prompts; earlier ones count for less and less."""
        self.tokens, self.computed_s = 0.9 * self.tokens + tokens, 0.9 * self.computed_s + seconds

    def pays(self, size: int, tokens: int) -> bool:
        """Whether reading bytes takes less time than computing tokens. Unknown times count as if it did."""
        if not (self.read_bytes and self.tokens):
            return True
        return size * self.read_s / self.read_bytes < tokens * self.computed_s / self.tokens

    def allows(self, size: int, tokens: int) -> bool:
        """Whether to read: it pays, or was refused so often that another try shows whether it pays by now."""
        self.refused = 0 if self.refused >= RETRY or self.pays(size, tokens) else self.refused + 1
        return not self.refused


@dataclass
class BlockFiles:
    """The files of one model in a folder. model: a digest of all that the content depends on, beside the tokens.

    limit: the most bytes of all files in the folder. `read_tokens`: how many tokens were not computed thanks to it.
    """

    folder: Path
    model: bytes
    limit: int
    speed: Speed = field(default_factory=Speed)
    read_tokens: int = 0
    written: int = 0  # bytes
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "speculant-prompt-cache"))
    _waiting: int = 0  # bytes
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _size: int = 0  # of all files, as far as it is known
    _scanned: float = -1e9
    _unscanned: int = 0  # bytes that were written since
    _paused: float = -1e9
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._submit(0, self._begin)

    @staticmethod
    def entries(folder: Path) -> list[KeptFile]:
        """Return the files of a folder, the one that was used longest ago first."""
        return entries_of(folder.glob(f"{HEX * 2}/{HEX * 2 * _DIGEST}{SUFFIX}"), "prompt")

    @staticmethod
    def verify(path: Path) -> str:
        """Return the fault of a file; "" = it is sound. Raises OSError if it can't be read."""
        try:
            _read(path, bytes.fromhex(path.stem), of_anyone=True)
        except ValueError as error:
            return str(error)
        return ""

    @staticmethod
    def model_of(path: Path) -> str:
        """Return a digest of the model whose prompts a file holds. Raises OSError, UnusableFileError."""
        return bytes(_head(path)[2]).hex()

    @staticmethod
    def belongs(path: Path, owner: str | None, salt: str | None) -> bool:
        """Whether a file is of this owner and of this salt, as digests (speculant/kept_files.py); None = any.

        Raises OSError, UnusableFileError.
        """
        head = _head(path)
        return owner in (None, head[3].hex()) and salt in (None, head[4].hex())

    def root(self, cache_salt: str) -> bytes:
        """Return the key of a salt, from which the keys of its blocks follow."""
        return _digest(self.model, cache_salt.encode("utf-8", "surrogatepass"))

    def child(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the key of a block's tokens after those of its parent."""
        return _digest(parent, array("q", tokens).tobytes())

    def has(self, key: bytes, place: int) -> bool:
        """Whether there is a file, sound or not."""
        return os.path.exists(self._path(key, place))

    def read(self, key: bytes, place: int, tokens: Sequence[int], size: int) -> memoryview | None:
        """Return the content of a file, `size` bytes; None if there is none, or it is damaged and thus deleted."""
        path, started = self._path(key, place), time.perf_counter()
        try:
            own, content = _read(path, path_name(key, place), size)
            if own != array("i", tokens).tobytes():
                raise UnusableFileError("it holds other tokens")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say("read", f"{path} can't be read, and its prompt is computed: {error}")
            return None
        except UnusableFileError as error:
            self._say("damage", f"{path} is deleted, and its prompt computed: {error}")
            self.discard(key, place)
            return None
        self.speed.note_read(len(content), time.perf_counter() - started)
        return content

    def discard(self, key: bytes, place: int) -> None:
        """Delete a file."""
        with suppress(OSError):
            self._path(key, place).unlink()

    def keep(
        self, key: bytes, place: int, tokens: Sequence[int], cache_salt: str, size: int, content: Callable[[], Content]
    ) -> None:
        """Write a file of `size` bytes in the background, unless it is there, or too much waits; content is copied."""
        if size > self.limit:
            self._say("size", f"prompts are not kept in {self.folder}: a part of {size} bytes is above {self.limit}")
        if (
            self.has(key, place)
            or size > min(MOST_BYTES // 2, self.limit)
            or self._waiting + size > MOST_WAITING
            or time.monotonic() - self._paused < PAUSE_S
        ):
            return
        salt = cache_salt.partition("\0")[0]  # what follows is not the client's
        facts = (
            self.model,
            bytes.fromhex(owner_of(salt)),
            bytes.fromhex(salt_digest(salt)),
            path_name(key, place),
            place,
        )
        self._submit(size, partial(self._write, self._path(key, place), facts, array("i", tokens), content()))

    def mark_used(self, keys: Sequence[bytes], places: Iterable[int]) -> None:
        """Mark the files of a text's blocks, the first block's as the last used ones."""
        paths = [self._path(key, place) for key in reversed(keys) for place in places]
        size = MARK_BYTES * len(paths)  # the work of so many bytes
        if paths and self._waiting + size <= MOST_WAITING:
            self._submit(size, partial(_mark_used, paths))

    def flush(self) -> None:
        """Wait until all that waits is written, but not for ever."""
        with suppress(RuntimeError, TimeoutError):  # the interpreter ends; the disk does not answer
            self._writer.submit(lambda: None).result(FLUSH_S)

    def _path(self, key: bytes, place: int) -> Path:
        name = path_name(key, place).hex()
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    def _submit(self, size: int, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except OSError as error:
                self._paused = time.monotonic()
                self._say("write", f"prompts are not kept in {self.folder} for {PAUSE_S:.0f} s: {error}")
                if error.errno == errno.ENOSPC:  # the files of long ago make room for later ones
                    self._size = prune(self.folder, sum(entry.size for entry in self.entries(self.folder)) - 1)
            except Exception:
                logger.exception("a prompt was not kept")
            finally:
                with self._lock:
                    self._waiting -= size

        with self._lock:
            self._waiting += size
        with suppress(RuntimeError):  # the interpreter ends
            self._writer.submit(run)

    def _begin(self) -> None:
        """Prepare the folder."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in self.folder.glob(HEX * 2):
            remove_abandoned(part)
        self._make_room()

    def _write(self, path: Path, facts: tuple[Any, ...], tokens: array[int], content: Content) -> None:
        rest = struct.pack(f"<{_REST}", *facts, len(tokens), len(content)) + tokens.tobytes()
        crc = zlib.crc32(content, zlib.crc32(rest))
        for again in (False, True):
            try:
                with replacing(path, lasting=False) as file:
                    file.writelines((_MAGIC, struct.pack("<I", crc), rest, content))
            except FileNotFoundError:  # the folder was removed meanwhile
                if again:
                    raise
            else:
                break
        size = _HEADER.size + len(tokens) * tokens.itemsize + len(content)
        self.written, self._size = self.written + size, self._size + size
        self._unscanned += size
        if (
            self._size > self.limit
            or self._unscanned > SCAN_SHARE * self.limit
            or time.monotonic() - self._scanned > SCAN_S
        ):
            self._make_room()

    def _make_room(self) -> None:
        """Delete the least recently used files if all have more bytes than they may."""
        self._size = prune(self.folder, self.limit)
        self._scanned, self._unscanned = time.monotonic(), 0

    def _say(self, kind: str, text: str) -> None:
        """Log a warning, the first time for its kind."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s", text)


def prune(folder: Path, limit: int) -> int:
    """Delete the least recently used files, if all have more bytes than the limit; return the bytes of all others."""
    found = BlockFiles.entries(folder)
    size = sum(entry.size for entry in found)
    gone = delete(oldest(found, int(LEAST_LEFT * limit))) if size > limit else []
    return size - sum(entry.size for entry in gone)


def path_name(key: bytes, place: int) -> bytes:
    """Return the name of a file, in bytes."""
    return _digest(key, place.to_bytes(2, "little"))


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _head(path: Path) -> tuple[Any, ...]:
    """Return the fields of a file's header. Raises OSError, and UnusableFileError for another file."""
    with open_kept(path, of_anyone=True) as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[: len(_MAGIC)] != _MAGIC:
        raise UnusableFileError("it is no file of a prompt cache")
    return _HEADER.unpack(head)


def _read(path: Path, name: bytes, size: int | None = None, of_anyone: bool = False) -> tuple[bytes, memoryview]:
    """Return the tokens and the content of a file, of this size if one is given. Raises OSError, UnusableFileError."""
    with open_kept(path, of_anyone) as file:
        is_, head = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise UnusableFileError("it is too short")
        magic, crc, *_, own, _, count, length = _HEADER.unpack(head)
        tokens = array("i").itemsize * count
        whole = _HEADER.size + tokens + length
        if magic != _MAGIC or is_ != whole or whole > MOST_BYTES or size not in (None, length):
            raise UnusableFileError("its form is another one")
        if own != name:
            raise UnusableFileError("it has the name of another file")
        data = memoryview(bytearray(tokens + length))
        if file.readinto(data) != len(data) or zlib.crc32(data, zlib.crc32(head[_CRC_END:])) != crc:
            raise UnusableFileError("it has changed since it was written")
    return bytes(data[:tokens]), data[tokens:]


def _mark_used(paths: Sequence[Path]) -> None:
    now = time.time_ns()
    for place, path in enumerate(paths):
        with suppress(OSError):
            os.utime(path, ns=(now + 1000 * place,) * 2)
