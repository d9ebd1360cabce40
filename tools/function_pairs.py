"""Writes pairs of texts for `speculant train seq2seq`, from the functions of Python's standard library.

python tools/function_pairs.py FOLDER

There are two tasks, named at the beginning of each source. "docstring: " is followed by a function without its
docstring, and the target is the first paragraph of that docstring. "line: " is followed by a function in which ???
stands for a line, and the target is this line. The folder gets train.sources.jsonl and train.targets.jsonl, and
held-out.sources.jsonl and held-out.targets.jsonl from the files that `speculant train lm` holds out. The pairs are the
same for the same version of Python.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from speculant.lab.training import Document, read_corpus, standard_library

MOST_CHARACTERS = 1500  # of a source
TARGET_CHARACTERS = 12, 400
LEAST_LINES = 5  # of a function with a missing line

Function = ast.FunctionDef | ast.AsyncFunctionDef


def pairs_of(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a file: sources and targets."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError):  # some of Python's own test files are wrong on purpose
        return
    lines = document.text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield from _pairs(node, lines)


def _pairs(node: Function, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    described = ast.get_docstring(node)
    text = _without_docstring(node, lines) if described else _text(lines[node.lineno - 1 : node.end_lineno])
    if described and len(node.body) > 1:
        yield from _fitting(f"docstring: {text}", " ".join(described.split("\n\n")[0].split()))
    own = text.split("\n")
    whole = [place for place, line in enumerate(own) if place and len(line.strip()) >= TARGET_CHARACTERS[0]]
    if len(own) >= LEAST_LINES and whole:
        place = whole[int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % len(whole)]
        line = own[place].strip()
        own[place] = own[place].replace(line, "???")
        yield from _fitting("line: " + "\n".join(own), line)


def _without_docstring(node: Function, lines: Sequence[str]) -> str:
    first = node.body[0]
    return _text([*lines[node.lineno - 1 : first.lineno - 1], *lines[first.end_lineno or 0 : node.end_lineno]])


def _text(lines: Sequence[str]) -> str:
    return textwrap.dedent("\n".join(lines)).strip("\n")


def _fitting(source: str, target: str) -> Iterator[tuple[str, str]]:
    least, most = TARGET_CHARACTERS
    if len(source) <= MOST_CHARACTERS and least <= len(target) <= most:
        yield source, target


def write_pairs(folder: Path, name: str, documents: Sequence[Document]) -> int:
    """Write the pairs of files, each source once; return their number."""
    found = dict(pair for document in documents for pair in pairs_of(document))
    for part, texts in (("sources", found.keys()), ("targets", found.values())):
        written = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
        (folder / f"{name}.{part}.jsonl").write_text(written, encoding="utf-8")
    return len(found)


def main(arguments: Sequence[str]) -> None:
    """Write the pairs of the standard library."""
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus([standard_library()])
    for name, documents in (("train", corpus.training), ("held-out", corpus.held_out)):
        print(f"{name}: {write_pairs(folder, name, documents):,} pairs")


if __name__ == "__main__":
    main(sys.argv[1:])
