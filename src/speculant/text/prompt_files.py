"""Prompts from a file: one text per line, or JSON lines such as those of Spec-Bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from speculant.errors import RequestError

FORMS = 'write a text, a list of token ids, {"prompt": ...} of either, or {"turns": [...]} of texts.'


class FilePrompt(NamedTuple):
    """A text or token ids, and the kind of task that the file names."""

    content: str | list[int]
    category: str | None = None


def read_prompts(path: Path) -> list[FilePrompt]:
    """Read one prompt per line.

    A line of a .jsonl file is a text, a list of token ids, {"prompt": either}, or {"turns": [text, ...]} as in
    Spec-Bench, whose first turn is the prompt; an object may have a `category`. Raises RequestError for a file that
    can't be read or has no prompts, and for any other line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the prompts {str(path)!r} can't be read: {error}",
            'use "code", "edit", "random" or a UTF-8 file with one prompt a line.',
        ) from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise RequestError(f"{path} has no prompts", "write one a line.")
    if path.suffix != ".jsonl":
        return [FilePrompt(line) for _, line in filled]
    return [_read_line(f"{path}:{number}", line) for number, line in filled]


def _read_line(place: str, line: str) -> FilePrompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place} is not valid JSON: {error}", "write one JSON value a line.") from error
    category = value.get("category") if isinstance(value, dict) else None
    if category is not None and not isinstance(category, str):
        raise RequestError(f"{place} has the category {category!r}, which is no text", "write a name, or leave it out.")
    content = _content(value)
    if isinstance(content, str) and content:
        return FilePrompt(content, category)
    if isinstance(content, list) and content and all(type(token) is int for token in content):
        return FilePrompt(content, category)
    raise RequestError(f"{place} has no prompt", FORMS)


def _content(value: Any) -> Any:
    """Return the place of a line's prompt, which may hold anything; a first turn is a text."""
    if not isinstance(value, dict):
        return value
    if "prompt" in value or "turns" not in value:
        return value.get("prompt")
    turns = value["turns"]
    return turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], str) else None
