"""Finds a draft model or a head for a target for which the user named none.

    beside the target           models in its folder, and in the folders beside it
    the Hugging Face cache      the snapshots of models that were downloaded
    our own cache of models     $XDG_CACHE_HOME/speculant/models

A draft model fits if it has the target's tokens, at most MOST_SHARE of its weights, and room in the memory. A head fits
if its config.json names the target. Candidates whose names are most like the target's are read first, headers only, for
at most SEARCH_S seconds. A candidate that can't be read is passed over, whatever the error.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from speculant.drafting import installed, named_kind
from speculant.engine.memory import free_memory
from speculant.errors import SpeculantError
from speculant.files import cache_folder
from speculant.gguf_file import SUFFIX, model_name, parts_of
from speculant.models import Checkpoint, CheckpointFiles, is_model_file, matrix_weights, read_model_config
from speculant.text import Tokenizer, compare_vocabularies

logger = logging.getLogger(__name__)

SEARCH_S = 1.0  # after which no further header is read; one takes up to half a second
MOST_ENTRIES = 256  # of a folder
MOST_JSON = 2**26  # bytes of a JSON file; a tokenizer's has up to 2**25
MOST_SHARE = 0.5  # of the target's weights: a larger draft hardly ever pays
SHARE_OF_FREE = 0.25  # of the free memory, for the draft's weights
_SNAPSHOTS, _REPOSITORY = "snapshots", "models--"  # in the cache of Hugging Face


@dataclass(frozen=True)
class DraftPlace:
    """A place that may hold a draft. size: the bytes of its weights."""

    place: Path
    size: int

    @property
    def name(self) -> str:
        """The model's name."""
        return name_of_place(self.place)


@dataclass(frozen=True)
class FoundDraft:
    """A draft that fits by its headers. method: of a head; None = a draft model. why: for the user."""

    place: Path
    method: str | None
    why: str


class _PassedOverError(Exception):
    """A candidate does not fit; the text says why."""


def find_drafts(target: Checkpoint, tokenizer: Tokenizer, download_dir: str | None = None) -> Iterator[FoundDraft]:
    """Yield the drafts that fit a target, the best first, as far as the time allows: a caller's own is not counted."""
    names, left, begun = {name_of_place(target.folder), target.name}, SEARCH_S, time.monotonic()
    try:
        found = _ordered(candidates(target.folder, download_dir, begun + left), name_of_place(target.folder))
    except Exception as error:  # noqa: BLE001 - the engine starts without a draft
        logger.info("no draft is looked for: %r", error)
        return
    for candidate in found:
        if (left := left + begun - time.monotonic()) < 0:
            logger.info("the search for drafts ended after %.1f s: %s was not read", SEARCH_S, candidate.place)
            return
        begun = time.monotonic()
        try:
            fitting = _fitting(candidate, target, tokenizer, names)
        except _PassedOverError as reason:
            logger.info("not used as a draft: %s, because %s", candidate.place, reason)
        except SpeculantError as error:
            logger.info("not used as a draft: %s, because %s", candidate.place, error.problem)
        except Exception as error:  # noqa: BLE001 - whatever a file holds
            logger.info("not used as a draft: %s, because its files can't be read: %r", candidate.place, error)
        else:
            left += begun - time.monotonic()
            yield fitting
            begun = time.monotonic()


def _ordered(found: Iterable[DraftPlace], name: str) -> list[DraftPlace]:
    """Return candidates, those whose names begin like the target's first, and of these the smallest."""

    def alike(other: str) -> int:
        pairs = zip(name.lower(), other.lower(), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    return sorted(found, key=lambda each: (-alike(each.name), each.size))


def _fitting(candidate: DraftPlace, target: Checkpoint, tokenizer: Tokenizer, names: set[str]) -> FoundDraft:
    """Return a draft that fits; raises _PassedOverError, or the error of a file that is damaged."""
    place = candidate.place
    _check_files(place)
    config = read_model_config(place)
    free = free_memory(target.model.cache_shape.device)
    if candidate.size > SHARE_OF_FREE * free:
        raise _PassedOverError(f"it has {candidate.size >> 20} MiB, and {free >> 20} MiB of memory are free")
    if (kind := named_kind(config)) is not None:
        if not installed(kind) or not names & set(_targets_of(config)):
            raise _PassedOverError(f"it is a head of the kind {kind!r}, and does not name this target")
        return FoundDraft(place, kind, "its config.json names the target")
    files = CheckpointFiles.open(place)
    if (files.decoder.encoder is not None) != target.model.needs.source:
        raise _PassedOverError("one of the two models has an encoder")
    share = matrix_weights(files.decoder) / target.weights
    if share > MOST_SHARE:
        raise _PassedOverError(f"it has {share:.2f} of the target's weights")
    if not tokenizer.has_file_of(place) and compare_vocabularies(tokenizer, Tokenizer.load(place)):
        raise _PassedOverError("its vocabulary is not the target's")
    return FoundDraft(place, None, f"the target's tokens, {share:.2f} of its weights")


def _check_files(place: Path) -> None:
    """Raise _PassedOverError for pipes and devices, whose reading may never end, and for very large JSON files."""
    for entry in _entries(place) if place.is_dir() else [place]:
        found = entry.stat()
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise _PassedOverError(f"{entry.name} is not a regular file")
        if entry.suffix == ".json" and found.st_size > MOST_JSON:
            raise _PassedOverError(f"{entry.name} has {found.st_size >> 20} MiB")


def _targets_of(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the target that a head's config.json has, without the publisher."""
    inner = config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, Mapping) else None
    named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    for given in (config.get("target"), config.get("base_model_name_or_path"), named):
        if isinstance(given, str) and given:
            yield name_of_place(Path(given))


def name_of_place(place: Path) -> str:
    """Return the name of the model in a folder or a GGUF file; that of the repository of a downloaded folder."""
    if place.suffix.lower() == SUFFIX:
        return model_name(place)
    if place.parent.name == _SNAPSHOTS:
        return place.parents[1].name.rpartition("--")[2]
    return place.name


def candidates(target: Path, download_dir: str | None = None, end: float = math.inf) -> list[DraftPlace]:
    """Return the places that may hold a draft for a target at a place, each once. end: of the search, in seconds."""
    own, found = target.resolve(), dict[Path, DraftPlace]()
    for place in takewhile(lambda _: time.monotonic() < end, _places(target, download_dir)):
        with suppress(OSError):
            if (size := _size(place)) and (key := place.resolve()) != own:
                found.setdefault(key, DraftPlace(place, size))
    return [*found.values()]


def _places(target: Path, download_dir: str | None) -> Iterator[Path]:
    roots = [target.parent, *([target.parent.parent] if target.is_file() else [])]
    for root in roots:
        if root.name != _SNAPSHOTS:  # revisions of one model
            for entry in _entries(root):
                yield from _models_in(entry)
    for hub in {Path(download_dir)} if download_dir else hub_folders():
        for repository in _entries(hub):
            if repository.name.startswith(_REPOSITORY):
                for snapshot in _entries(repository / _SNAPSHOTS):
                    yield from _models_in(snapshot)
    for entry in _entries(cache_folder("models")):
        yield from _models_in(entry)


def _models_in(entry: Path) -> list[Path]:
    """Return a GGUF file, a folder of a checkpoint, or the GGUF files in a folder; none where nothing can be read."""
    with suppress(OSError):  # a folder that belongs to somebody else
        if is_model_file(entry) or (entry / "config.json").is_file():
            return [entry]
        return [*filter(is_model_file, _entries(entry))] if entry.is_dir() else []
    return []


def _entries(folder: Path) -> list[Path]:
    """Return the first entries of a folder; none if it can't be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in islice(entries, MOST_ENTRIES)]
    return []


def hub_folders() -> list[Path]:
    """Return the folder of downloads from the Hugging Face hub, as its own client finds it."""
    given = os.environ
    home = Path(given.get("HF_HOME") or Path(given.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return [Path(given.get("HF_HUB_CACHE") or given.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()]


def _size(place: Path) -> int:
    """Return the bytes of a candidate's weights."""
    files = parts_of(place) if place.is_file() else [*place.glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)
