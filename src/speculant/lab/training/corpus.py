"""Text files for training, and the fixed split that holds some of them out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from speculant.errors import ConfigError

HELD_OUT_PERCENT = 2


@dataclass(frozen=True)
class Document:
    """One text file: its path relative to its root folder, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training documents, and held-out documents that neither tokenizer nor model is trained on."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def training_bytes(self) -> int:
        """Size of the training text in UTF-8."""
        return sum(len(document.text.encode()) for document in self.training)


def standard_library() -> Path:
    """Return the folder with the running interpreter's own Python sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(name: str, percent: int = HELD_OUT_PERCENT) -> bool:
    """Return whether a file is held out. A hash of its relative path decides, so the split is fixed."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < percent


def read_corpus(roots: Sequence[Path], suffix: str = ".py") -> Corpus:
    """Read every file below the roots that ends in `suffix`, in order of path.

    Installed packages (site-packages) and files that are empty or not UTF-8 are left out.
    Raises ConfigError when a root is missing, or when one side of the split is empty.
    """
    documents = [document for root in roots for document in _read_root(root, suffix)]
    corpus = Corpus(
        tuple(document for document in documents if not is_held_out(document.name)),
        tuple(document for document in documents if is_held_out(document.name)),
    )
    _check(corpus, roots, suffix)
    return corpus


def _check(corpus: Corpus, roots: Sequence[Path], suffix: str) -> None:
    where = ", ".join(str(root) for root in roots)
    if not corpus.training:
        raise ConfigError(f"no readable *{suffix} file below {where}", "name another folder, or set --suffix.")
    if not corpus.held_out:
        raise ConfigError(
            f"none of the {len(corpus.training)} files below {where} falls under the held-out rule",
            "add more files: about one path in fifty is held out.",
        )


def _read_root(root: Path, suffix: str) -> Iterable[Document]:
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder", "name a folder that holds text files.")
    for path in sorted(root.rglob(f"*{suffix}")):
        name = path.relative_to(root)
        if path.is_file() and "site-packages" not in name.parts:
            yield from _read_file(path, name.as_posix())


def _read_file(path: Path, name: str) -> Iterable[Document]:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return
    if text.strip():
        yield Document(name, text.replace("\r\n", "\n"))
