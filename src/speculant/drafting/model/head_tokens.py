"""The tokens of a short output head, which are all that a draft model may draw (FR-Spec, arXiv 2502.14856).

A head of few rows is read faster. The model's probabilities are renormalised over these tokens, and other tokens have
probability 0, so ratio rules stay exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError

KEY = "head_tokens"


def save_head_tokens(path: Path, tokens: Sequence[int]) -> None:
    """Write the ids to a JSON file, in ascending order."""
    path.write_text(json.dumps({KEY: sorted(tokens)}) + "\n", encoding="utf-8")


def read_head_tokens(given: Any) -> tuple[int, ...]:
    """Read the option `head_tokens`: a file of `speculant train head-tokens`; None = all tokens. Raises ConfigError."""
    if given is None:
        return ()
    fix = 'make the file by `speculant train head-tokens` and set "head_tokens": "FILE.json".'
    if not isinstance(given, str | Path) or not str(given):
        raise ConfigError(f"head_tokens={given!r} names no file", fix)
    try:
        tokens = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))[KEY]
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:  # RuntimeError: no such home, deep JSON
        raise ConfigError(f"{given} is no file of head tokens: {type(error).__name__}: {error}", fix) from None
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise ConfigError(f"{given} has no list of token ids", fix)
    return tuple(sorted(set(tokens)))
