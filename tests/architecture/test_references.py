"""Every source that is cited can be found: papers by arXiv number, all else by a section of docs/references.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
READ = ("src/speculant", "csrc", "tests", "docs", "examples", "benchmarks")
SUFFIXES = {".py", ".h", ".cpp", ".md"}


def _files() -> Iterator[Path]:
    for folder in READ:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    yield from (ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))


FILES = sorted(set(_files()) - {Path(__file__)})


def papers(text: str) -> set[str]:
    """Return the arXiv numbers that a text cites."""
    cited = re.findall(r"ar[Xx]iv[:\s]+((?:\d{4}\.\d{5}(?:,\s+|\s+and\s+)?)+)", text)
    return {number for numbers in cited for number in re.findall(r"\d{4}\.\d{5}", numbers)}


def sections(text: str) -> set[str]:
    """Return the sections of docs/references.md that a text cites, in lower case."""
    return {name.strip().lower() for name in re.findall(r"docs/references\.md, ([A-Za-z -]+)", text)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_references_has_what_is_cited(path: Path) -> None:
    text = re.sub(r"\s+(?:#|//)?\s*", " ", path.read_text(encoding="utf-8"))
    headings = {heading.lower() for heading in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    assert papers(text) <= set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", PAGE))
    assert sections(text) <= headings


def test_citations_are_found() -> None:
    assert papers("(arXiv 2211.17192, A.4; arXiv 2302.01318)") == {"2211.17192", "2302.01318"}
    assert sections("(docs/references.md, rollback) and (docs/references.md, N-gram tables)") == {
        "rollback",
        "n-gram tables",
    }
