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
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read as text: {error}", "name UTF-8 text files.") from error
        if path.suffix == _TOKENS:
            yield from (
                _token_ids(line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1) if line
            )
        else:
            yield tokenizer.encode(text, add_special_tokens=False)


def _token_ids(line: str, where: str) -> list[int]:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", "write one list of token ids a line.") from error
    ids = value.get("token_ids") if isinstance(value, dict) else value
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"{where} has no token ids", 'write [1, 2, 3] or {"token_ids": [1, 2, 3]}.')
    return ids
