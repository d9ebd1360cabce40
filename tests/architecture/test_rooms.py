"""Rooms are entered by their faces, and keep their budgets."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.architecture.rooms import ROOT, USERS, defined, home, inner_imports, rooms, size

SLACK = 0.05  # of a budget, which follows a room that shrinks
INNER_IMPORTS = 138  # of names that two files of a room have, of names that are also a file's; may only fall
# Lines and files. A commit that adds a feature may raise those of its room.
BUDGETS: dict[str, tuple[int, int]] = {
    "cache": (2325, 8),
    "cli": (3732, 13),
    "drafting": (7780, 44),
    "engine": (6410, 23),
    "kernels": (1790, 8),
    "lab.bench": (4260, 13),
    "lab.cli": (2913, 14),
    "lab.exactness": (1617, 6),
    "lab.fleet": (1206, 4),
    "lab.inflation": (1032, 5),
    "lab.quantize": (990, 5),
    "lab.theory": (569, 4),
    "lab.training": (4070, 12),
    "lengths": (1977, 8),
    "models": (15053, 76),
    "sampling": (419, 3),
    "scale": (2056, 10),
    "scheduling": (1350, 5),
    "serving": (10897, 46),
    "structured": (1889, 10),
    "text": (2857, 12),
    "verification": (610, 10),
}


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_keeps_its_budget(room: str) -> None:
    for is_, budget, unit in zip(size(room), BUDGETS[room], ("lines", "files"), strict=True):
        assert is_ <= budget, f"{room} has {is_} {unit}, and may have {budget}"
        assert is_ >= budget * (1 - SLACK) - 1, f"{room} has {is_} {unit}: lower its budget of {budget}"


def test_every_room_has_a_budget() -> None:
    assert BUDGETS.keys() == rooms().keys()


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_face_is_what_its_room_defines(room: str) -> None:
    face = importlib.import_module(f"speculant.{room}")
    assert sorted(face.__all__) == sorted(rooms()[room])
    for name, inner in rooms()[room].items():
        assert name in defined(inner), f"{inner} does not define {name}"


def test_rooms_are_entered_by_their_faces() -> None:
    files = [file for folder in USERS for file in sorted((ROOT / folder).rglob("*.py"))]
    found = [message for file in files for message in inner_imports(file)]
    assert len(found) == INNER_IMPORTS, "\n".join(found)


def test_an_import_from_inside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.architecture.rooms.ROOT", tmp_path)
    file = tmp_path / "test_it.py"
    file.write_text(
        "from speculant.cache import KVCache\nfrom speculant.cache.paged import Slots\nimport speculant.types\n"
    )
    assert list(inner_imports(file)) == ["test_it.py:2: speculant.cache.paged is inside cache"]
    assert home("cache.KVCache") == "cache.paged.KVCache"
