"""Files of tokens: text, or token ids of a model's outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError
from speculant.text.tokenizer import Tokenizer

_TOKENS = ".jsonl"


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
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as text: {error}", "name UTF-8 text files.") from error


def _text_or_ids(line: str, where: str) -> str | list[int]:
    value = _json(line, where)
    return value if isinstance(value, str) else _token_ids(value, where)


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", "write one JSON value a line.") from error


def _token_ids(value: Any, where: str) -> list[int]:
    ids = value.get("token_ids") if isinstance(value, dict) else value
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"{where} has no token ids", 'write [1, 2, 3] or {"token_ids": [1, 2, 3]}.')
    return ids
