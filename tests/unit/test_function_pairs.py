"""tools/function_pairs.py writes what functions do, and their missing lines."""

from __future__ import annotations

import json
from pathlib import Path

from tools.function_pairs import pairs_of, write_pairs

from speculant.lab.training import Document

CODE = '''\
class Stack:
    def push(self, item, *, times=1):
        """Put an item onto the stack,
        several times.

        More is said here.
        """
        for _ in range(times):
            self._items.append(item)

    def _no_docstring(self):
        number_of_items = len(self._items)
        if number_of_items:
            return number_of_items
        return None
'''


def test_docstrings_and_lines_are_asked_for() -> None:
    pairs = dict(pairs_of(Document("stack.py", CODE)))
    push = "def push(self, item, *, times=1):\n    for _ in range(times):\n        self._items.append(item)"
    assert pairs[f"docstring: {push}"] == "Put an item onto the stack, several times."
    [(source, line)] = [(source, target) for source, target in pairs.items() if source.startswith("line: ")]
    whole = source.removeprefix("line: ").replace("???", line)
    assert whole == "\n".join(part[4:] for part in CODE.split("\n")[10:15])
    assert len(pairs) == 2


def test_files_that_are_no_python_have_no_pairs() -> None:
    assert list(pairs_of(Document("a.py", "def f(:\n"))) == []


def test_pairs_are_written_line_by_line(tmp_path: Path) -> None:
    documents = [Document("stack.py", CODE), Document("copy.py", CODE)]
    assert write_pairs(tmp_path, "train", documents) == 2
    read = [(tmp_path / f"train.{part}.jsonl").read_text().splitlines() for part in ("sources", "targets")]
    assert [json.loads(line) for line in read[0]] == [source for source, _ in pairs_of(documents[0])]
    assert len(read[1]) == 2
