"""Reads the JSON files of a checkpoint, where an invalid one is a ModelError, and names the folder of kept files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from speculant.errors import ModelError

MOST_DEPTH = 32  # levels of nesting; far below the interpreter's recursion limit, so that values can be printed


def cache_folder(name: str) -> Path:
    """Return where files of a kind are kept between runs: in $XDG_CACHE_HOME/speculant, or ~/.cache/speculant."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speculant" / name


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises ModelError when it is missing, invalid, not an object, nested over MOST_DEPTH levels, or has text with lone
    surrogates, which can't be encoded.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} has no {path.name}", "name a folder in Hugging Face format, or download it again."
        ) from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error}", "check that it is a file you may read.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", "download the checkpoint again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object", "download the checkpoint again.")
    _check(content, path)
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one if there is no such file; raises as `read_json` does."""
    return read_json(path) if path.exists() else {}


def is_deep(value: Any) -> bool:
    """Whether a JSON value is nested over MOST_DEPTH levels."""
    return next(islice(_levels(value), MOST_DEPTH, None), None) is not None


def _check(content: dict[str, Any], path: Path) -> None:
    if is_deep(content):
        raise ModelError(f"{path} is nested over {MOST_DEPTH} levels deep", "download the checkpoint again.")
    for value in chain.from_iterable(_levels(content)):
        if isinstance(value, str) and not is_encodable(value):
            raise ModelError(f"{path} has text that is not valid Unicode: {value!r}", "correct it.")


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values at each level of nesting, the outermost first."""
    level = [value]
    while level:
        yield level
        level = [inner for outer in level for inner in _inner(outer)]


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def is_encodable(text: str) -> bool:
    """Whether a text has a UTF-8 form, which a lone surrogate has not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
