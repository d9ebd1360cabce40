"""Which lines are left, whatever happened before."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from speculant.errors import ConfigError, RequestError, SpeculantError
from speculant.scale import BatchJob, BatchLine, LineAnswer, LineError, Origin, Write, answer_lines, batches as jobs
from tests.batches import Killed, check_complete, echo, read, request, write

LINES = [request(number) for number in range(6)]


class Folder:
    """The three files of a batch."""

    def __init__(self, path: Path) -> None:
        self.source, self.out, self.errors = (path / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))

    def open(self, write: Write = os.write) -> BatchJob:
        """Return the job of these files."""
        return BatchJob.open(self.source, self.out, self.errors, write=write)

    def run(self, write: Write = os.write) -> None:
        """Answer what is left."""
        with self.open(write) as job:
            asyncio.run(answer_lines(job, _some_fail, 2))


async def _some_fail(line: BatchLine) -> LineAnswer:
    """Refuse every third line."""
    return await echo(line) if line.number % 3 else LineAnswer(400, "id", b'{"error":{"message":"no"}}')


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Return a folder with an input."""
    files = Folder(tmp_path)
    write(files.source, LINES)
    return files


def test_every_line_has_one_result(folder: Folder) -> None:
    write(folder.source, [LINES[0], "nonsense", "", LINES[1], LINES[2], LINES[0], *LINES[3:]])
    with folder.open() as job:
        asyncio.run(answer_lines(job, _some_fail, 2))
        assert (job.count, job.succeeded, job.failed, job.resumed, job.left) == (8, 5, 3, 0, 0)
        assert (job.prompt_tokens, job.completion_tokens) == (10, 5)
    assert {result["custom_id"] for result in read(folder.out)} == {"r0", "r1", "r2", "r3", "r4"}
    failed = {result["id"].split("_")[2]: result for result in read(folder.errors)}
    assert failed["2"]["error"]["code"] == "invalid_json"
    assert failed["6"]["error"]["message"].startswith("line 6: custom_id 'r0' is that of line 1 too")
    assert failed["9"]["response"]["status_code"] == 400


def test_third_line_of_an_id_names_the_first(folder: Folder) -> None:
    write(folder.source, [*LINES, LINES[2], LINES[2]])
    folder.run()
    messages = [result["error"]["message"] for result in read(folder.errors) if result["error"]]
    assert sorted(message[:41] for message in messages) == [
        "line 7: custom_id 'r2' is that of line 3 ",
        "line 8: custom_id 'r2' is that of line 3 ",
    ]


def _failing_at(size: int, error: BaseException) -> Write:
    """Return a write that stops once this many bytes were written, in the middle of a line if need be."""
    left = size

    def write_some(file: int, data: bytes) -> int:
        nonlocal left
        count = os.write(file, data[:left])
        left -= count
        if not left:
            raise error
        return count

    return write_some


def _results(folder: Folder) -> set[tuple[str, str]]:
    return {(result["custom_id"], json.dumps(result)) for result in read(folder.out, folder.errors)}


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_at_any_byte_loses_nothing(folder: Folder, step: int) -> None:
    """At every byte or at some of them, and in any case around the end of each line."""
    sizes = list[int]()

    def noting(file: int, data: bytes) -> int:
        sizes.append(os.write(file, data))
        return sizes[-1]

    folder.run(noting)
    expected, size = _results(folder), folder.out.stat().st_size + folder.errors.stat().st_size
    ends = [*itertools.accumulate(sizes)]
    assert (len(ends), ends[-1]) == (len(LINES), size)
    near = {end + beside for end in ends for beside in (-1, 0, 1)} - {size + 1}
    for place in sorted({*range(1, size + 1, step), *near}):
        folder.out.unlink()
        folder.errors.unlink()
        with suppress(Killed):
            folder.run(_failing_at(place, Killed()))
        kept = folder.out.stat().st_size + folder.errors.stat().st_size
        assert kept == place
        folder.run()
        assert _results(folder) == expected
        check_complete(LINES, folder.out, folder.errors)


def test_kill_in_each_of_many_runs(folder: Folder) -> None:
    runs = 0
    while True:
        runs += 1
        with suppress(Killed):
            folder.run(_failing_at(220, Killed()))  # in the second result
            break
        assert runs < 100
    assert runs > len(LINES) // 2
    check_complete(LINES, folder.out, folder.errors)


def test_full_disk_leaves_whole_lines(folder: Folder) -> None:
    with pytest.raises(SpeculantError, match="No space left.*\n.*goes on from here"):
        folder.run(_failing_at(300, OSError(28, "No space left on device")))
    whole = read(folder.out, folder.errors)
    assert 0 < len(whole) < len(LINES)
    folder.run()
    check_complete(LINES, folder.out, folder.errors)


@pytest.mark.parametrize("call", range(6))
def test_results_that_the_disk_refuses_are_computed_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Whichever call fails: none of them counts as done, and what was on the disk before stays."""
    monkeypatch.setattr(jobs, "_SYNC_S", -1.0)  # after each result
    synced, calls, failed = dict[int, int](), list[int](), list[int]()  # synced: the size of each file on the disk

    def fsync(file: int) -> None:
        if len(calls) == call and not failed:
            failed.append(file)
            raise OSError(errno.EIO, "Input/output error")
        calls.append(file)
        status = os.fstat(file)
        synced[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SpeculantError, match="Input/output error.*given up\n.*computes them again"):
        folder.run()
    for path in (folder.out, folder.errors):
        assert path.stat().st_size == synced.get(path.stat().st_ino, 0)
    folder.run()
    check_complete(LINES, folder.out, folder.errors)


def test_a_killed_run_is_on_the_disk_before_it_counts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run()

    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    before = folder.out.read_bytes()
    with pytest.raises(SpeculantError, match="Input/output error"):
        folder.open()
    assert folder.out.read_bytes() == before


@pytest.mark.parametrize("part", ["model", "settings"])
@pytest.mark.parametrize("left", ["out", "errors"])
def test_results_of_another_origin_are_not_continued(folder: Folder, part: str, left: str) -> None:
    """Be they answers or errors. The files stay as they are."""
    with folder.open() as job:
        job.made_with(Origin("a" * 8, "b" * 8), "first")
        asyncio.run(answer_lines(job, _some_fail, 2))
    if left == "out":
        folder.errors.unlink()
    else:
        folder.out.unlink()
    before = [path.read_bytes() for path in (folder.out, folder.errors) if path.exists()]
    other = Origin("c" * 8, "b" * 8) if part == "model" else Origin("a" * 8, "c" * 8)
    what = "another model than second" if part == "model" else "other settings"
    with folder.open() as job, pytest.raises(ConfigError, match=f"{left}.jsonl .* made with {what}\n.*first run"):
        job.made_with(other, "second")
    assert [path.read_bytes() for path in (folder.out, folder.errors) if path.stat().st_size] == before
    with folder.open() as job:
        job.made_with(Origin("a" * 8, "b" * 8), "first")
        asyncio.run(answer_lines(job, _some_fail, 2))
    check_complete(LINES, folder.out, folder.errors)


def test_short_writes_are_continued(folder: Folder) -> None:
    folder.run(lambda file, data: os.write(file, data[:7]))
    check_complete(LINES, folder.out, folder.errors)


def test_second_answer_does_no_harm(folder: Folder) -> None:
    with folder.open() as job:
        first = next(job.pending())
        job.record(first, LineError("a", "b"))
        job.record(first, LineAnswer(200, "", b"{}"))
        assert (job.succeeded, job.failed) == (0, 1)
    assert len(read(folder.out, folder.errors)) == 1


def test_answer_that_is_no_json_is_an_error(folder: Folder) -> None:
    with folder.open() as job:
        job.record(next(job.pending()), LineAnswer(200, "", b"<html>"))
    assert read(folder.errors)[0]["error"]["code"] == "invalid_answer"


def test_failed_lines_are_tried_again_without_their_file(folder: Folder) -> None:
    folder.run()
    failed = len(read(folder.errors))
    folder.errors.unlink()
    changed = [line if place % 3 != 2 else request(place, "other") for place, line in enumerate(LINES)]
    write(folder.source, changed)
    with folder.open() as job:
        assert (job.left, failed) == (2, 2)
        asyncio.run(answer_lines(job, echo, 2))
    check_complete(LINES, folder.out)


def test_lines_may_be_added(folder: Folder) -> None:
    folder.source.write_text(folder.source.read_text().rstrip("\n"))
    folder.run()
    write(folder.source, [*LINES, request(6)])
    with folder.open() as job:
        assert [line.custom_id for line in job.pending()] == ["r6"]


@pytest.mark.parametrize("change", ["other body", "shorter", "other order"])
def test_results_of_another_input_are_refused(folder: Folder, change: str) -> None:
    folder.run()
    other = {
        "other body": [request(0, "other"), *LINES[1:]],
        "shorter": LINES[:4],
        "other order": [LINES[1], LINES[0], *LINES[2:]],
    }
    write(folder.source, other[change])
    before = folder.out.read_bytes()
    with pytest.raises(ConfigError, match="another input"):
        folder.open()
    assert folder.out.read_bytes() == before


@pytest.mark.parametrize("text", ["notes", "notes\n", '{"id": "x"}\n', '{"id":"batch_req_1"}\n'])
def test_other_files_are_left_alone(folder: Folder, text: str) -> None:
    folder.out.write_text(text)
    with pytest.raises(ConfigError, match="is no result"):
        folder.open()
    assert folder.out.read_text() == text


def test_results_need_a_file_that_can_be_read(folder: Folder) -> None:
    folder.out = Path("/dev/null")
    with pytest.raises(ConfigError, match="no file that can be read again"):
        folder.open()


def test_doubled_result_is_refused(folder: Folder) -> None:
    folder.run()
    folder.errors.write_bytes(folder.errors.read_bytes() + folder.out.read_bytes())
    with pytest.raises(ConfigError, match="a second result for line"):
        folder.open()


def test_two_runs_cannot_share_a_file(folder: Folder, tmp_path: Path) -> None:
    with folder.open():
        with pytest.raises(ConfigError, match="another run"):
            folder.open()
        with pytest.raises(ConfigError, match="another run"):
            BatchJob.open(folder.source, tmp_path / "other.jsonl", folder.errors)
    folder.open().close()


def test_same_file_twice_is_refused(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.source)
    for out, errors in [(folder.source, folder.errors), (folder.out, folder.out), (tmp_path / "link", folder.errors)]:
        with pytest.raises(ConfigError, match="same file"):
            BatchJob.open(folder.source, out, errors)
    assert read(folder.source) == LINES


@pytest.mark.parametrize("name", ["-", "missing", "."])
def test_input_must_be_a_file(folder: Folder, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the input"):
        BatchJob.open(Path(name), folder.out, folder.errors)
    assert not folder.out.exists()


def test_input_that_changes_is_noticed(folder: Folder) -> None:
    with folder.open() as job:
        write(folder.source, LINES[1:])
        with pytest.raises(RequestError, match="changed during the run"):
            list(job.pending())


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read four lines at a time."""
    monkeypatch.setattr(jobs, "WINDOW_LINES", 4)


@pytest.mark.usefixtures("small_windows")
def test_lines_are_grouped_within_windows(folder: Folder) -> None:
    prompts = ["b1", "a1", "b2", "a2", "b3", "a3"]
    write(folder.source, [request(place, prompt) for place, prompt in enumerate(prompts)])
    with folder.open() as job:
        found = [json.loads(line.body)["prompt"] for line in job.pending()]
    assert found == ["a1", "a2", "b1", "b2", "a3", "b3"]
