"""A process that holds models and storages, and their stand-ins for an engine that holds neither.

this process     tables, scheduler, drafters, verifiers     RemoteModel, RemoteStorage
                                                                 | bytes through a pipe
the worker       weights, keys and values                   CausalLM, TensorStorage
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, Moves
from speculant.cache.paged import KVCache
from speculant.cache.storage import TensorStorage
from speculant.models.base import Batch, CausalLM, Chain, Hidden, ModelNeeds
from speculant.models.weights.load import load_model

SECONDS = 120  # that an answer may take


class Held:
    """The worker's models and storages, which are named by number. Its methods are the requests that it answers."""

    def __init__(self) -> None:
        self._models: list[CausalLM] = []
        self._storages: list[TensorStorage] = []

    def load(self, folder: str, dtype: str, kernels: str) -> tuple[int, CacheShape, tuple[int, ...]]:
        """Load a checkpoint; return its number and what else a `CausalLM` announces."""
        model = load_model(folder, dtype, "cpu", kernels=kernels).model
        self._models.append(model)
        sizes = model.vocab_size, model.max_positions, model.num_layers, model.hidden_size
        return len(self._models) - 1, model.cache_shape, sizes

    def allocate(self, shape: CacheShape, num_slots: int) -> int:
        """Make a storage and return its number."""
        self._storages.append(TensorStorage(shape, num_slots, "lower the test's size."))
        return len(self._storages) - 1

    def forward(self, model: int, batch: Batch, storage: int, taps: Sequence[int]) -> Hidden:
        """See `CausalLM.forward`."""
        return self._models[model].forward(batch, self._storages[storage], taps)

    def logits(self, model: int, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self._models[model].logits(hidden)

    def write(self, storage: int, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVStorage.write`."""
        self._storages[storage].write(layer, slots, keys, values)

    def read(self, storage: int, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """See `KVStorage.read`."""
        return self._storages[storage].read(layer, slots)

    def move(self, storage: int, moves: Moves) -> None:
        """See `KVStorage.move`."""
        self._storages[storage].move(moves)


@torch.inference_mode()
def serve(connection: Connection) -> None:
    """Answer until the other end is closed; an error is an answer too."""
    torch.set_num_threads(1)
    held = Held()
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pickle.loads(connection.recv_bytes())
            try:
                answer = getattr(held, name)(*arguments)
            except Exception as error:  # noqa: BLE001 - whoever asked has to hear of it
                answer = error
            connection.send_bytes(pickle.dumps(answer))


class Worker:
    """This process's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, name: str, *arguments: object) -> Any:
        """Send the worker a request; return its answer, or raise it if it is an error."""
        self._connection.send_bytes(pickle.dumps((name, arguments)))
        assert self._connection.poll(SECONDS), f"no answer to {name}"
        answer = pickle.loads(self._connection.recv_bytes())
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextlib.contextmanager
def started_worker() -> Iterator[Worker]:
    """Run a worker in a process of its own, which shares no memory with this one."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Worker(ours)
    finally:
        ours.close()
        process.join(SECONDS)
        process.terminate()


class RemoteStorage:
    """A `KVStorage` in the worker; counts the slots that were moved."""

    def __init__(self, worker: Worker, shape: CacheShape, num_slots: int) -> None:
        self._worker = worker
        self.number: int = worker.ask("allocate", shape, num_slots)
        self.num_moved = 0

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVStorage.write`."""
        self._worker.ask("write", self.number, layer, slots, keys, values)

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """See `KVStorage.read`."""
        keys, values = self._worker.ask("read", self.number, layer, slots)
        return keys, values

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Refuse: memory of another process can't be had without copying."""
        raise AssertionError("only what stands beside the storage may ask for it whole")

    def move(self, moves: Moves) -> None:
        """See `KVStorage.move`."""
        self.num_moved += len(moves)
        self._worker.ask("move", self.number, moves)


class RemoteModel:
    """A `CausalLM` in the worker."""

    needs = ModelNeeds()

    def __init__(self, worker: Worker, folder: str, dtype: str, kernels: str) -> None:
        self._worker = worker
        self._number, self.cache_shape, sizes = worker.ask("load", folder, dtype, kernels)
        self.vocab_size, self.max_positions, self.num_layers, self.hidden_size = sizes

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`: a cache's tables are not in the worker, so chains are drawn step by step."""
        return chains

    def forward(self, batch: Batch, storage: RemoteStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`."""
        hidden: Hidden = self._worker.ask("forward", self._number, batch, storage.number, tuple(taps))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        logits: Tensor = self._worker.ask("logits", self._number, hidden)
        return logits
