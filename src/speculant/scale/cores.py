"""Gives each replica of a machine cores of its own. Replicas that share cores are slower than one alone."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


class Cores:
    """Cores that this process alone uses, among all processes that claim theirs here.

    A lock on a file stands for each core. The system releases it when the process ends, however it ends.
    """

    def __init__(self, numbers: frozenset[int], locks: tuple[IO[str], ...]) -> None:
        self.numbers, self._locks = numbers, locks

    @classmethod
    def claim(cls, count: int, folder: Path | None = None) -> Cores | None:
        """Return `count` free cores; None if fewer are free, or if this system knows no sets of cores."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        folder = folder or Path(tempfile.gettempdir()) / f"speculant-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            logger.warning("%s belongs to others: this replica shares cores with others", folder)
            return None
        taken: dict[int, IO[str]] = {}
        for core in sorted(os.sched_getaffinity(0)):
            if len(taken) == count:
                break
            if (lock := _locked(folder / f"core-{core}")) is not None:
                taken[core] = lock
        if len(taken) < count:
            for lock in taken.values():
                lock.close()
            logger.warning("only %s of %s cores are free: this replica shares cores with others", len(taken), count)
            return None
        return cls(frozenset(taken), tuple(taken.values()))

    @classmethod
    def use_free(cls, count: int) -> Cores | None:
        """Claim `count` cores and use them; return None, and leave all cores to the process, if fewer are free."""
        cores = cls.claim(count)
        if cores is not None:
            cores.use()
        return cores

    def use(self) -> None:
        """Bind this process to the cores; threads that are made later inherit that."""
        os.sched_setaffinity(0, self.numbers)

    def release(self) -> None:
        """Let others claim the cores."""
        for lock in self._locks:
            lock.close()


def _locked(path: Path) -> IO[str] | None:
    file = os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
