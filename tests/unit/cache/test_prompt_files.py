"""The files of the prompt cache: written whole or not at all, deleted in order of use, shared by processes."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from speculant.cache import BlockFiles, prune
from speculant.kept_files import TEMPORARY
from tests.examples import examples

MODEL = bytes(range(16))
TOKENS = [3, 1, 4, 1]
SALT = "somebody:their own"


def opened(folder: Path, limit: int = 2**30, model: bytes = MODEL) -> BlockFiles:
    files = BlockFiles(folder, model, limit)
    files.flush()
    return files


def keep(files: BlockFiles, key: bytes, content: bytes = b"content", place: int = 0) -> None:
    files.keep(key, place, TOKENS, SALT, len(content), lambda: memoryview(content))
    files.flush()


def content_of(files: BlockFiles, key: bytes, place: int = 0, size: int = 7) -> bytes | None:
    found = files.read(key, place, TOKENS, size)
    return None if found is None else bytes(found)


def test_a_file_is_found_by_its_tokens(tmp_path: Path) -> None:
    files = opened(tmp_path / "a" / "b")
    key = files.child(files.root("salt"), TOKENS)
    assert not files.has(key, 0)
    keep(files, key)
    other = opened(tmp_path / "a" / "b")
    assert content_of(other, other.child(other.root("salt"), TOKENS)) == b"content"
    for wrong in (
        other.child(other.root("salt"), [*TOKENS[:3], 2]),
        other.child(other.root(""), TOKENS),
        other.child(key, TOKENS),
    ):
        assert content_of(other, wrong) is None
    assert content_of(other, key, place=1) is None
    assert content_of(opened(tmp_path / "a" / "b", model=bytes(16)), key) == b"content", "the key names the model"
    assert files.read(key, 0, [1, 2, 3, 4], 7) is None, "other tokens under the same key"
    assert not files.has(key, 0)


def test_only_its_user_may_read(tmp_path: Path) -> None:
    files = opened(tmp_path / "cache")
    keep(files, b"key")
    (entry,) = BlockFiles.entries(tmp_path / "cache")
    assert entry.path.stat().st_mode & 0o777 == 0o600
    assert entry.path.parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert BlockFiles.model_of(entry.path) == MODEL.hex()


@pytest.mark.parametrize("kind", ["empty", "folder", "link", "pipe", "other"])
def test_what_is_no_file_of_the_cache(kind: str, tmp_path: Path) -> None:
    files = opened(tmp_path)
    keep(files, b"key")
    (entry,) = BlockFiles.entries(tmp_path)
    entry.path.unlink()
    make: dict[str, Callable[[], object]] = {
        "empty": entry.path.touch,
        "folder": entry.path.mkdir,
        "link": lambda: entry.path.symlink_to("/etc/passwd"),
        "pipe": lambda: os.mkfifo(entry.path),
        "other": lambda: entry.path.write_bytes(b"x" * 4096),
    }
    make[kind]()
    assert BlockFiles.verify(entry.path) != ""
    assert content_of(files, b"key") is None
    assert entry.path.exists() == (kind == "folder")
    assert Path("/etc/passwd").exists()


def test_the_least_recently_used_files_are_deleted(tmp_path: Path) -> None:
    files = opened(tmp_path)
    keys = [bytes([number]) for number in range(10)]
    for key in keys:
        keep(files, key, bytes(1000))
    size = sum(entry.size for entry in BlockFiles.entries(tmp_path))
    for place, entry in enumerate(BlockFiles.entries(tmp_path)):
        os.utime(entry.path, (place, place))
    files.mark_used([keys[3], keys[1]], [0])
    files.flush()
    left = prune(tmp_path, size // 2)
    assert left <= size // 2
    assert all(files.has(keys[place], 0) for place in (1, 3))
    order = [entry.path for entry in BlockFiles.entries(tmp_path)]
    assert order[-1] == files._path(keys[3], 0), "a text loses its end first"
    assert prune(tmp_path, size) == left, "nothing has to be deleted"


def test_all_files_stay_within_their_limit(tmp_path: Path) -> None:
    files = opened(tmp_path, limit=20_000)
    for number in range(100):
        keep(files, number.to_bytes(2, "big"), bytes(1000))
    assert 10_000 < sum(entry.size for entry in BlockFiles.entries(tmp_path)) <= 20_000
    assert files.has((99).to_bytes(2, "big"), 0)


def test_writers_of_one_folder_keep_its_limit(tmp_path: Path) -> None:
    writers = [opened(tmp_path, limit=100_000) for _ in range(4)]
    for number in range(100):
        for place, files in enumerate(writers):
            keep(files, bytes([number, place]), bytes(1000))
            assert sum(entry.size for entry in BlockFiles.entries(tmp_path)) < 150_000
    assert sum(entry.size for entry in BlockFiles.entries(tmp_path)) > 50_000


def test_what_is_larger_than_the_limit_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = opened(tmp_path, limit=100)
    for number in range(3):
        keep(files, bytes([number]), bytes(101))
    assert not BlockFiles.entries(tmp_path)
    assert caplog.text.count("a part of 101 bytes is above 100") == 1


def test_a_full_disk_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = opened(tmp_path)
    for number in range(20):
        keep(files, bytes([100 + number]))
    before = len(BlockFiles.entries(tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for number in range(5):
            keep(files, bytes([number]))
            files._paused = -1e9
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert before * 0.4 < len(BlockFiles.entries(tmp_path)) < before, "nothing makes room, or all is deleted"
    assert not [*tmp_path.glob("*/*" + TEMPORARY)]
    keep(files, b"later")
    assert content_of(files, b"later") == b"content"


def test_another_process_filled_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows nothing of the folder's files deletes a part of them, not all."""
    late, other = opened(tmp_path), opened(tmp_path)
    for number in range(20):
        keep(other, bytes([number]))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        keep(late, b"late")
    assert 15 <= len(BlockFiles.entries(tmp_path)) < 20


def test_a_size_that_is_not_expected(tmp_path: Path) -> None:
    """No memory is taken for it, however large the file is."""
    files = opened(tmp_path)
    for kind in ("sparse", "longer"):
        keep(files, b"key")
        (entry,) = BlockFiles.entries(tmp_path)
        if kind == "sparse":
            os.truncate(entry.path, 2**40)
        assert BlockFiles.verify(entry.path) == ("its form is another one" if kind == "sparse" else "")
        assert content_of(files, b"key", size=7 if kind == "sparse" else 8) is None
        assert not BlockFiles.entries(tmp_path)


def test_a_folder_that_is_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("")
    files = opened(tmp_path / "cache")
    keep(files, b"key")
    assert content_of(files, b"key") is None
    assert "not kept" in caplog.text


def test_a_clock_that_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path, limit=3000)
    keep(files, b"new", bytes(1000))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: 10**9)
        patch.setattr(time, "time", lambda: 1.0)
        for number in range(8):
            keep(files, bytes([number]), bytes(1000))
            files.mark_used([bytes([number])], [0])
    files.flush()
    assert content_of(files, b"new", size=1000) in (bytes(1000), None)
    assert sum(entry.size for entry in BlockFiles.entries(tmp_path)) <= 3000


def test_writers_that_are_killed(tmp_path: Path) -> None:
    """Whenever a process dies, each file that others see is whole, and its temporary file goes with the next start."""
    draws = random.Random(0)
    for _ in range(examples(200, least=8)):
        child = os.fork()
        if not child:
            files = BlockFiles(tmp_path, MODEL, 2**30)
            while True:
                content = random.randbytes(200_000)
                keep(files, content[:8], content)
        time.sleep(draws.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    opened(tmp_path)
    assert not [*tmp_path.glob("*/*" + TEMPORARY)]
    wrong = {BlockFiles.verify(entry.path) for entry in BlockFiles.entries(tmp_path)}
    assert wrong <= {""}, wrong


def test_processes_that_share_a_folder(tmp_path: Path) -> None:
    """Four processes write and read the same keys under a limit, and whatever is read is right."""
    children = []
    for seed in range(4):
        child = os.fork()
        if not child:
            files, draws, wrong = BlockFiles(tmp_path, MODEL, 300_000), random.Random(seed), 0
            for _ in range(examples(1000, least=200)):
                key = bytes([draws.randrange(40)])
                keep(files, key, key * 10_000)
                found = content_of(files, bytes([draws.randrange(40)]), size=10_000)
                wrong += found is not None and len(set(found)) != 1
            os._exit(wrong > 0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert {BlockFiles.verify(entry.path) for entry in BlockFiles.entries(tmp_path)} == {""}
    assert prune(tmp_path, 300_000) <= 300_000
