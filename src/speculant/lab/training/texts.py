"""Texts of a target with the hidden states of their tokens, on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from speculant.cache import slotted_cache
from speculant.errors import ConfigError
from speculant.lab.training.trainer import Batches, Watch
from speculant.models import CausalLM, SequenceInput, build_batch
from speculant.types import DraftTree

FILE, STATES = "texts.safetensors", "states.f16"
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Texts(Batches):
    """Texts of equal length. tokens [w, n] int64; states [w, n, hidden] float16, after the target's final norm.

    Batches [b, 1 + n] have the places of texts before their tokens, in another order in each epoch. taps: states of
    other layers, of the same form. The last `num_held_out` texts are not trained on. States are read
    from disk when they are used, and given on `device`.
    """

    tokens: Tensor
    states: NDArray[np.float16]
    num_held_out: int
    taps: tuple[NDArray[np.float16], ...] = ()
    device: torch.device | str = "cpu"

    @property
    def num_training(self) -> int:
        """The number of texts that are trained on."""
        return len(self.tokens) - self.num_held_out

    @cached_property
    def opening(self) -> int:
        """How many first tokens all texts share, such as a chat template's; at most half of a text.

        Losses and figures leave them out, because a drafter never has to predict them.
        """
        same = (self.tokens == self.tokens[0]).all(0)
        return min(int(same.long().cumprod(0).sum()), self.tokens.shape[1] // 2)

    def states_of(self, rows: Tensor) -> Tensor:
        """Return the states [b, n, hidden] of texts [b] in float32."""
        return self._read(self.states, rows)

    def tokens_of(self, rows: Tensor) -> Tensor:
        """Return the tokens [b, n] of texts."""
        return self.tokens[rows].to(self.device)

    def taps_of(self, rows: Tensor) -> Tensor:
        """Return the states of the other layers, side by side: [b, n, layers * hidden] in float32."""
        return torch.cat([self._read(states, rows) for states in self.taps], dim=-1)

    @override
    def batch(self, first: int, count: int) -> Tensor:
        rows = torch.tensor([self._place(number) for number in range(first, first + count)])
        return torch.cat((rows[:, None], self.tokens[rows]), dim=1)

    def _read(self, states: NDArray[np.float16], rows: Tensor) -> Tensor:
        return torch.from_numpy(np.stack([states[row] for row in rows.tolist()])).to(self.device).float()

    def _place(self, number: int) -> int:
        epoch, index = divmod(number, self.num_training)
        return int(np.random.default_rng(epoch).permutation(self.num_training)[index])


def num_held_out(count: int) -> int:
    """Return how many of `count` texts are held out; they are the last ones."""
    return max(1, round(HELD_OUT_SHARE * count))


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


def open_texts(folder: Path, model: CausalLM, watch: Watch | None = None, layers: Sequence[int] = ()) -> Texts:
    """Return the texts of a folder; missing states are computed by the model and written.

    layers: whose states are kept beside those after the final norm, numbered as in `TargetNeeds.hidden_layers`.
    """
    tokens = _tokens(folder)
    shape, paths = (*tokens.shape, model.hidden_size), _paths(folder, layers)
    missing = [layer for layer, path in paths.items() if not _is_whole(path, tokens, model.hidden_size)]
    if missing:
        _write_states({layer: paths[layer] for layer in missing}, tokens, model, watch)
    states = {layer: np.memmap(path, dtype=np.float16, mode="r", shape=shape) for layer, path in paths.items()}
    taps = tuple(states[layer] for layer in layers)
    return Texts(tokens, states[None], num_held_out(len(tokens)), taps, model.cache_shape.device)


def missing_states(folder: Path, hidden_size: int, layers: Sequence[int]) -> bool:
    """Whether states of a folder's texts are missing."""
    tokens = _tokens(folder)
    return not all(_is_whole(path, tokens, hidden_size) for path in _paths(folder, layers).values())


def _tokens(folder: Path) -> Tensor:
    with safe_open(folder / FILE, framework="pt") as opened:
        tokens: Tensor = opened.get_tensor("tokens")
    return tokens


def _paths(folder: Path, layers: Sequence[int]) -> dict[int | None, Path]:
    """Return the files of states by layer; None = those after the final norm."""
    return {None: folder / STATES, **{layer: folder / f"states-{layer}.f16" for layer in layers}}


def _is_whole(path: Path, tokens: Tensor, hidden_size: int) -> bool:
    return path.exists() and path.stat().st_size == 2 * tokens.numel() * hidden_size


def _write_states(paths: Mapping[int | None, Path], tokens: Tensor, model: CausalLM, watch: Watch | None) -> None:
    """Write the states of each layer to its file; numbers beyond float16 become its largest ones."""
    temporary = {layer: path.with_suffix(".part") for layer, path in paths.items()}
    most, taps = torch.finfo(torch.float16).max, [layer for layer in paths if layer is not None]
    cache = slotted_cache(model.cache_shape, 1, tokens.shape[1])
    with ExitStack() as stack, torch.inference_mode():
        files = {layer: stack.enter_context(path.open("wb")) for layer, path in temporary.items()}
        for place, text in enumerate(tokens.tolist(), 1):
            batch = build_batch([SequenceInput(0, text, DraftTree.empty())], cache, model.cache_shape.device)
            hidden = model.forward(batch, cache.storage, taps)
            cache.release(0)
            for layer, file in files.items():
                states = hidden.last if layer is None else hidden.taps[taps.index(layer)]
                file.write(states.float().clamp(-most, most).half().cpu().numpy().tobytes())
            if watch:
                watch(place / len(tokens))
    for layer, path in paths.items():
        os.replace(temporary[layer], path)
