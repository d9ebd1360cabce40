"""The models and prompts that all peers get."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.base import Pair, Workload
from benchmarks.peers.t5_models import made_pair

from speculant.lab.bench import code_prompt
from speculant.lab.inflation import PAIRS, inflated_pair
from speculant.models import resolve_source
from speculant.text import Tokenizer

DEMO = "demo"  # the embedded pair at its own size
T5 = {"t5-tiny": ("tiny", "tiny"), "t5-base": ("base", "small"), "t5-large": ("large", "small")}
CHOICES = (DEMO, *PAIRS, *T5)
POSITIONS = 8192  # in config.json; the pair was trained on 1,024: longer texts have the same cost and less sense
_SPARE, _WARM_UP = 64, 512  # tokens
_TRIES = 10  # pieces of code for each prompt


def make_pair(shape: str, folder: Path) -> Pair:
    """Return the pair at a shape, with room for long prompts.

    folder: gets folders with changed configurations and with links to the weights.
    """
    if shape == DEMO:
        sources = [resolve_source(DEMO, "target"), resolve_source(DEMO, "draft")]
    elif shape in T5:
        sources = list(made_pair(*T5[shape]))
    else:
        sources = list(inflated_pair(shape))
    made = [_lengthen(source, folder / role) for source, role in zip(sources, ("target", "draft"), strict=True)]
    return Pair(*map(str, made))


def _lengthen(source: Path, folder: Path) -> Path:
    """Make a folder that links to a checkpoint, with a config of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    text = json.dumps({**config, "max_position_embeddings": POSITIONS}, indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


class Workloads:
    """Makes workloads; no two workloads of an object have a piece of code in common."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._numbers = tokenizer, itertools.count()

    def make(self, batch: int, length: int, tokens: int) -> Workload:
        """Make `batch` prompts of exactly `length` tokens, and the same number for the warm-up."""
        prompts = self._take(batch, length)
        texts = [self._tokenizer.decode(prompt) for prompt in prompts]
        return Workload(prompts, texts, self._take(batch, min(length, _WARM_UP)), tokens)

    def _take(self, number: int, length: int) -> list[list[int]]:
        """Return `number` prompts; a piece of code that has no end of this length is left out."""
        found = list[list[int]]()
        for _ in range(_TRIES * number):
            prompt = canonical_prompt(self._tokenizer, next(self._numbers), length)
            found += [] if prompt is None else [prompt]
            if len(found) == number:
                return found
        raise ValueError(
            f"only {len(found)} of {_TRIES * number} pieces of code have an end of exactly {length} tokens"
        )


def canonical_prompt(tokenizer: Tokenizer, index: int, length: int) -> list[int] | None:
    """Return the end of a piece of code as tokens into which its text is encoded again, for peers that read text.

    None = no end of this piece has exactly `length` tokens.
    """
    return next(_encodings(tokenizer, index, length), None)


def _encodings(tokenizer: Tokenizer, index: int, length: int) -> Iterator[list[int]]:
    longer = code_prompt(tokenizer, index, length + _SPARE)
    for cut in range(len(longer)):
        ids = tokenizer.encode(tokenizer.decode(longer[cut:]))
        if len(ids) == length and tokenizer.encode(tokenizer.decode(ids)) == ids:
            yield ids
