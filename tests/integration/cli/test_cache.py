"""`speculant cache` lists, prunes, verifies and forgets what is kept between runs."""

from __future__ import annotations

import os
import time
from array import array
from pathlib import Path

import pytest

from speculant import LLM
from speculant.cache import BlockFiles
from speculant.engine import LearnedFiles
from speculant.kept_files import TEMPORARY, owner_of
from speculant.serving import API_KEY, USER, salt_of
from tests.commands import error_of, invoke, json_of

DAY = 86400
WEIGHTS = f"{'5e' * 16}.weights"
UNNAMED = {"SPECULANT_LEARN": None, "SPECULANT_PROMPT_CACHE": None}


def keep(folder: Path, salt: str, *, days: float = 0, tokens: int = 1000, method: str = "suffix") -> Path:
    """Write what was learned for a salt, used so many days ago."""
    files = LearnedFiles(folder, "v", "models/a")
    path = files.path(method, "texts", salt)
    files.write(path, method, [array("i", range(tokens))])
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def test_list_shows_kinds_and_sizes(tmp_path: Path) -> None:
    paths = [keep(tmp_path, "a", days=3), keep(tmp_path, "b")]
    (tmp_path / WEIGHTS).write_bytes(b"12345")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other.json").write_text("{}")
    shown = json_of("cache", "list", tmp_path)
    size = sum(path.stat().st_size for path in paths)
    learned, weights = shown["kinds"]
    assert shown["bytes"] == size + 5
    assert (learned["kind"], learned["files"], learned["bytes"], learned["models"]) == (
        "learned",
        2,
        size,
        {"models/a": 2},
    )
    assert learned["newest_use"] - learned["oldest_use"] == pytest.approx(3 * DAY, abs=60)
    assert (weights["kind"], weights["files"], weights["bytes"], weights["models"]) == ("weights", 1, 5, {})
    text = invoke("cache", "list", tmp_path).stdout
    assert f"learned in {tmp_path}: 2 files" in text
    assert "of models/a" in text


def test_list_without_a_folder_shows_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "speculant" / "weights").mkdir(parents=True)
    (tmp_path / "speculant" / "costs").mkdir()
    env = {**UNNAMED, "XDG_CACHE_HOME": str(tmp_path)}
    assert invoke("cache", "list", **env).stdout == "nothing is kept\n"
    (tmp_path / "speculant" / "weights" / WEIGHTS).write_bytes(b"123")
    (tmp_path / "speculant" / "costs" / "x.json").write_text("{}")
    keep(tmp_path / "learned", "a")
    found = json_of("cache", "list", **{**env, "SPECULANT_LEARN": str(tmp_path / "learned")})["kinds"]
    assert [(each["kind"], each["files"]) for each in found] == [("learned", 1), ("weights", 1), ("costs", 1)]


def test_prune_deletes_what_was_used_longest_ago(tmp_path: Path) -> None:
    old, middle, new = (keep(tmp_path, str(days), days=days) for days in (9, 5, 1))
    assert json_of("cache", "prune", tmp_path, "--older-than", "7d") == {
        "files": 3, "deleted": 1, "bytes": middle.stat().st_size
    }  # fmt: skip
    assert not old.exists()
    size = new.stat().st_size
    assert json_of("cache", "prune", tmp_path, "--size", 2 * size)["deleted"] == 0
    assert json_of("cache", "prune", tmp_path, "--size", 2 * size - 1)["deleted"] == 1
    assert [*tmp_path.iterdir()] == [new]
    assert "deleted: 1 of 1 files" in invoke("cache", "prune", tmp_path, "--older-than", "1h", "--size", "1GiB").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prune", "{}"], "nothing says what to delete"),
        (["prune", "{}", "--older-than", "soon"], "'soon' is no time"),
        (["prune", "{}", "--size", "much"], "'much' is not a size"),
        (["verify", "{}/none"], "is no folder"),
        (["forget", ""], "is no folder"),
        (["list", "~nobody-of-this-name/x"], "no user of this name"),
        (["forget"], "no folder is named"),
    ],
)
def test_errors_say_the_fix(tmp_path: Path, arguments: list[str], says: str) -> None:
    error = error_of("cache", *(each.format(tmp_path) for each in arguments), **UNNAMED)
    assert says in error.problem
    assert error.fix


def test_verify_deletes_damaged_files(tmp_path: Path) -> None:
    sound, damaged, cut = (keep(tmp_path, salt) for salt in "abc")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    cut.write_bytes(content[:20])
    abandoned = tmp_path / f"tmpx{TEMPORARY}"
    abandoned.write_bytes(b"half")
    shown = json_of("cache", "verify", tmp_path)
    assert (shown["files"], shown["damaged"], {*shown["problems"]}) == (3, 2, {str(damaged), str(cut)})
    assert [*tmp_path.iterdir()] == [sound]
    assert invoke("cache", "verify", tmp_path).stdout == "damaged: 0 of 1 files, 0.0 MiB\n"


def test_forget_deletes_what_one_key_taught(tmp_path: Path) -> None:
    def salt(key: str | None, own: str | None = None, user: str | None = None) -> str:
        return salt_of({name: value for name, value in ((API_KEY, key), (USER, user)) if value is not None}, own)

    def left() -> set[Path]:
        return {*tmp_path.iterdir()}

    one = keep(tmp_path, salt("one")), keep(tmp_path, salt("one", "a")), keep(tmp_path, salt("one", user="u"))
    two = keep(tmp_path, salt("two")), keep(tmp_path, salt("two", "a"))
    nobody, program, server = keep(tmp_path, ""), keep(tmp_path, "a"), keep(tmp_path, salt(None, "a"))
    assert json_of("cache", "forget", tmp_path, "--api-key", "three")["forgotten"] == 0
    assert json_of("cache", "forget", tmp_path, "--api-key", "two", "--salt", "a")["forgotten"] == 1
    assert left() == {*one, two[0], nobody, program, server}
    assert json_of("cache", "forget", tmp_path, "--api-key", "one")["forgotten"] == 3
    assert left() == {two[0], nobody, program, server}
    chosen = (
        keep(tmp_path, salt("one", "a")),
        keep(tmp_path, salt("one", "a", "u")),
        keep(tmp_path, salt(None, "a", "u")),
    )
    colons = keep(tmp_path, "mine:b"), keep(tmp_path, "yours:b"), keep(tmp_path, salt("one", "mine:b"))
    assert json_of("cache", "forget", tmp_path, "--salt", "mine:b")["forgotten"] == 2
    assert left() == {two[0], nobody, program, server, *chosen, colons[1]}
    assert json_of("cache", "forget", tmp_path, "--api-key", "one", "--salt", "a")["forgotten"] == 2
    keep(tmp_path, salt("one", "a", "u"))
    assert json_of("cache", "forget", tmp_path, "--salt", "a")["forgotten"] == 4
    colons[1].unlink()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / WEIGHTS).write_bytes(b"1")
    assert "1 files are of no key" in invoke("cache", "forget", tmp_path, "--api-key", "two").stdout
    assert json_of("cache", "forget", **{**UNNAMED, "SPECULANT_LEARN": str(tmp_path)})["forgotten"] == 2
    assert [each.name for each in left()] == ["notes.txt"]


def test_prompts_are_listed_verified_and_forgotten(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, bytes(range(16)), 2**30)
    salts = [salt_of({API_KEY: "one"}, None), salt_of({API_KEY: "one"}, "a"), salt_of({API_KEY: "two"}, None), ""]
    for number, salt in enumerate(salts):
        files.keep(bytes([number]), 0, [1, 2], f"{salt}\0more", 3, lambda: b"abc")
    files.flush()
    (row,) = json_of("cache", "list", tmp_path)["kinds"]
    assert (row["kind"], row["files"], row["models"]) == ("prompt", 4, {bytes(range(16)).hex(): 4})
    assert json_of("cache", "verify", tmp_path)["damaged"] == 0
    path = next(
        entry.path for entry in BlockFiles.entries(tmp_path) if BlockFiles.belongs(entry.path, owner_of(salts[2]), None)
    )
    path.write_bytes(path.read_bytes()[:-1] + b"d")
    assert json_of("cache", "verify", tmp_path)["damaged"] == 1
    assert json_of("cache", "forget", tmp_path, "--api-key", "one", "--salt", "a")["forgotten"] == 1
    assert json_of("cache", "forget", tmp_path, "--api-key", "one")["forgotten"] == 1
    assert json_of("cache", "prune", tmp_path, "--older-than", "1h")["deleted"] == 0
    assert json_of("cache", "forget", tmp_path)["forgotten"] == 1
    assert not BlockFiles.entries(tmp_path)


OTHERS = ["yolov3.weights", "notes.learned", "ab/store.kv", "film.mkv.part", f"{'5e' * 16}.kv", "x-y-z.learned"]


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    for name in OTHERS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"not ours" * 100)
    for command in (["list"], ["verify"], ["prune", "--size", 1], ["prune", "--older-than", "0s"], ["forget"]):
        name, *options = command
        assert not any(json_of("cache", name, tmp_path, *options).values())
    engine = LLM("demo", prompt_cache=tmp_path, learn=tmp_path, prompt_cache_size=1)
    engine.generate("a text")
    engine.engine.close()
    assert all((tmp_path / name).exists() for name in OTHERS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_root_checks_and_forgets_the_files_of_a_server(tmp_path: Path) -> None:
    """Without losing any that is sound, though an engine of root's would not read them."""
    files, salt = BlockFiles(tmp_path, bytes(16), 2**30), salt_of({API_KEY: "one"}, None)
    files.keep(b"key", 0, [1, 2], salt, 3, lambda: b"abc")
    files.flush()
    (entry,) = BlockFiles.entries(tmp_path)
    for path in (entry.path, keep(tmp_path, salt), keep(tmp_path, "other")):
        os.chown(path, 4321, -1)
    assert files.read(b"key", 0, [1, 2], 3) is None
    assert json_of("cache", "verify", tmp_path) == {"files": 3, "damaged": 0, "bytes": 0, "problems": {}}
    assert json_of("cache", "forget", tmp_path, "--api-key", "one")["forgotten"] == 2
    assert len([*tmp_path.glob("*.learned")]) == 1


def test_what_can_not_be_treated_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(tmp_path, "a")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("speculant.engine.learning.open_kept", refused)
    shown = invoke("cache", "verify", tmp_path, code=1).stdout
    assert "not read: " in shown
    assert "1 files can't be read" in shown
    assert json_of("cache", "verify", tmp_path, code=1)["unread"].keys() == {str(path)}
    monkeypatch.setattr(Path, "unlink", refused)
    assert "1 files can't be deleted" in invoke("cache", "forget", tmp_path, code=1).stdout
    assert path.exists()
    monkeypatch.setattr(os, "access", lambda *_: False)
    for command in ("list", "verify", "forget"):
        assert "can't be read" in error_of("cache", command, tmp_path).problem


def test_folders_of_variables_need_not_exist(tmp_path: Path) -> None:
    keep(tmp_path, "a")
    env = {**UNNAMED, "SPECULANT_LEARN": str(tmp_path), "SPECULANT_PROMPT_CACHE": str(tmp_path / "none")}
    assert json_of("cache", "verify", **env)["files"] == 1
    assert json_of("cache", "forget", **{**env, "SPECULANT_LEARN": None})["forgotten"] == 0


def test_every_command_of_cache_has_help_with_examples() -> None:
    for name in ("list", "prune", "verify", "forget"):
        shown = invoke("cache", name, "--help").stdout
        assert f"speculant cache {name}" in shown
        assert "--json" in shown
