"""The models and prompts that all peers get."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.base import Pair, Workload

from speculant import __version__
from speculant.bench.inflated_pair import SHAPES, inflated_pair
from speculant.bench.workloads import code_prompt
from speculant.models.source import resolve_source
from speculant.text.tokenizer import Tokenizer

DEMO = "demo"  # the embedded pair at its own size
CHOICES = (DEMO, *SHAPES)
POSITIONS = 8192  # that config.json allows; the pair was trained on 1,024, so that longer texts cost alike and say less
_SPARE, _WARM_UP = 64, 512  # tokens


def make_pair(shape: str, folder: Path) -> Pair:
    """Return the pair at a shape, with room for long prompts; the weights stay where they are.

    folder: where conversions may be kept, one for each shape and version.
    """
    if shape == DEMO:
        sources = [resolve_source(DEMO, "target"), resolve_source(DEMO, "draft")]
    else:
        sources = list(inflated_pair(shape))
    made = [_lengthen(source, folder / role) for source, role in zip(sources, ("target", "draft"), strict=True)]
    return Pair(*map(str, made))


def conversions(cache: Path, shape: str) -> Path:
    """Return the folder of a shape's conversions."""
    return cache / f"{__version__}-{shape}"


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


def make_workload(tokenizer: Tokenizer, first: int, batch: int, length: int, tokens: int) -> Workload:
    """Make `batch` prompts of exactly `length` tokens, from the first-th piece of code on, and as many to warm up."""
    prompts = [canonical_prompt(tokenizer, first + index, length) for index in range(batch)]
    warm_up = [canonical_prompt(tokenizer, first + batch + index, min(length, _WARM_UP)) for index in range(batch)]
    return Workload(prompts, [tokenizer.decode(prompt) for prompt in prompts], warm_up, tokens)


def canonical_prompt(tokenizer: Tokenizer, index: int, length: int) -> list[int]:
    """Return a piece of code in the tokens that its text is encoded in, as a peer that reads text needs it."""
    found = next(_encodings(tokenizer, index, length), None)
    if found is None:
        raise ValueError(f"no end of the code number {index} has exactly {length} tokens")
    return found


def _encodings(tokenizer: Tokenizer, index: int, length: int) -> Iterator[list[int]]:
    longer = code_prompt(tokenizer, index, length + _SPARE)
    for cut in range(len(longer)):
        ids = tokenizer.encode(tokenizer.decode(longer[cut:]))
        if len(ids) == length:
            yield ids
