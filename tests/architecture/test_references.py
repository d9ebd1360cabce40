"""Every source that is cited can be found: papers by arXiv number, all else by a section of docs/references.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

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


def unknown_sections(text: str, headings: set[str]) -> list[str]:
    """Return what a text cites of docs/references.md that begins with none of its headings; case is ignored."""
    cited = re.findall(r"docs/references\.md, (.{1,40})", text)
    return [after for after in cited if not after.lower().startswith(tuple(headings))]


def test_references_has_what_is_cited() -> None:
    headings = {heading.lower() for heading in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    known = set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", PAGE))
    found = dict[str, list[str]]()
    for path in FILES:
        text = re.sub(r"\s+(?:#|//)?\s*", " ", path.read_text(encoding="utf-8"))
        found[str(path.relative_to(ROOT))] = [*(papers(text) - known), *unknown_sections(text, headings)]
    assert len(found) > 400
    assert {path: cited for path, cited in found.items() if cited} == {}


def test_references_are_public() -> None:
    """A number of three digits in brackets names a document that nobody else has."""
    found = {path: re.findall(r"\[00\d\b[^\]]*\]|\b[Ss]eed 00\d", path.read_text(encoding="utf-8")) for path in FILES}
    assert {str(path.relative_to(ROOT)): cited for path, cited in found.items() if cited} == {}


def test_citations_are_found() -> None:
    assert papers("(arXiv 2211.17192, A.4; arXiv 2302.01318)") == {"2211.17192", "2302.01318"}
    assert papers("arXiv 2305.09781, 2402.12374 and 2310.15141") == {"2305.09781", "2402.12374", "2310.15141"}
    text = "(docs/references.md, rollback) and docs/references.md, N-gram tables and (docs/references.md, magic)."
    assert unknown_sections(text, {"rollback", "n-gram tables"}) == ["magic)."]
