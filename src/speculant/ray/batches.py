"""Answers the lines of a batch on many machines: Ray Data gives them to a pool of engines, one in each actor."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import ray.data
from ray.data import ActorPoolStrategy, DataContext

from speculant.batches.job import BatchJob
from speculant.batches.lines import BatchLine, LineAnswer, LineError
from speculant.batches.run import answer_lines, inside
from speculant.errors import ServerError
from speculant.ray.cores import Cores
from speculant.ray.options import ReplicaOptions
from speculant.serving.options import ServerOptions

TASK_LINES = 64  # that an actor gets at a time: as many are answered again if it dies
_RETRIES = 3  # of a task whose actor died: a line may be what kills it
_COLUMN = "data"
Result = LineAnswer | LineError


class LineAnswerer:
    """An engine in an actor of Ray Data, which answers the lines of one task together.

    values: the engine's arguments. names: the model's names. cores: how many the actor claims.
    """

    def __init__(self, values: Mapping[str, Any], options: ServerOptions, names: Sequence[str], cores: int) -> None:
        self._cores = Cores.claim(cores)
        if self._cores is not None:
            self._cores.use()
        # torch starts its threads on the cores that the process has by now
        from speculant.engine.async_engine import AsyncEngine
        from speculant.serving.app import make_app

        engine = AsyncEngine(**values)
        self._answerer = inside(make_app(engine, options, names))
        self._places = engine.limits.max_num_seqs + min(engine.limits.max_num_seqs, engine.limits.max_waiting)

    async def __call__(self, batch: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the results of the lines of a task. batch: the pickled lines."""
        part = TaskLines([pickle.loads(data) for data in batch[_COLUMN]])
        answering = asyncio.create_task(answer_lines(part, self._answerer, self._places))
        async with aclosing(part.results(answering)) as results:
            found = {line.number: result async for line, result in results}
        # in one order, by which Ray Data knows what it has of a task that is repeated
        yield {_COLUMN: np.array([pickle.dumps((number, found[number])) for number in sorted(found)], dtype=object)}


class TaskLines:
    """Some lines of a batch, and their results as they come. For use in one event loop."""

    def __init__(self, lines: Sequence[BatchLine]) -> None:
        self._lines, self._found = lines, asyncio.Queue[tuple[BatchLine, Result]]()

    def pending(self) -> Iterator[BatchLine]:
        """Yield the lines."""
        return iter(self._lines)

    def record(self, line: BatchLine, result: Result) -> None:
        """Note a line's result."""
        self._found.put_nowait((line, result))

    async def results(self, answering: asyncio.Task[None]) -> AsyncGenerator[tuple[BatchLine, Result], None]:
        """Yield the results of a task that answers these lines; raises its error."""
        try:
            for _ in self._lines:
                waiting = asyncio.ensure_future(self._found.get())
                await asyncio.wait({waiting, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done() and self._found.empty():
                    waiting.cancel()
                    answering.result()
                yield await waiting
        finally:
            answering.cancel()


def answer_on_ray(
    job: BatchJob,
    values: Mapping[str, Any],
    options: ServerOptions,
    names: Sequence[str],
    replicas: ReplicaOptions,
    show: Callable[[], None],
) -> None:
    """Answer the pending lines of a batch with a pool of engines on the connected cluster, and write their results.

    The lines are held in this process and in the cluster's memory. show: called after each result. An actor that dies
    is replaced, and the lines of its task are answered again. Raises the errors of Ray for a pool that can't start.
    """
    lines = {line.number: line for line in job.pending()}
    asked = [line for line in lines.values() if line.problem is None]
    for line in lines.values():
        if line.problem is not None:
            job.record(line, line.problem)
    if not asked:
        return
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    DataContext.get_current().enable_progress_bars = False
    cores = replicas.cores or max(1, int(ray.cluster_resources().get("CPU", 1)) // replicas.replicas[1])
    low, high = replicas.replicas
    rows = ray.data.from_items(
        [{_COLUMN: pickle.dumps(line)} for line in asked], override_num_blocks=-(-len(asked) // TASK_LINES)
    )
    results = rows.map_batches(
        LineAnswerer,
        batch_size=TASK_LINES,
        fn_constructor_args=(dict(values), options, tuple(names), cores),
        compute=ActorPoolStrategy(min_size=low, max_size=high, max_tasks_in_flight_per_actor=2),
        num_cpus=cores,
        max_task_retries=_RETRIES,
    )
    for row in results.iter_rows():
        number, result = pickle.loads(row[_COLUMN])
        job.record(lines[number], result)
        show()
    if job.left:
        raise ServerError(f"{job.left} lines got no result", "give the same command again: it goes on from here.")
