"""Files of prompts: their forms, and the errors of a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculant.errors import RequestError
from speculant.text.text_files import FilePrompt, read_prompts


def test_a_jsonl_file_has_texts_token_ids_or_objects(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    values: list[Any] = ["a\nb", [1, 2], {"prompt": "c", "id": 7}, {"prompt": [3], "category": "d"}]
    path.write_text("\n".join(json.dumps(value) for value in values))
    expected = [("a\nb", None), ([1, 2], None), ("c", None), ([3], "d")]
    assert read_prompts(path) == [FilePrompt(*each) for each in expected]


def test_the_first_turn_of_a_conversation_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorten it."]},
        {"question_id": 82, "category": "math", "turns": ["1 + 1?"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_prompts(path) == [FilePrompt("Write a poem.", "writing"), FilePrompt("1 + 1?", "math")]


@pytest.mark.parametrize(
    "line",
    [
        *("{", '""', "[]", "[true]", '[1, "a"]', '{"text": "a"}', "3", "null", '{"turns": []}', '{"turns": "a"}'),
        *('{"turns": [[1]]}', '{"turns": [""]}', '{"prompt": "a", "category": 3}', "[" * 100_000),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"good"\n{line}\n')
    with pytest.raises(RequestError, match="jsonl:2"):
        read_prompts(path)


def test_a_text_file_has_no_categories(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('{"prompt": "a"}\n\n[1]\n')
    assert read_prompts(path) == [FilePrompt('{"prompt": "a"}'), FilePrompt("[1]")]
