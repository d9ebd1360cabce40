"""Texts of a target with the hidden states of their tokens, on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
from speculant.lab.training.passes import states_of_layers
from speculant.models.reference.decoder import Decoder

FILE, STATES = "texts.safetensors", "states.f16"
HELD_OUT_SHARE = 0.05
_AT_A_TIME = 16  # texts of a pass


class TextsPlan(Protocol):
    """The texts that a target writes, and their folder: see `HeadTrainingConfig`."""

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
        """The limit for hidden states on disk."""
        ...

    @property
    def seed(self) -> int:
        """Of the choice of prompts."""
        ...


@dataclass(frozen=True)
class Texts:
    """Texts of equal length. tokens [w, n] int64; states [w, n, hidden] float16, after the target's final norm.

    taps: states of other layers, of the same form. The last `num_held_out` texts are not trained on. States are read
    from disk when they are used.
    """

    tokens: Tensor
    states: NDArray[np.float16]
    num_held_out: int
    taps: tuple[NDArray[np.float16], ...] = ()

    @property
    def num_training(self) -> int:
        """The number of texts that are trained on."""
        return len(self.tokens) - self.num_held_out

    def states_of(self, rows: Tensor) -> Tensor:
        """Return the states [b, n, hidden] of texts [b] in float32."""
        return _read(self.states, rows)

    def taps_of(self, rows: Tensor) -> Tensor:
        """Return the states of the other layers, side by side: [b, n, layers * hidden] in float32."""
        return torch.cat([_read(states, rows) for states in self.taps], dim=-1)

    def batch(self, first: int, count: int) -> Tensor:
        """Return texts by number, in another order in each epoch: [count, 1 + n], their places before their tokens."""
        rows = torch.tensor([self._place(number) for number in range(first, first + count)])
        return torch.cat((rows[:, None], self.tokens[rows]), dim=1)

    def _place(self, number: int) -> int:
        epoch, index = divmod(number, self.num_training)
        return int(np.random.default_rng(epoch).permutation(self.num_training)[index])


def most_texts(tokens: int, seq: int, width: int, cache_gib: float) -> int:
    """Return the number of texts: for this number of tokens, within the bound of states on disk; at least 2.

    width: numbers that are kept for each token.
    """
    return max(2, min(tokens // seq, int(cache_gib * 2**30) // (2 * seq * width)))


def save_texts(folder: Path, texts: Sequence[Sequence[int]], seq: int, seed: int) -> None:
    """Write the tokens of texts of at least `seq` tokens. Raises ConfigError if there are fewer than 2."""
    whole = [list(text[:seq]) for text in texts if len(text) >= seq]
    if len(whole) < 2:
        raise ConfigError(
            f"{len(whole)} of {len(texts)} texts have {seq} tokens", "lower --seq, or name more files for prompts."
        )
    temporary = folder / (FILE + ".part")
    save_file({"tokens": torch.tensor(whole)}, temporary, metadata={"seed": str(seed)})
    os.replace(temporary, folder / FILE)


def open_texts(
    folder: Path, target: Decoder, watch: Callable[[float], None] | None = None, layers: Sequence[int] = ()
) -> Texts:
    """Return the texts of a folder; missing states are computed and written.

    layers: whose states are kept beside those after the final norm, numbered as in `DrafterNeeds.hidden_layers`.
    """
    with safe_open(folder / FILE, framework="pt") as opened:
        tokens: Tensor = opened.get_tensor("tokens")
    shape = (*tokens.shape, target.hidden_size)
    paths = {target.num_layers + 1: folder / STATES} | {layer: folder / f"states-{layer}.f16" for layer in layers}
    size = 2 * int(np.prod(shape))
    missing = {layer: path for layer, path in paths.items() if not path.exists() or path.stat().st_size != size}
    if missing:
        _write_states(missing, tokens, target, watch)
    states = {layer: np.memmap(path, dtype=np.float16, mode="r", shape=shape) for layer, path in paths.items()}
    num_held_out = max(1, round(HELD_OUT_SHARE * len(tokens)))
    return Texts(tokens, states[target.num_layers + 1], num_held_out, tuple(states[layer] for layer in layers))


def _read(states: NDArray[np.float16], rows: Tensor) -> Tensor:
    return torch.from_numpy(np.stack([states[row] for row in rows.tolist()])).float()


def _write_states(
    paths: Mapping[int, Path], tokens: Tensor, target: Decoder, watch: Callable[[float], None] | None
) -> None:
    """Write the states of each layer to its file; numbers beyond float16 become its largest ones."""
    temporary = {layer: path.with_suffix(".part") for layer, path in paths.items()}
    most = torch.finfo(torch.float16).max
    with ExitStack() as stack, torch.inference_mode():
        files = [stack.enter_context(path.open("wb")) for path in temporary.values()]
        for first in range(0, len(tokens), _AT_A_TIME):
            found = states_of_layers(target, tokens[first : first + _AT_A_TIME], list(paths))
            for file, states in zip(files, found, strict=True):
                file.write(states.clamp(-most, most).half().numpy().tobytes())
            if watch:
                watch(min(1.0, (first + _AT_A_TIME) / len(tokens)))
    for layer, path in paths.items():
        os.replace(temporary[layer], path)
