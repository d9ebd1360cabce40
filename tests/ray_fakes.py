"""Stand-ins for Ray Serve's handles, whose calls run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from ray.serve.exceptions import RequestCancelledError

from speculant.scale import RoutedRequest
from speculant.serving import responses

SILENT = object()
Answer = Callable[[RoutedRequest], AsyncIterator[Any]]


class FakeCall:
    """A running call of a replica's `answer`."""

    def __init__(self, pieces: AsyncIterator[Any]) -> None:
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._work(pieces))
        self.cancelled = False

    async def _work(self, pieces: AsyncIterator[Any]) -> None:
        try:
            async with aclosing(pieces):  # type: ignore[type-var]
                async for piece in pieces:
                    self._sent.put_nowait(piece)
            self._sent.put_nowait(StopAsyncIteration())
        except asyncio.CancelledError:
            self._sent.put_nowait(RequestCancelledError("fake"))
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader gets it
            self._sent.put_nowait(error)

    def __aiter__(self) -> FakeCall:
        return self

    async def __anext__(self) -> Any:
        piece = await self._sent.get()
        if isinstance(piece, Exception):
            raise piece
        return piece

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        self.cancelled = self.cancelled or self._task.cancel()


@dataclass(frozen=True)
class FakeTold:
    """What one replica answers to a broadcast: a value, an exception, or SILENT for none at all."""

    value: Any

    async def get_async(self) -> Any:
        if self.value is SILENT:
            await asyncio.Event().wait()
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class FakeHandle:
    """A deployment's handle. answers: what each call in turn is answered with; the last one answers all later calls.

    told: what each replica answers to a broadcast, by the method's name; an exception = it raises that.
    """

    def __init__(self, *answers: Answer, told: Mapping[str, Sequence[Any] | Exception] | None = None) -> None:
        self._answers, self.told = list(answers), dict(told or {})
        self.calls: list[FakeCall] = []
        self.asked: list[RoutedRequest] = []
        self.broadcasts = 0
        self.answer, self._method = self, ""

    def options(self, *, stream: bool) -> FakeHandle:
        assert stream
        return self

    def remote(self, routed: RoutedRequest) -> FakeCall:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self.asked.append(routed)
        self.calls.append(FakeCall(answer(routed)))
        return self.calls[-1]

    def broadcast(self, method_name: str) -> FakeHandle:
        self._method = method_name
        return self

    async def _fetch_replica_results_async(self) -> Sequence[FakeTold]:
        self.broadcasts += 1
        found = self.told[self._method]
        if isinstance(found, Exception):
            raise found
        return [FakeTold(each) for each in found]


class FakeReplicas:
    """Replicas that need no deployment. start_error: the reason why they do not start."""

    def __init__(self, handle: FakeHandle, start_error: Exception | None = None) -> None:
        self._handle, self._error = handle, start_error
        self.connected, self.stopped = False, False

    def connect(self) -> None:
        self.connected = True

    def start(self) -> FakeHandle:
        if self._error is not None:
            raise self._error
        return self._handle

    def stop(self) -> None:
        self.stopped = True


def answering(app: FastAPI, name: str = "one") -> Answer:
    """Return the answer of a replica with this application."""

    async def answer(routed: RoutedRequest) -> AsyncIterator[Any]:
        yield name
        async with aclosing(responses(app, routed.request)) as pieces:
            async for piece in pieces:
                yield piece

    return answer


def saying(*pieces: Any) -> Answer:
    """Return an answer of these pieces; an exception among them is raised."""

    async def answer(routed: RoutedRequest) -> AsyncIterator[Any]:
        for piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    return answer
