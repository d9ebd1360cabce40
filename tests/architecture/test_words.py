"""The pages that a user reads have a budget of words, all together."""

from __future__ import annotations

from tests.architecture.rooms import ROOT

WORDS = 30_200  # a commit that adds a feature may raise the number by what its pages need
SLACK = 0.05  # of the budget, which follows pages that shrink


def test_pages_keep_their_budget_of_words() -> None:
    pages = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
    words = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in pages}
    total = sum(words.values())
    assert total <= WORDS, f"{total} words: {words}"
    assert total >= WORDS * (1 - SLACK), f"{total} words: lower the budget of {WORDS}"
