"""Files and predictions that drafters need. Each drafter has one line in the sets below."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from speculant import plugins
from speculant.drafting import BigramTables, Method
from speculant.lab.training import count_bigrams
from speculant.models import resolve_source
from speculant.params import SamplingParams
from tests.heads import WRITERS

Texts = tuple[tuple[int, ...], ...]  # what the target will say, or like it


@cache
def _tables(vocab_size: int, texts: Texts) -> str:
    """Write tables that know some texts; return the file."""
    found = count_bigrams(texts, vocab_size)
    path = Path(tempfile.mkdtemp(prefix="tables-")) / "tables.safetensors"
    BigramTables.of_counts(found.tokens, found.pairs, found.counts, continuations=8).save(path)
    return str(path)


OPTIONS: Mapping[str, Callable[[int, Texts], dict[str, Any]]] = {
    "static": lambda vocab_size, texts: {"tables": _tables(vocab_size, texts)},
}
HEADS = tuple(WRITERS)  # methods whose model is a head
SHIPPED = ("eagle", "medusa")  # those with a head for the embedded target
UNSHIPPED = tuple(method for method in HEADS if method not in SHIPPED)
# Methods unlike each other, for tests that need no more of them in `make test`: a cache of its own, trees, a head, the
# target's first layers, copies of texts, and one method within another.
FEW_METHODS = ("draft_model", "specinfer", "eagle3", "early_exit", "suffix", "cascade")
PREDICTED = {"prediction"}  # methods that draft from a request's prediction
BLIND = {
    "random",
    "blockwise",
    "eagle3",
    "mtp",
    "peagle",
    "dflash",
    "pass",
}  # methods whose drafts are accepted by chance alone: random heads too


def options_of(method: str, vocab_size: int, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the options that a method needs; `texts` resemble the target's outputs."""
    make = OPTIONS.get(method)
    return {} if make is None else make(vocab_size, tuple(map(tuple, texts)))


@cache
def _head(method: str, hidden: int, vocab_size: int) -> str:
    return WRITERS[method](Path(tempfile.mkdtemp(prefix="heads-")), hidden, vocab_size)


def model_of(method: str, draft: str, hidden: int, vocab_size: int) -> str | None:
    """Return the model that a method drafts with, for a target of these sizes: a draft, a head, or none.

    A head is random, unless `draft` is the embedded one and there is an embedded head too.
    """
    if method in HEADS and not (method in SHIPPED and draft == "demo"):
        return _head(method, hidden, vocab_size)
    facts: Method = plugins.load("speculant.drafting", method).METHOD
    if facts.reads_masks:
        return with_mask(draft)
    return draft if facts.uses_model else None


@cache
def with_mask(draft: str, token: int = 3) -> str:
    """Return a copy of a draft model whose config.json says that it reads masks."""
    source, folder = resolve_source(draft, "draft"), Path(tempfile.mkdtemp(prefix="masks-"))
    if source.is_file():
        pytest.skip("a GGUF file names no mask token")
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").unlink()
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"pard_token": token}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def predicting(method: str, params: SamplingParams, answer: Sequence[int]) -> SamplingParams:
    """Return the settings of a request whose output is `answer`, predicted with an error where the method reads it."""
    if method not in PREDICTED:
        return params
    middle = len(answer) // 2
    guess = [*answer[:middle], (answer[middle] + 1) % 2, *answer[middle + 1 :]] if answer else [0]
    return replace(params, speculation={"prediction": guess})
