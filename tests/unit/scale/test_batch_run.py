"""Lines in flight: as many as there are places for, each on its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from speculant.errors import ServerError
from speculant.scale import Answerer, BatchJob, BatchLine, LineAnswer, answer_lines, batches as run, inside
from tests.batches import check_complete, echo, read, request, write

LINES = [request(number) for number in range(8)]
BUSY = LineAnswer(429, "", b'{"error":{"code":"rate_limit_exceeded"}}')


@pytest.fixture
def job(tmp_path: Path) -> Iterator[BatchJob]:
    """Return a job whose fourth line has 5 sequences."""
    lines = [dict(line) for line in LINES]
    lines[3]["body"] = {**lines[3]["body"], "n": 5}
    source = write(tmp_path / "in.jsonl", lines)
    with BatchJob.open(source, tmp_path / "out.jsonl", tmp_path / "errors.jsonl") as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(run, "_FIRST_WAIT_S", 0.0)


def _answer(job: BatchJob, answerer: Answerer, places: int = 3) -> None:
    asyncio.run(asyncio.wait_for(answer_lines(job, answerer, places), 20))


@pytest.mark.parametrize("places", [1, 3, 5, 100])
def test_places_are_filled_and_never_exceeded(job: BatchJob, places: int, tmp_path: Path) -> None:
    running, most = Counter[int](), 0

    async def answer(line: BatchLine) -> LineAnswer:
        nonlocal most
        running[line.number] = line.sequences
        assert running.total() <= places or len(+running) == 1
        most = max(most, running.total())
        await asyncio.sleep(0.001)
        del running[line.number]
        return await echo(line)

    _answer(job, answer, places)
    check_complete(LINES, tmp_path / "out.jsonl")
    assert most == max(5, min(places, 12))


def test_busy_lines_are_asked_again(job: BatchJob, tmp_path: Path) -> None:
    tries = Counter[int]()

    async def answer(line: BatchLine) -> LineAnswer:
        tries[line.number] += 1
        await asyncio.sleep(0)
        return BUSY if tries[line.number] < 4 else await echo(line)

    _answer(job, answer)
    assert set(tries.values()) == {4}
    check_complete(LINES, tmp_path / "out.jsonl")


def test_line_that_is_refused_alone_fails(job: BatchJob, tmp_path: Path) -> None:
    async def answer(line: BatchLine) -> LineAnswer:
        await asyncio.sleep(0)
        return BUSY if line.number == 2 else await echo(line)

    _answer(job, answer)
    assert [result["response"]["status_code"] for result in read(tmp_path / "errors.jsonl")] == [429]
    assert (job.succeeded, job.failed) == (7, 1)


def test_error_of_one_line_hurts_no_other(job: BatchJob, tmp_path: Path) -> None:
    async def answer(line: BatchLine) -> LineAnswer:
        if line.number == 5:
            raise ZeroDivisionError("division by zero")
        return await echo(line)

    _answer(job, answer)
    assert (job.succeeded, job.failed) == (7, 1)
    assert read(tmp_path / "errors.jsonl")[0]["error"]["message"] == "line 5: ZeroDivisionError: division by zero"


def test_cancelling_stops_the_answers(job: BatchJob) -> None:
    stopped = 0

    async def answer(line: BatchLine) -> LineAnswer:
        nonlocal stopped
        if line.number == 1:
            return await echo(line)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped += 1
            raise
        return await echo(line)

    async def interrupted() -> None:
        task = asyncio.create_task(answer_lines(job, answer, 3))
        while not job.succeeded:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(interrupted(), 20))
    assert stopped
    assert job.left == 7


def test_engine_that_failed_ends_the_run(job: BatchJob, tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error":{"code":"engine_failed"}}'})

    with pytest.raises(ServerError, match="the engine has failed"):
        _answer(job, inside(app))
    assert read(tmp_path / "out.jsonl", tmp_path / "errors.jsonl") == []
    assert job.left == len(LINES)
