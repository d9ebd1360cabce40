"""`AsyncEngine`: many callers in event loops, one engine in a thread of its own."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from speculant.engine.frontend import Frontend, takes
from speculant.engine.generation import StreamPiece
from speculant.engine.prompts import Prompt
from speculant.engine.thread import EngineThread, PieceStream
from speculant.metrics import EngineMetrics
from speculant.params import SamplingParams
from speculant.types import ANYONE, Client, RequestOutput


class AsyncEngine(Frontend[AsyncGenerator[StreamPiece, None]]):
    """Serves requests from any number of tasks, event loops and threads, all in one batch.

    Arguments are the fields of `EngineConfig`, see `Frontend`. As a context manager it drains when the
    block ends, and aborts when the block is left by an exception.
    """

    def __init__(self, model: str, draft_model: str | None = None, **arguments: Any) -> None:
        super().__init__(model, draft_model, **arguments)
        self._thread = EngineThread(self._runtime)
        weakref.finalize(self, _abandon, self._thread)

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's totals, as of its last step."""
        return self._thread.metrics

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs: it is neither dead nor completely shut down."""
        return self._thread.is_alive

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine broke down, EngineClosedError once it takes no more requests."""
        self._thread.check()

    def has_begun(self, request_id: str) -> bool:
        """Whether a request that has not ended was computed in a step; before that it waits in the queue."""
        return self._thread.has_begun(request_id)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        client: Client = ANYONE,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield each token of a prompt's samples as it is committed.

        The request begins when the first piece is requested. Closing the iterator, dropping it or
        cancelling the task that reads it aborts the request before the engine's next step. Leave a loop
        early under `contextlib.aclosing`, so that this does not wait for the garbage collector.

        Text is tokenised in the caller's loop; token ids need no tokenising. A grammar is compiled in another
        thread, unless the task is cancelled before that begins.
        Clients have fair shares of the engine. Of one client's requests, a lower priority is served sooner. Prompts of
        different salts share no cache. Before anything is queued, raises RequestError or ConfigError for a request that
        can't be served, CapacityError if too many requests wait, and the errors of `check_health`. A request that fails
        raises its error after its last piece; one that `shutdown` aborts raises EngineClosedError.
        """
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if (compiling := self._compiling(sampling_params, client)) is not None:
            await asyncio.wrap_future(compiling)
        stream = PieceStream(
            self._generation(prompt, sampling_params, request_id, priority, cache_salt, compiling, client)
        )
        self._thread.add(stream)
        try:
            while (piece := await stream.receive()) is not None:
                yield self._readable(piece)
        finally:
            self._thread.abort(stream)

    @takes(stream)
    async def generate(self, *arguments: Any, **named: Any) -> RequestOutput:
        """Complete one prompt; arguments and errors are those of `stream`."""
        return await _output(self.stream(*arguments, **named))

    @takes(Frontend.stream_chat)
    async def chat(self, *arguments: Any, **named: Any) -> RequestOutput:
        """Answer one conversation; arguments and errors are those of `stream_chat`."""
        return await _output(self.stream_chat(*arguments, **named))

    async def shutdown(self, drain: bool) -> None:
        """Refuse new requests, finish the accepted ones (drain) or abort them, and end the thread.

        It may be called again from anywhere, to wait as well or to abort the requests that are being drained.
        """
        self._thread.close()
        if not drain:
            self._thread.abort_all()
        await asyncio.wrap_future(self._thread.ended)
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown(drain=kind is None)


async def _output(pieces: AsyncGenerator[StreamPiece, None]) -> RequestOutput:
    """Read a stream to its end and return the result, which its last piece has."""
    output: RequestOutput | None = None
    async with aclosing(pieces):
        async for piece in pieces:
            output = piece.output
    assert output is not None, "a request ended without its result"
    return output


def _abandon(thread: EngineThread) -> None:
    """End the thread of an engine that is no longer referenced."""
    thread.close()
    thread.abort_all()
