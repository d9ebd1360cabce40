"""Pairs of texts for an encoder-decoder model: sources, and the targets that the decoder writes for them.

    source      s s s s s <end>                the encoder reads all of it
    inputs      <start> t t t                  the decoder's inputs
    target              t t t <end>            the tokens it learns to write

The start token and the end token are END_OF_TEXT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from speculant.errors import ConfigError
from speculant.lab.training.corpus import is_held_out
from speculant.lab.training.tokenizer import end_of_text
from speculant.text.text_files import read_lines

_POOL = 32  # batches whose pairs are sorted by length together, so that a batch has little padding
_NO_TOKEN = -1


@dataclass(frozen=True)
class PairTexts:
    """Sources and targets, before they are tokens."""

    sources: Sequence[str]
    targets: Sequence[str]

    def split(self) -> tuple[PairTexts, PairTexts]:
        """Return the pairs to train on, and those that are held out."""
        out = [is_held_out(source) for source in self.sources]
        return self._those(not each for each in out), self._those(out)

    def _those(self, chosen: Iterable[bool]) -> PairTexts:
        found = [pair for pair, take in zip(self.pairs(), chosen, strict=True) if take]
        return PairTexts([source for source, _ in found], [target for _, target in found])

    def pairs(self) -> Iterable[tuple[str, str]]:
        """Return the pairs."""
        return zip(self.sources, self.targets, strict=True)


def read_texts(sources: Path, targets: Path) -> PairTexts:
    """Read a text from each line, in a .jsonl file as a JSON string. Raises ConfigError unless each has a target.

    A pair without a source or a target is left out.
    """
    found = [_lines(path) for path in (sources, targets)]
    if len(found[0]) != len(found[1]):
        raise ConfigError(
            f"{sources} has {len(found[0])} lines and {targets} has {len(found[1])}",
            "write the target of each source on the line of the same number.",
        )
    whole = [pair for pair in zip(*found, strict=True) if all(pair)]
    if not whole:
        raise ConfigError(f"{sources} and {targets} have no pairs", "write a source and its target on the same line.")
    return PairTexts([source for source, _ in whole], [target for _, target in whole])


def _lines(path: Path) -> list[str]:
    lines = read_lines(path)
    texts = [line for line in lines if isinstance(line, str)]
    if len(texts) < len(lines):
        raise ConfigError(f"{path} has token ids", "write texts, so that a tokenizer can be trained on them.")
    return texts


@dataclass(frozen=True)
class PairBatch:
    """sources [B, m], padded, and their lengths [B]. inputs [B, n]: the decoder's, padded.

    real [B, n]: which inputs are not padding. tokens [r]: the token that follows each of these inputs.
    """

    sources: Tensor
    lengths: Tensor
    inputs: Tensor
    real: Tensor
    tokens: Tensor


class Pairs:
    """Tokenised pairs by number. Batches are a pure function of the seed."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor], end: int) -> None:
        """Take the tokens [m_i] and [n_i] of each pair, which end with `end`."""
        self._sources, self._targets, self._end = sources, targets, end

    @classmethod
    def of(cls, texts: PairTexts, tokenizer: Tokenizer, source_tokens: int, target_tokens: int) -> Pairs:
        """Tokenise texts; sources and targets with more tokens are cut."""
        end = end_of_text(tokenizer)
        sources, targets = (
            _encoded(tokenizer, texts, most, end)
            for texts, most in ((texts.sources, source_tokens), (texts.targets, target_tokens))
        )
        return cls(sources, targets, end)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._sources)

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens of all targets."""
        return sum(map(len, self._targets))

    def places(self, number: int) -> list[list[int]]:
        """Return the places of all pairs in groups of this size, with pairs of similar lengths together."""
        order = sorted(range(len(self)), key=self.lengths)
        return [order[first : first + number] for first in range(0, len(order), number)]

    def tensors(self, places: Sequence[int], device: torch.device | str = "cpu") -> PairBatch:
        """Return the pairs at these places."""
        sources, targets = [self._sources[place] for place in places], [self._targets[place] for place in places]
        padded = pad_sequence(targets, batch_first=True, padding_value=_NO_TOKEN).to(device)
        real, start = padded != _NO_TOKEN, padded.new_full((len(places), 1), self._end)
        return PairBatch(
            pad_sequence(sources, batch_first=True, padding_value=self._end).to(device),
            torch.tensor([len(source) for source in sources]).to(device),
            torch.cat((start, padded[:, :-1].clamp(min=0)), dim=1),
            real,
            padded[real],
        )

    def lengths(self, place: int) -> tuple[int, int]:
        """Return the numbers of tokens of a source and of its target."""
        return len(self._sources[place]), len(self._targets[place])


class PairBatches:
    """Batches of pairs by number, in another order in each epoch; see `Batches`."""

    def __init__(self, pairs: Pairs, size: int, seed: int) -> None:
        """Raises ConfigError if the pairs don't fill a batch of `size`."""
        if len(pairs) < size:
            raise ConfigError(f"{len(pairs)} pairs don't fill a batch of {size}", "lower --batch or add pairs.")
        self.pairs, self._size, self._seed = pairs, size, seed
        self._ordered = lru_cache(maxsize=1)(self._order)

    def batch(self, first: int, count: int) -> Tensor:
        """Return the places of pairs, each followed by a zero per token of the longest target: [count, 1 + n]."""
        places = [self._place(number) for number in range(first, first + count)]
        longest = max(self.pairs.lengths(place)[1] for place in places)
        return functional.pad(torch.tensor(places)[:, None], (0, longest))

    def _place(self, number: int) -> int:
        epoch, index = divmod(number, len(self.pairs) // self._size * self._size)
        return int(self._ordered(epoch)[index])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.default_rng([self._seed, epoch])
        chosen, pool = generator.permutation(len(self.pairs)), _POOL * self._size
        pools = [sorted(chosen[at : at + pool], key=self.pairs.lengths) for at in range(0, len(chosen), pool)]
        batches = np.concatenate(pools)[: len(chosen) // self._size * self._size].reshape(-1, self._size)
        return batches[generator.permutation(len(batches))].flatten()


def _encoded(tokenizer: Tokenizer, texts: Sequence[str], most: int, end: int) -> list[Tensor]:
    """Return the first tokens of each text and then `end`, at most `most` in all."""
    found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [torch.tensor([*encoding.ids[: most - 1], end]) for encoding in found]
