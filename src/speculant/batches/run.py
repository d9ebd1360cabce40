"""Answers the lines of a batch: enough of them at a time to fill an engine, none of which can harm another."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from fastapi import FastAPI
from starlette.types import ASGIApp

from speculant.batches.lines import BatchLine, LineAnswer, LineError
from speculant.errors import ServerError, SpeculantError
from speculant.serving.process import InsideRequest, whole_response

logger = logging.getLogger(__name__)

Answerer = Callable[[BatchLine], Awaitable[LineAnswer]]
_BUSY = frozenset({429, 503})  # a server that may accept the line later
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0  # between two tries
_TRIES_ALONE = 8  # refusals of a line beside which no other runs: about 6 seconds. It is not refused for its neighbours


class Lines(Protocol):
    """Lines without results, and where results go; such as a `BatchJob`."""

    def pending(self) -> Iterator[BatchLine]:
        """Yield the lines."""

    def record(self, line: BatchLine, result: LineAnswer | LineError) -> None:
        """Keep a line's result."""


async def answer_lines(job: Lines, answerer: Answerer, places: int) -> None:
    """Give every pending line to an answerer and write its result. Cancelling this cancels the answers.

    places: how many sequences run or wait at a time; a line with more runs alone. A busy answer (429, 503) is asked for
    again. A SpeculantError of the answerer, or of the files, ends the run; any other error is the line's result.
    """
    room = Room(places)
    try:
        async with asyncio.TaskGroup() as tasks:
            for line in job.pending():
                if line.problem is not None:
                    job.record(line, line.problem)
                    continue
                await room.take(line.sequences)
                tasks.create_task(_answer(job, line, answerer, room))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _answer(job: Lines, line: BatchLine, answerer: Answerer, room: Room) -> None:
    try:
        result: LineAnswer | LineError = await _patient(line, answerer, room)
    except SpeculantError:
        raise
    except Exception as error:
        logger.exception("line %d failed", line.number)
        result = LineError("internal_error", f"line {line.number}: {type(error).__name__}: {error}")
    finally:
        room.give(line.sequences)
    job.record(line, result)


async def _patient(line: BatchLine, answerer: Answerer, room: Room) -> LineAnswer:
    """Return a line's answer; a busy one only if the line is refused without any other."""
    wait, alone = _FIRST_WAIT_S, 0
    while True:
        answer = await answerer(line)
        if answer.status not in _BUSY:
            return answer
        alone = alone + 1 if room.held == line.sequences else 0
        if alone == _TRIES_ALONE:
            return answer
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)


class Room:
    """Places for sequences. `take` is for one task alone, the one that reads the lines."""

    def __init__(self, places: int) -> None:
        self._places, self._freed = places, asyncio.Event()
        self.held = 0

    async def take(self, count: int) -> None:
        """Wait until there are so many places, or until none is taken."""
        while self.held and self.held + count > self._places:
            self._freed.clear()
            await self._freed.wait()
        self.held += count

    def give(self, count: int) -> None:
        """Return places."""
        self.held -= count
        self._freed.set()


def places_of(app: FastAPI) -> int:
    """Return how many sequences fill an application's engine: all that run, and as many that wait."""
    limits = app.state.server.engine.limits
    return int(limits.max_num_seqs + min(limits.max_num_seqs, limits.max_waiting))


def inside(app: ASGIApp) -> Answerer:
    """Return what asks an application in this process, which answers as it answers its clients.

    Raises ServerError once its engine has failed.
    """

    async def answer(line: BatchLine) -> LineAnswer:
        request = InsideRequest("POST", line.url, line.body, ((b"content-type", b"application/json"),))
        head, body = await whole_response(app, request)
        if head.status == 503 and json.loads(body)["error"]["code"] == "engine_failed":
            raise ServerError("the engine has failed", "give the same command again: it goes on from here.")
        return LineAnswer(head.status, dict(head.headers).get(b"x-request-id", b"").decode("ascii"), body)

    return answer
