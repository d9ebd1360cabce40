"""Files of texts or token ids, one a line or as a whole, and of prompts, such as those of Spec-Bench."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from speculant.errors import ConfigError, Converts, RequestError
from speculant.text.tokenizer import Tokenizer

FORMS = 'write a text, a list of token ids, {"prompt": ...} of either, or {"turns": [...]} of texts.'
_TOKENS = ".jsonl"


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
    fix = 'use "code", "edit", "random" or a UTF-8 file with one prompt a line.'
    with Converts(RequestError, f"the prompts {str(path)!r} can't be read", fix):
        lines = path.read_text(encoding="utf-8").splitlines()
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise RequestError(f"{path} has no prompts", "write one a line.")
    if path.suffix != ".jsonl":
        return [FilePrompt(line) for _, line in filled]
    return [_read_line(f"{path}:{number}", line) for number, line in filled]


def _read_line(place: str, line: str) -> FilePrompt:
    with Converts(RequestError, f"{place} is not valid JSON", "write one JSON value a line."):
        value = json.loads(line)
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


def read_sequences(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of each file, without special tokens.

    A file named *.jsonl has token ids: each line is a list of them, or an object with `token_ids`, such as `speculant
    generate --json` prints. Any other file is UTF-8 text. Raises ConfigError for a file of another form.
    """
    for path in files:
        text = _read(path)
        if path.suffix == _TOKENS:
            for number, line in enumerate(text.splitlines(), 1):
                if line:
                    yield _token_ids(_json(line, where := f"{path}:{number}"), where)
        else:
            yield tokenizer.encode(text, add_special_tokens=False)


def read_lines(path: Path) -> list[str | list[int]]:
    """Return what each line of a file holds; "" = nothing.

    A line of a .jsonl file is a JSON string, or token ids as in `read_sequences`; of any other file, a text. Raises
    ConfigError for a file of another form.
    """
    lines = _read(path).removesuffix("\n").split("\n")
    if path.suffix != _TOKENS:
        return [line if line.strip() else "" for line in lines]
    return [_text_or_ids(line, f"{path}:{number}") if line.strip() else "" for number, line in enumerate(lines, 1)]


def _read(path: Path) -> str:
    with Converts(ConfigError, f"{path} can't be read as text", "name UTF-8 text files."):
        return path.read_text(encoding="utf-8")


def _text_or_ids(line: str, where: str) -> str | list[int]:
    value = _json(line, where)
    return value if isinstance(value, str) else _token_ids(value, where)


def _json(line: str, where: str) -> Any:
    with Converts(ConfigError, f"{where} is not JSON", "write one JSON value a line."):
        return json.loads(line)


def _token_ids(value: Any, where: str) -> list[int]:
    ids = value.get("token_ids") if isinstance(value, dict) else value
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"{where} has no token ids", 'write [1, 2, 3] or {"token_ids": [1, 2, 3]}.')
    return ids
