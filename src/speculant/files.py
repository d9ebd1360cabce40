"""Reads the JSON files of a checkpoint, detects changed files, and keeps measurements between runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from speculant import __version__
from speculant.errors import ModelError
from speculant.kept_files import replacing

MOST_FILES = 64  # of one kind to keep
STEADY = 1.5  # spread above which a measurement shows a busy machine
BUSY_KEPT_S = 3600.0  # for what decides how weights are packed, so that the next starts find their packed weights
TICK = 0.05  # seconds; changes within one tick of the system's clock get the same time
MOST_DEPTH = 32  # levels of nesting; far below the recursion limit, so that values can be printed


class Stamp(NamedTuple):
    """Facts of a file, of which one changes with its content. modified, changed: times of content and facts, in ns."""

    path: str
    size: int
    inode: int
    modified: int
    changed: int

    @classmethod
    def of(cls, file: Path) -> Stamp:
        """Return the stamp of a file; links are followed."""
        path = file.resolve()
        status = path.stat()
        return cls(str(path), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)

    def is_before(self, moment: float) -> bool:
        """Whether a change after this moment, in seconds, would have another time."""
        return max(self.modified, self.changed) / 1e9 < moment - TICK


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is stored: `size` bytes at `offset` of `file`.

    shape: the last dimension is contiguous, as in torch. kind: the name of its type in safetensors or GGUF, such as
    BF16 or Q4_K.
    """

    file: Path
    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int

    def part(self, index: int) -> TensorPlace:
        """Return the place of one of stacked tensors. Raises ModelError if there is no such one."""
        if not self.shape or not 0 <= index < self.shape[0]:
            raise ModelError(f"{self.file} has no part {index} of a tensor {list(self.shape)}", "download it again.")
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, size=size)


def cache_folder(name: str) -> Path:
    """Return the folder for a kind of file, in $XDG_CACHE_HOME/speculant or ~/.cache/speculant."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speculant" / name


MOUNTS = Path("/proc/self/mountinfo")
EMPTY_DIR = "/kubernetes.io~empty-dir/"  # in the paths of such volumes on a node of Kubernetes
_LOST_WITH = {"tmpfs": "memory", "ramfs": "memory", "overlay": "container", "fuse.fuse-overlayfs": "container"}


def lost_with(folder: Path) -> str:
    """Say when a folder loses its files: with the "memory", "container" or "pod". Empty: they stay, or nobody knows."""
    place, depth, found = folder.resolve(), 0, ""
    with suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")  # id, parent, device, root in the file system, place, options
            root, point = mount.split(" ")[3:5]
            path = Path(point.replace("\\040", " "))
            if place.is_relative_to(path) and len(path.parts) >= depth:  # the last one hides earlier ones
                depth = len(path.parts)
                found = "pod" if EMPTY_DIR in f"{root}/" else _LOST_WITH.get(kind.partition(" ")[0], "")
    return found


class Run(NamedTuple):
    """The time of a run, and the share in which its thread was on a processor, in seconds."""

    elapsed_s: float
    processor_s: float

    @classmethod
    def of(cls, run: Callable[[], object]) -> Run:
        """Time a run."""
        processor_s, elapsed_s = time.thread_time(), time.perf_counter()
        run()
        elapsed_s = time.perf_counter() - elapsed_s
        return cls(elapsed_s, time.thread_time() - processor_s)


def spread_of(measured: Iterable[Sequence[Run]]) -> float:
    """Return the typical time of all kinds of runs over their least processor time; 1 = nothing disturbed them."""
    kinds = [own for own in measured if own]
    typical_s = sum(statistics.median(run.elapsed_s for run in own) for own in kinds)
    return typical_s / max(sum(min(run.processor_s for run in own) for own in kinds), 1e-9)


def is_steady(spread: float) -> bool:
    """Whether a measurement was hardly disturbed, so that it may be kept."""
    return 0 <= spread <= STEADY


def costs_folder() -> Path:
    """Return the folder of measurements."""
    return cache_folder("costs")


def key_of(facts: Sequence[str]) -> str:
    """Return the name of a file for a measurement under these facts, on this machine with this version."""
    return _machine_key() + _digest(*facts)


def _machine_key() -> str:
    return _digest(__version__, platform.processor(), platform.node(), str(os.cpu_count()))


def _digest(*facts: str) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def read_measured(path: Path, busy_s: float = 0.0) -> dict[str, Any]:
    """Return a kept measurement; {} if there is none or it is damaged.

    busy_s: the age up to which one of a busy machine counts.
    """
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if is_steady(kept["spread"]) or time.time() - path.stat().st_mtime < busy_s:
            return kept
    return {}


def forget_measured() -> None:
    """Delete all measurements of this machine."""
    for file in costs_folder().glob(f"{_machine_key()}*.json"):
        with suppress(OSError):
            file.unlink()


def write_file(path: Path, measured: Mapping[str, Any]) -> None:
    """Write a measurement atomically. If the folder can't be written, the next start measures again."""
    with suppress(OSError):
        with replacing(path, lasting=False) as file:
            file.write(json.dumps(measured).encode())
        _drop_oldest(path.parent.glob("*.json"))


def _drop_oldest(files: Iterable[Path]) -> None:
    """Delete all but the newest MOST_FILES files."""
    for file in sorted(files, key=lambda each: each.stat().st_mtime)[:-MOST_FILES]:
        file.unlink(missing_ok=True)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError also for NaN and infinite numbers, and RecursionError."""
    return json.loads(text, parse_constant=_refuse_number, parse_float=_finite)


def _finite(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not a number of JSON")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises ModelError if it is missing, invalid, not an object, nested over MOST_DEPTH levels, or has text with lone
    surrogates, which can't be encoded.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} has no {path.name}", "name a folder in Hugging Face format, or download it again."
        ) from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error}", "check that it is a file you may read.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", "download the checkpoint again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object", "download the checkpoint again.")
    _check(content, path)
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file. Raises as `read_json` does."""
    return read_json(path) if path.exists() else {}


def is_deep(value: Any) -> bool:
    """Whether a JSON value is nested over MOST_DEPTH levels."""
    return next(islice(_levels(value), MOST_DEPTH, None), None) is not None


def _check(content: dict[str, Any], path: Path) -> None:
    if is_deep(content):
        raise ModelError(f"{path} is nested over {MOST_DEPTH} levels deep", "download the checkpoint again.")
    for value in chain.from_iterable(_levels(content)):
        if isinstance(value, str) and not is_encodable(value):
            raise ModelError(f"{path} has text that is not valid Unicode: {value!r}", "correct it.")


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values at each level of nesting, the outermost first."""
    level = [value]
    while level:
        yield level
        level = [inner for outer in level for inner in _inner(outer)]


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def is_encodable(text: str) -> bool:
    """Whether a text can be encoded in UTF-8; lone surrogates can't."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
