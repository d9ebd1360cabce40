"""Text files for training: their split, their tokens, windows of these, and counts.

A fixed split holds some of the files out. The tokenizer is a byte-level BPE in the format of Hugging Face checkpoints.
Windows are sections of equal length of a shuffled stream of documents:

    stream      a a a a <end> b b b b b b b <end> c c c ...        documents, in another order in each epoch
    window      <end> | t0 t1 t2 ... t(n-1)                        input is everything but the last token
    targets             t0 t1 t2 ... t(n-1)

Each window begins with END_OF_TEXT, as every prompt does, and if possible at the start of a line. So prompts have the
form of the training text, even if they come from the middle of a file.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from speculant.errors import ConfigError

HELD_OUT_PERCENT = 2
END_OF_TEXT = "<|endoftext|>"
SNAP = 64  # a window moves forward by fewer tokens than this to the start of a line


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


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; END_OF_TEXT is token 0 and precedes every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, 0)]
    )
    return tokenizer


def choose_tokenizer(out: Path, given: Path | None, train: Callable[[], Tokenizer]) -> Tokenizer:
    """Load the given or the run's own tokenizer; if there is none, train one and save it in `out`."""
    own = out / "tokenizer.json"
    if given or own.exists():
        return load_tokenizer(given or out)
    tokenizer = train()
    tokenizer.save(str(own))
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json from a folder. Raises ConfigError if it isn't there or has no END_OF_TEXT."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json", "name a folder that this command wrote.")
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ConfigError(f"{path} has no token {END_OF_TEXT}", "use a tokenizer that this command trained.")
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id of END_OF_TEXT."""
    token_id: int = tokenizer.get_vocab()[END_OF_TEXT]
    return token_id


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[NDArray[np.int64]]:
    """Tokenise each document, with END_OF_TEXT after it and not before it."""
    end = [end_of_text(tokenizer)]
    encodings = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    return [np.array(encoding.ids + end, dtype=np.int64) for encoding in encodings]


def line_starts(tokenizer: Tokenizer, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the tokens [n] that begin a line or a text: those after a line feed or END_OF_TEXT."""
    ends_line = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
    for token, token_id in tokenizer.get_vocab().items():
        ends_line[token_id] = token.endswith("Ċ") or token == END_OF_TEXT
    return np.concatenate(([True], ends_line[tokens[:-1]]))


class Windows:
    """Windows by number. They are a pure function of the seed, so a position in the data is one integer."""

    def __init__(
        self,
        documents: Sequence[NDArray[np.int64]],
        begins_line: Sequence[NDArray[np.bool_]],
        length: int,
        end_of_text: int,
        seed: int,
    ) -> None:
        """Take tokens and line starts [n] of each document; every document ends with `end_of_text`."""
        self._documents, self._begins_line = documents, begins_line
        self._length, self._end, self._seed = length, end_of_text, seed
        self.per_epoch = sum(map(len, documents)) // length - 2
        self._epoch = -1
        self._stream: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._starts: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> Tensor:
        """Return windows first .. first + count - 1, each END_OF_TEXT and `length` tokens: [count, 1 + length]."""
        return torch.from_numpy(np.stack([self._window(number) for number in range(first, first + count)]))

    def _window(self, number: int) -> NDArray[np.int64]:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._begin(epoch)
        start = self._starts[index]
        return np.concatenate(([self._end], self._stream[start : start + self._length]))

    def _begin(self, epoch: int) -> None:
        generator = np.random.default_rng([self._seed, epoch])
        order = generator.permutation(len(self._documents))
        self._stream = np.concatenate([self._documents[i] for i in order])
        cuts = generator.integers(self._length) + self._length * generator.permutation(self.per_epoch)
        self._starts = _snap(cuts, np.concatenate([self._begins_line[i] for i in order]))
        self._epoch = epoch


def _snap(cuts: NDArray[np.int64], begins_line: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Move each cut [n] to the next line start if it is less than SNAP tokens away."""
    starts = np.flatnonzero(begins_line)
    following = starts[np.minimum(np.searchsorted(starts, cuts), len(starts) - 1)]
    near = (following >= cuts) & (following - cuts < SNAP)
    return np.where(near, following, cuts)


def held_out_windows(documents: Sequence[NDArray[np.int64]], length: int, end_of_text: int) -> list[Tensor]:
    """Cut each document from its start into windows of up to `length` tokens, END_OF_TEXT before each."""
    return [
        torch.from_numpy(np.concatenate(([end_of_text], document[first : first + length])))
        for document in documents
        for first in range(0, len(document), length)
    ]


BATCH = 2**22  # pairs that are counted at a time: 32 MB


@dataclass(frozen=True)
class BigramCounts:
    """tokens [V]: counts of each. pairs [m], ascending: first * V + second of each pair; counts [m] of the pairs."""

    tokens: NDArray[np.int64]
    pairs: NDArray[np.int64]
    counts: NDArray[np.int64]


def count_bigrams(sequences: Iterable[Sequence[int]], vocab_size: int) -> BigramCounts:
    """Count tokens and neighbours; raises ConfigError for a token beyond the vocabulary, or if there is no pair."""
    tokens = np.zeros(vocab_size, dtype=np.int64)
    pairs = counts = np.zeros(0, dtype=np.int64)
    pending, num_pending = list[NDArray[np.int64]](), 0
    for sequence in sequences:
        own = _checked(sequence, vocab_size)
        tokens += np.bincount(own, minlength=vocab_size)
        pending.append(own[:-1] * vocab_size + own[1:])
        num_pending += len(pending[-1])
        if num_pending >= BATCH:
            pairs, counts = _add(pairs, counts, np.concatenate(pending))
            pending, num_pending = [], 0
    pairs, counts = _add(pairs, counts, np.concatenate([*pending, pairs[:0]]))
    if not len(pairs):
        raise ConfigError("the files hold no two tokens in a row", "name files with text.")
    return BigramCounts(tokens, pairs, counts)


def count_tokens(sequences: Iterable[Sequence[int]], vocab_size: int) -> NDArray[np.int64]:
    """Return the count of each token [V]; raises ConfigError for a token beyond the vocabulary."""
    tokens = np.zeros(vocab_size, dtype=np.int64)
    for sequence in sequences:
        tokens += np.bincount(_checked(sequence, vocab_size), minlength=vocab_size)
    return tokens


def _checked(sequence: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    if len(sequence) and not 0 <= min(sequence) <= max(sequence) < vocab_size:
        raise ConfigError(
            f"the files have the token {max(sequence)} and the vocabulary has {vocab_size}",
            "name the model of these tokens.",
        )
    return np.array(sequence, dtype=np.int64)


def _add(
    pairs: NDArray[np.int64], counts: NDArray[np.int64], more: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count more pairs."""
    found, inverse = np.unique(np.concatenate((pairs, more)), return_inverse=True)
    weights = np.concatenate((counts, np.ones(len(more), dtype=np.int64)))
    return found, np.bincount(inverse, weights=weights, minlength=len(found)).astype(np.int64)
