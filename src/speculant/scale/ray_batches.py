"""Answers the lines of a batch on many machines: Ray Data gives them to a pool of engines, one in each actor."""

from __future__ import annotations

import logging
import pickle
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.data.exceptions import ExecutionTimeoutError, SystemException
from ray.exceptions import RayError

from speculant.errors import ServerError
from speculant.scale.batches import BatchJob, BatchLine, LineAnswer, LineError, answer_lines, inside, places_of
from speculant.scale.options import Cores, ReplicaOptions, cores_of_each, with_absolute_paths
from speculant.serving import ServerOptions, load_app

TASK_LINES = 64  # that an actor gets at a time: as many are answered again if it dies
_RETRIES = 3  # of a task whose actor died: a line may be what kills it
_COLUMN = "data"
_GO_ON = "give the same command again: it goes on from here."
_FAILURES = (RayError, SystemException, ExecutionTimeoutError)  # of Ray Data


class LineAnswerer:
    """An engine in an actor of Ray Data, which answers the lines of one task together.

    values: the engine's arguments. names: the model's names. cores: how many the actor claims.
    """

    def __init__(self, values: Mapping[str, Any], options: ServerOptions, names: Sequence[str], cores: int) -> None:
        self._cores = Cores.use_free(cores)
        app = load_app(values, options, names)
        self._answerer, self._places = inside(app), places_of(app)

    async def __call__(self, batch: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the results of the lines of a task, in their order. batch: the pickled lines.

        By the order, Ray Data knows what it has of a task that is repeated.
        """
        task = TaskLines([pickle.loads(data) for data in batch[_COLUMN]])
        await answer_lines(task, self._answerer, self._places)
        yield {_COLUMN: np.array([pickle.dumps(each) for each in sorted(task.results.items())], dtype=object)}


class TaskLines:
    """Some lines of a batch, and their results by the lines' numbers."""

    def __init__(self, lines: Sequence[BatchLine]) -> None:
        self._lines = lines
        self.results: dict[int, LineAnswer | LineError] = {}

    def pending(self) -> Iterator[BatchLine]:
        """Yield the lines."""
        return iter(self._lines)

    def record(self, line: BatchLine, result: LineAnswer | LineError) -> None:
        """Keep a line's result."""
        self.results[line.number] = result


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
    is replaced, and the lines of its task are answered again, a few times. Raises ServerError if the engines can't
    start or fail, or if a line is left, and ConfigError if no engine fits on a machine of the cluster.
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
    cores = cores_of_each(replicas)
    low, high = replicas.replicas
    rows = ray.data.from_items(
        [{_COLUMN: pickle.dumps(line)} for line in asked], override_num_blocks=-(-len(asked) // TASK_LINES)
    )
    results = rows.map_batches(
        LineAnswerer,
        batch_size=TASK_LINES,
        fn_constructor_args=(with_absolute_paths(values), options, tuple(names), cores),
        compute=ActorPoolStrategy(min_size=low, max_size=high, max_tasks_in_flight_per_actor=2),
        num_cpus=cores,
        max_task_retries=_RETRIES,
    )
    try:
        for row in results.iter_rows():
            number, result = pickle.loads(row[_COLUMN])
            job.record(lines[number], result)
            show()
    except _FAILURES as error:
        reason = str(error).strip().splitlines()[-1]
        raise ServerError(f"the engines failed: {reason}", _GO_ON) from error
    if job.left:
        raise ServerError(f"{job.left} lines got no result", _GO_ON)
