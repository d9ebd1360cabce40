"""Texts of a target with the hidden states of their tokens, on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculant.errors import ConfigError
from speculant.models.decoder import Decoder
from speculant.training.passes import hidden_states

FILE, STATES = "texts.safetensors", "states.f16"
HELD_OUT_SHARE = 0.05
_AT_A_TIME = 16  # texts of a pass


class TextsPlan(Protocol):
    """What texts a target writes, and the folder that they are kept in: see `HeadTrainingConfig`."""

    @property
    def out(self) -> Path:
        """The folder."""
        ...

    @property
    def target(self) -> str:
        """The target's folder or id."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        ...

    @property
    def seq(self) -> int:
        """Tokens in a text."""
        ...

    @property
    def temperature(self) -> float:
        """Of the texts."""
        ...

    @property
    def cache_gib(self) -> float:
        """The most that hidden states may take on disk."""
        ...

    @property
    def seed(self) -> int:
        """Chooses the prompts."""
        ...


@dataclass(frozen=True)
class Texts:
    """Texts of equal length. tokens [w, n] int64; states [w, n, hidden] float16, after the target's final norm.

    The last `num_held_out` texts are not trained on. States are read from disk as they are used.
    """

    tokens: Tensor
    states: NDArray[np.float16]
    num_held_out: int

    @property
    def num_training(self) -> int:
        """How many texts are trained on."""
        return len(self.tokens) - self.num_held_out

    def states_of(self, rows: Tensor) -> Tensor:
        """Return the states [b, n, hidden] of texts [b] in float32."""
        return torch.from_numpy(np.stack([self.states[row] for row in rows.tolist()])).float()

    def batch(self, first: int, count: int) -> Tensor:
        """Return texts by number, each epoch in another order: [count, 1 + n], their places before their tokens."""
        rows = torch.tensor([self._place(number) for number in range(first, first + count)])
        return torch.cat((rows[:, None], self.tokens[rows]), dim=1)

    def _place(self, number: int) -> int:
        epoch, index = divmod(number, self.num_training)
        return int(np.random.default_rng(epoch).permutation(self.num_training)[index])


def most_texts(tokens: int, seq: int, hidden_size: int, cache_gib: float) -> int:
    """Return how many texts are made: for as many tokens, with states within the bound on disk; at least 2."""
    return max(2, min(tokens // seq, int(cache_gib * 2**30) // (2 * seq * hidden_size)))


def save_texts(folder: Path, texts: Sequence[Sequence[int]], seq: int, seed: int) -> None:
    """Write the tokens of texts, without those shorter than `seq`. Raises ConfigError if fewer than 2 are left."""
    whole = [list(text[:seq]) for text in texts if len(text) >= seq]
    if len(whole) < 2:
        raise ConfigError(
            f"{len(whole)} of {len(texts)} texts have {seq} tokens", "lower --seq, or name more files for prompts."
        )
    temporary = folder / (FILE + ".part")
    save_file({"tokens": torch.tensor(whole)}, temporary, metadata={"seed": str(seed)})
    os.replace(temporary, folder / FILE)


def open_texts(folder: Path, target: Decoder, watch: Callable[[float], None] | None = None) -> Texts:
    """Return the texts of a folder; the states that are missing are computed and written."""
    with safe_open(folder / FILE, framework="pt") as opened:
        tokens: Tensor = opened.get_tensor("tokens")
    path, shape = folder / STATES, (*tokens.shape, target.hidden_size)
    if not path.exists() or path.stat().st_size != 2 * int(np.prod(shape)):
        _write_states(path, tokens, target, watch)
    states = np.memmap(path, dtype=np.float16, mode="r", shape=shape)
    return Texts(tokens, states, max(1, round(HELD_OUT_SHARE * len(tokens))))


def _write_states(path: Path, tokens: Tensor, target: Decoder, watch: Callable[[float], None] | None) -> None:
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file, torch.inference_mode():
        for first in range(0, len(tokens), _AT_A_TIME):
            states = hidden_states(target, tokens[first : first + _AT_A_TIME])
            file.write(states.half().numpy().tobytes())
            if watch:
                watch(min(1.0, (first + _AT_A_TIME) / len(tokens)))
    os.replace(temporary, path)
