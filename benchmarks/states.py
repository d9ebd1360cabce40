"""Passes of a model whose layers have states, of Qwen3.5-4B's shape and random weights, by number of rows.

`ms` is the median time of a pass, `over_one` that time over one row's in the same round, `states` the share of the
operations on states: 1 minus the time of the pass without them over its own. --layers: of the model's 32. Beside a
pass after 512 tokens: the memory of a sequence's records, and the seconds of the prompt. `chat_s`: the processor
seconds of a chat of ten turns, 48 tokens asked and 16 answered in each, with prefix hits and without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from speculant.cache import paged_cache
from speculant.kernels import Code, Op, open_kernels
from speculant.lab.bench import Benchmark, quartiles
from speculant.models import NativeBackend, NativeDecoder, SequenceInput, build_batch, read_description, tensor_shapes
from speculant.types import DraftTree

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16,
    "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
STATES = (Code.CONVOLVE, Code.RECUR)
PROMPT = 512
TURNS, ASKED, ANSWERED = 10, 48, 16


class RandomWeights:
    """Random numbers in bfloat16, made as they are read."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._shapes[name]

    def kind(self, name: str) -> str:
        """Return its type."""
        return "BF16"

    def order(self, name: str) -> Tensor | None:
        """Return None: its columns are in order."""
        return None

    def read(self, name: str) -> Tensor:
        """Make a tensor."""
        return (0.02 * torch.randn(self._shapes[name])).bfloat16()


class Passes:
    """A model with a text in its cache. prompts: the seconds of computing it."""

    def __init__(self, model: NativeDecoder) -> None:
        self._model, self.cache = model, paged_cache(model.cache_shape, 128, 16)
        self.prompts = [self.prompt_s() for _ in range(3)]  # the buffers of the program have their size then
        kept = [op for op in model.program.ops if op.code not in STATES]
        self._plain, self._whole = (Op * len(kept))(*kept), model.program.ops

    def prompt_s(self) -> float:
        """Compute a text; return its seconds."""
        self.cache.release(1)
        return self._seconds(SequenceInput(1, [7 * i % 1000 for i in range(PROMPT)], DraftTree.empty()))

    def seconds(self, rows: int, states: bool = True) -> float:
        """Compute a token and a draft after the text, which stays; return its seconds."""
        self._model.program.ops = self._whole if states else self._plain
        taken = self._seconds(SequenceInput(1, [5], DraftTree.chain([9] * (rows - 1))))
        self._model.program.ops = self._whole
        self.cache.truncate_to(1, PROMPT)
        return taken

    def chat_s(self, hits: bool) -> float:
        """Return the processor seconds of a chat, in which each turn reads all tokens or those that are new."""
        text, started = list[int](), time.process_time()
        for turn in range(TURNS):
            text += [(31 * turn + 7 * i) % 1000 for i in range(ASKED)]
            self.cache.match_prefix(2, text, limit=None if hits else 0)
            for _ in range(ANSWERED):
                self._seconds(SequenceInput(2, text[self.cache.length(2) :], DraftTree.empty()))
                self.cache.insert_prefix(2, text)
                text.append(5)
            self.cache.release(2)
        self.cache.forget_prefixes()
        return time.process_time() - started

    def _seconds(self, inputs: SequenceInput) -> float:
        batch = build_batch([inputs], self.cache, torch.device("cpu"))
        started = time.perf_counter()
        hidden = self._model.forward(batch, self.cache.storage).last
        self._model.logits(hidden[-len(inputs.tree.token_list) - 1 :])
        return time.perf_counter() - started


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time passes of all numbers of rows, round by round."""
    config = read_description({**SHAPE, "num_hidden_layers": arguments.layers})
    backend = NativeBackend(open_kernels())
    weights = RandomWeights(tensor_shapes(config))
    model = backend.load(config, weights, torch.bfloat16, torch.device("cpu"), arguments.weights)  # type: ignore[arg-type]
    passes, times, plain = Passes(model), dict[int, list[float]](), dict[int, list[float]]()
    for index in range(arguments.rounds + 1):
        for rows in arguments.rows if index % 2 else reversed(arguments.rows):
            own = statistics.median(passes.seconds(rows) for _ in range(3)), passes.seconds(rows, states=False)
            if index:
                times.setdefault(rows, []).append(own[0])
                plain.setdefault(rows, []).append(own[1])
    one = times[min(times)]
    found = {
        str(rows): {
            "ms": round(1e3 * statistics.median(own), 2),
            "over_one": quartiles([many / single for many, single in zip(own, one, strict=True)]),
            "states": quartiles([1 - without / whole for without, whole in zip(plain[rows], own, strict=True)]),
        }
        for rows, own in sorted(times.items())
    }
    chats = {name: round(passes.chat_s(name == "hits"), 1) for name in ("hits", "none")}
    mib = 2 * model.cache_shape.state_bytes / 2**20
    yield {"passes": found, "prompt_s": round(min(passes.prompts), 3), "records_mib": round(mib, 1), "chat_s": chats}


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Two cores of a Sapphire Rapids, int4: 5 rows take 1.3 times as long as one, 9 rows 1.7; states take"
    " less than 8% of one row's pass.",
    measure=measure, rounds=5, options={"layers": 32, "weights": "int4", "rows": [1, 3, 5, 9]},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
