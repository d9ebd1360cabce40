"""The README's picture is the one that its script draws."""

from __future__ import annotations

from tools.demo_picture import PICTURE, draw


def test_picture_is_up_to_date() -> None:
    assert draw() == PICTURE.read_text(encoding="utf-8"), "run tools/demo_picture.py"
    assert PICTURE.stat().st_size < 60_000
