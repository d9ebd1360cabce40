"""Memory limits of control groups, which containers set and /proc/meminfo does not show.

    /proc/self/cgroup   0::/kubepods/pod1/box                    v2, one hierarchy
                        4:memory:/docker/1f0                     v1, one per controller
    the tree            kubepods/pod1/box, kubepods/pod1, kubepods, root: each may have a limit

Sources: Linux, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Version:
    tree: str
    limit: str
    usage: str
    cached: tuple[str, ...]  # entries of memory.stat: pages of files, which the system drops when it needs memory


_V1 = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def free_in_cgroups(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process's groups leave it, at least 0; None = no group has a limit.

    The pages of files that a group holds count as free, as they do in MemAvailable. `root` is the root of the file
    system, another one in tests.
    """
    free = [each for version, group in _groups(root) for each in _free(version, root / version.tree, group)]
    return max(0, min(free)) if free else None


def _groups(root: Path) -> Iterator[tuple[_Version, str]]:
    """Yield the groups of this process that can limit its memory."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield _V2, group
        elif "memory" in controllers.split(","):
            yield _V1, group


def _free(version: _Version, tree: Path, group: str) -> Iterator[int]:
    """Yield the free bytes of a group and of each group around it. A container may hide the inner part of the path."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        folder = tree.joinpath(*parts[:depth])
        limit, usage = _read(folder / version.limit).strip(), _read(folder / version.usage).strip()
        if limit.isdecimal() and usage.isdecimal():
            yield int(limit) - int(usage) + _cached(version, folder)


def _cached(version: _Version, folder: Path) -> int:
    entries = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return sum(int(value) for name, value in entries if name in version.cached)


def _read(path: Path) -> str:
    """Return a file's content, or "" if there is no such file: a group without a limit has none."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
