"""`AsyncEngine`: many callers in event loops, one engine in a thread of its own.

    callers' threads       add, abort, close  --->  inbox
    the engine's thread    between two steps: everything in the inbox, in order; asleep if nothing runs
    a caller's loop        <---  once per request and step: all of its new pieces

Nothing is polled, and a step never blocks a caller's loop.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from speculant.engine.build import Runtime
from speculant.engine.engine import Engine
from speculant.engine.fair_steps import FairSteps
from speculant.engine.frontend import Frontend, takes
from speculant.engine.generation import Generation, Prompt, StreamPiece
from speculant.errors import EngineClosedError, EngineDeadError, RequestError, SpeculantError
from speculant.metrics import EngineMetrics
from speculant.params import SamplingParams
from speculant.scheduling import Preparation
from speculant.types import ANYONE, Client, RequestOutput, Sender, StepOutput

_IDLE_S = 0.01  # in which a preparation waits for the others' steps, before new requests are looked for
_LONGEST_EXIT = 10.0  # seconds that a step under way may delay the interpreter's exit


class AsyncEngine(Frontend[AsyncGenerator[StreamPiece, None]]):
    """Serves requests from any number of tasks, event loops and threads, all in one batch.

    Arguments are the fields of `EngineConfig`, see `Frontend`. steps: shared with other engines, so that these step one
    at a time; None = it steps whenever it has work. As a context manager it drains when the block ends, and aborts when
    the block is left by an exception.
    """

    def __init__(
        self, model: str, draft_model: str | None = None, *, steps: FairSteps | None = None, **arguments: Any
    ) -> None:
        self._steps = steps
        super().__init__(model, draft_model, **arguments)
        self._thread = EngineThread(self._runtime, steps)
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
        sender = Sender(client, priority, cache_salt)
        stream = PieceStream(self._generation(prompt, sampling_params, request_id, sender, compiling))
        self._thread.add(stream)
        try:
            while (piece := await stream.receive()) is not None:
                yield self._readable(piece)
        finally:
            self._thread.abort(stream)

    def end(self, request_id: str) -> None:
        """End a request with the tokens that it has, before the next step: its samples end with the reason "length".

        An unknown id is ignored. A beam search, which has no text before its end, goes on.
        """
        self._thread.end(request_id)

    @takes(stream)
    async def generate(self, *arguments: Any, **named: Any) -> RequestOutput:
        """Complete one prompt; arguments and errors are those of `stream`."""
        return await _output(self.stream(*arguments, **named))

    @takes(Frontend.stream_chat)
    async def chat(self, *arguments: Any, **named: Any) -> RequestOutput:
        """Answer one conversation; arguments and errors are those of `stream_chat`."""
        return await _output(self.stream_chat(*arguments, **named))

    async def prefill(self, prompt: Prompt, *, cache_salt: str = "", client: Client = ANYONE) -> Preparation:
        """Queue a prompt that is read while no request waits or runs; return once it is queued.

        Later prompts that begin alike, with the same salt, find these tokens in the prefix cache. It delays another
        request by one short step at most. Of many preparations of a client the oldest ends early, and so do all when
        the engine is shut down. `Preparation.done` is set in the end.

        Text is tokenised in the caller's loop. Raises RequestError for a prompt that can't be prepared, and the errors
        of `check_health`.
        """
        given, own = self._read_prompt(prompt)
        if own and cache_salt not in ("", own):
            raise RequestError("the prompt and the call have different cache salts", "give one of them.")
        return await asyncio.wrap_future(self._thread.prepare(given.tokens, Sender(client, 0, own or cache_salt)))

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


@dataclass(frozen=True)
class _End:
    """The item after the last piece; the reader raises `error`."""

    error: Exception | None


class PieceStream:
    """Carries a generation's pieces from the engine's thread to the event loop that it is made in."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._loop = asyncio.get_running_loop()
        self._unread: asyncio.Queue[StreamPiece | _End] = asyncio.Queue()  # used in the loop alone

    async def receive(self) -> StreamPiece | None:
        """Wait for the next piece; None after the last. Raises the error that ended the request, if any."""
        item = await self._unread.get()
        if isinstance(item, StreamPiece):
            return item
        if item.error is not None:
            raise item.error
        return None

    def send(self, items: Sequence[StreamPiece | _End]) -> bool:
        """Wake the reader, from the engine's thread, once for all items; False if its loop was closed."""
        try:
            self._loop.call_soon_threadsafe(self._append, items)
        except RuntimeError:
            return False
        return True

    def _append(self, items: Sequence[StreamPiece | _End]) -> None:
        for item in items:
            self._unread.put_nowait(item)


class EngineThread:
    """Runs an engine, which no other thread reaches. It ends when it is closed, or by an error of the engine.

    `metrics` are a copy, as of the last step. `ended` is done when no stream will get anything more.
    """

    def __init__(self, runtime: Runtime, steps: FairSteps | None = None) -> None:
        self.metrics: EngineMetrics = replace(runtime.engine.metrics)
        self._steps = steps
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        self._tokenizer = runtime.tokenizer
        self._inbox: SimpleQueue[Callable[[Engine], None]] = SimpleQueue()  # unlike Queue, safe in finalisers
        self._open: dict[str, PieceStream] = {}
        self._readers: set[PieceStream] = set()  # from `add` to `abort`: each gets an end if the engine dies
        self._lock = threading.RLock()  # nothing is added once it is closed
        self._closed = False
        self._leaving = False  # the engine's thread has read that it is closed
        self._cause: BaseException | None = None  # the error that ended the engine
        self._thread = threading.Thread(target=self._run, args=(runtime.engine,), name="speculant-engine", daemon=True)
        atexit.register(self._exit)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine still runs."""
        return self._cause is None and self._thread.is_alive()

    def check(self) -> None:
        """Raise EngineDeadError or EngineClosedError if requests are refused now."""
        if self._cause is not None or not (self._closed or self._thread.is_alive()):
            raise self._death()
        if self._closed:
            raise EngineClosedError("the engine was shut down", "make a new one.")

    def add(self, stream: PieceStream) -> None:
        """Queue a generation; the stream gets its pieces. Raises the errors of `check`."""
        with self._lock:
            self.check()
            self._readers.add(stream)
            self._inbox.put(partial(self._add, stream=stream))

    def abort(self, stream: PieceStream) -> None:
        """End a generation before the next step, if it has not ended yet; the stream gets nothing more."""
        self._inbox.put(partial(self._abort, stream=stream))

    def end(self, request_id: str) -> None:
        """End a generation before the next step; its stream gets the last piece of each sample that still runs."""
        self._inbox.put(partial(self._finish, request_id=request_id))

    def prepare(self, tokens: Sequence[int], sender: Sender) -> Future[Preparation]:
        """Queue a prompt to be read ahead; see `Engine.prepare`. Raises the errors of `check`."""
        made = Future[Preparation]()
        made.set_running_or_notify_cancel()
        with self._lock:
            self.check()
            self._inbox.put(partial(self._prepare, tokens=tokens, sender=sender, made=made))
        return made

    def has_begun(self, request_id: str) -> bool:
        """Whether a generation that has not ended has taken part in a pass."""
        stream = self._open.get(request_id)
        return stream is not None and stream.generation.begun

    def close(self) -> None:
        """Refuse new requests, and end the thread after the present ones."""
        with self._lock:
            self._closed = True
            self._inbox.put(self._leave)

    def abort_all(self) -> None:
        """End every request before the next step, with an EngineClosedError."""
        self._inbox.put(self._abort_all)

    def join(self, timeout: float | None = None) -> None:
        """Block until the thread has ended, or for `timeout` seconds."""
        self._thread.join(timeout)

    def _run(self, engine: Engine) -> None:
        try:
            while not self._leaving or engine.has_unfinished():
                self._process_inbox(engine)
                with self._turn(engine) as its_turn:
                    if its_turn:
                        self._step(engine)
        except BaseException as error:
            self._cause = error
            raise  # for the traceback on standard error
        finally:
            self._end(engine)

    def _process_inbox(self, engine: Engine) -> None:
        """Run the calls in the inbox; if nothing runs and nothing is prepared, wait for the first one."""
        for _ in range(max(self._inbox.qsize(), not (engine.has_unfinished() or engine.prepares))):
            self._inbox.get()(engine)
        self.metrics = replace(engine.metrics)

    def _turn(self, engine: Engine) -> AbstractContextManager[bool]:
        """Return a context in which no other engine steps that shares the turns; it yields False if one has to."""
        if self._steps is None:
            return nullcontext(True)
        if engine.prepares and not engine.has_unfinished():
            return self._steps.idle_turn(self, _IDLE_S)
        return self._steps.turn(self, engine.has_unfinished)

    def _step(self, engine: Engine) -> None:
        outputs: dict[str, list[StepOutput]] = {}
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        self.metrics = replace(engine.metrics)
        for request_id, own in outputs.items():
            self._deliver(engine, self._open[request_id], own)
        if engine.doubtful:
            engine.check_target()

    def _deliver(self, engine: Engine, stream: PieceStream, outputs: Sequence[StepOutput]) -> None:
        """Pass on the tokens that a step committed for one generation. Text that can't be made ends it alone."""
        generation, items = stream.generation, list[StreamPiece | _End]()
        try:
            items += (generation.piece(output) for output in outputs)
        except Exception as error:  # noqa: BLE001 - no error may affect the other requests
            self._abort(engine, stream)
            items.append(_End(error))
        else:
            if generation.finished:
                del self._open[generation.request_id]
                items.append(_End(generation.error))
        if not stream.send(items):
            self._abort(engine, stream)

    def _add(self, engine: Engine, stream: PieceStream) -> None:
        generation = stream.generation
        try:
            if self._cause is not None:
                raise self._death()
            generation.start(engine, self._tokenizer)
            self._open[generation.request_id] = stream
        except Exception as error:  # noqa: BLE001 - its error must not affect the others
            stream.send([_End(error)])

    def _prepare(self, engine: Engine, tokens: Sequence[int], sender: Sender, made: Future[Preparation]) -> None:
        try:
            if self._cause is not None:
                raise self._death()
            made.set_result(engine.prepare(tokens, sender))
        except Exception as error:  # noqa: BLE001 - its error must not affect the others
            made.set_exception(error)

    def _abort(self, engine: Engine, stream: PieceStream) -> None:
        """End a generation; an earlier or later one with the same id is not affected."""
        request_id = stream.generation.request_id
        self._readers.discard(stream)
        if self._open.get(request_id) is stream:
            del self._open[request_id]
            engine.abort(request_id)

    def _finish(self, engine: Engine, request_id: str) -> None:
        stream = self._open.get(request_id)
        if stream is not None and (last := stream.generation.last_outputs()):
            engine.abort(request_id, "length")
            self._deliver(engine, stream, last)

    def _abort_all(self, engine: Engine) -> None:
        for stream in list(self._open.values()):
            self._abort(engine, stream)
            error = EngineClosedError("the engine was shut down before this request ended", "send it to another one.")
            stream.send([_End(error)])

    def _leave(self, engine: Engine) -> None:
        self._leaving = True
        engine.drop_preparations()

    def _end(self, engine: Engine) -> None:
        """End all streams with an error; from now on `add` refuses. A stream that has ended ignores it.

        `ended` is done whatever raises here.
        """
        with ExitStack() as last:  # the last one is called first
            last.callback(self.ended.set_result, None)
            last.callback(engine.close)
            last.callback(atexit.unregister, self._exit)
            last.callback(engine.drop_preparations)
            if self._steps is not None:
                self._steps.leave(self)
            with self._lock:
                self._closed = True
            self._open.clear()
            for stream in self._readers:
                stream.send([_End(self._death())])
            self._readers.clear()
            while not self._inbox.empty():
                self._inbox.get()(engine)

    def _death(self) -> SpeculantError:
        error = EngineDeadError(
            f"the engine's thread died of {self._cause!r}", "make a new engine; standard error has the traceback."
        )
        error.__cause__ = self._cause
        return error

    def _exit(self) -> None:
        """End the thread before the interpreter exits, which would interrupt a step in native code."""
        self.close()
        self.abort_all()
        self.join(_LONGEST_EXIT)
