"""Runs all prompts of one request in the engine, under the server's deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from speculant.engine import AsyncEngine, StreamPiece
from speculant.errors import SpeculantError
from speculant.params import SamplingParams
from speculant.serving.errors import timed_out, unavailable
from speculant.serving.metrics import RequestMeter
from speculant.serving.options import ServerOptions
from speculant.serving.prompts import Prompt
from speculant.types import ANYONE, Client


@dataclass(frozen=True)
class Work:
    """The prompts of one request, all with the same settings."""

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    client: Client = ANYONE


Numbered = tuple[int, StreamPiece]  # the number of a prompt, and a piece of one of its samples


async def run(
    engine: AsyncEngine, work: Work, options: ServerOptions, meter: RequestMeter
) -> AsyncGenerator[Sequence[Numbered], None]:
    """Yield the pieces of all prompts as they are committed, in batches. Closing the iterator aborts the request.

    Raises ApiError for a missed deadline, and the errors of `AsyncEngine.stream`; of several errors the first.
    """
    arrived: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue()
    readers = [asyncio.create_task(_read(engine, work, place, options, arrived)) for place in range(len(work.prompts))]
    try:
        left = len(readers)
        while left:
            items = [await arrived.get()]
            while not arrived.empty():
                items.append(arrived.get_nowait())
            failed = next((item for item in items if isinstance(item, Exception)), None)
            before = items if failed is None else items[: items.index(failed)]
            pieces = [item for item in before if isinstance(item, tuple)]
            for piece in pieces:
                meter.record(*piece)
            if pieces:
                yield pieces
            if failed is not None:
                raise failed
            left -= items.count(None)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    engine: AsyncEngine,
    work: Work,
    place: int,
    options: ServerOptions,
    arrived: asyncio.Queue[Numbered | Exception | None],
) -> None:
    """Put a prompt's pieces into the queue, then None or the error that ended it."""
    request_id = f"{work.request_id}-{place}"
    pieces = engine.stream(
        work.prompts[place].given,
        work.params,
        request_id=request_id,
        priority=work.priority,
        cache_salt=work.cache_salt,
        client=replace(work.client, call=work.request_id),
    )
    try:
        async with asyncio.timeout(options.request_timeout), aclosing(pieces):
            piece: StreamPiece | None = await _first(engine, pieces, request_id, options)
            last = piece
            while piece is not None:
                arrived.put_nowait((place, piece))
                last, piece = piece, await anext(pieces, None)
            _check_output(last)
        arrived.put_nowait(None)
    except TimeoutError:
        arrived.put_nowait(timed_out(f"The answer was not complete after {options.request_timeout} s."))
    except Exception as error:  # noqa: BLE001 - any error ends the request
        arrived.put_nowait(error)


def _check_output(piece: StreamPiece | None) -> None:
    """Raise, after the last piece, the error of a sample that failed while others succeeded."""
    if piece is not None and piece.output is not None and piece.output.error is not None:
        problem, _, fix = piece.output.error.partition("\n  Fix: ")
        raise SpeculantError(problem, fix)


async def _first(
    engine: AsyncEngine, pieces: AsyncGenerator[StreamPiece, None], request_id: str, options: ServerOptions
) -> StreamPiece | None:
    """Return the first piece; raises ApiError if the queue or the first token takes too long."""
    waiting = asyncio.ensure_future(anext(pieces, None))
    queue, total = options.queue_timeout, options.first_token_timeout
    try:
        if queue is not None and (total is None or queue < total):
            await asyncio.wait({waiting}, timeout=queue)
            if not waiting.done() and not engine.has_begun(request_id):
                raise unavailable(f"The request waited for {queue} s without being started.", "queue_timeout")
            total = None if total is None else total - queue
        await asyncio.wait({waiting}, timeout=total)
        if not waiting.done():
            raise timed_out(f"There was no first token after {options.first_token_timeout} s.")
        return waiting.result()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
