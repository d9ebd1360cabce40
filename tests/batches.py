"""Batch files for tests, and answerers without an engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from speculant.scale import BatchLine, LineAnswer


class Killed(BaseException):
    """What stands for kill -9: nothing that handles errors sees it."""


def request(number: int, prompt: str = "", **fields: Any) -> dict[str, Any]:
    """Return a completion; `fields` replace those of the line."""
    body = {"prompt": prompt or f"# number {number}\n", "max_tokens": 4, "temperature": 0}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body, **fields}


def write(path: Path, lines: Iterable[object]) -> Path:
    """Write lines: texts as they are, other values as JSON."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def read(*paths: Path) -> list[dict[str, Any]]:
    """Return the results in files, whose lines are all whole."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    assert all(text.endswith("\n") for text in texts if text)
    return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]


def check_complete(lines: Sequence[dict[str, Any]], *paths: Path) -> None:
    """Check that every line has one result, in one of the files."""
    found = Counter(result["custom_id"] for result in read(*paths))
    assert found == Counter(line["custom_id"] for line in lines)


async def echo(line: BatchLine) -> LineAnswer:
    """Answer with the length of the body, like a server with one token for each line."""
    body = {"echo": len(line.body), "usage": {"prompt_tokens": 2, "completion_tokens": 1}}
    return LineAnswer(200, f"id-{line.number}", json.dumps(body).encode())
