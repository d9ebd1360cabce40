"""Time to the first token of a prompt: computed, known in memory, and read from the prompt cache on disk.

The states are measured in turn, with one engine; in `restarted` a second engine of the same process, loaded before, has
never seen the prompt. Before a read from disk, the system's own copies of the files are dropped, and the figure in
`disk_warm` shows how much of the time the disk takes. Predicted of a disk: bytes of a token / bytes per second, against
the time of a prompt's token.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from speculant import LLM, SamplingParams
from speculant.cache import entries
from speculant.lab.bench import Benchmark, code_prompt, plain_values, ratios, spreads
from speculant.lab.inflation import inflated_pair

STATES = ("cold", "memory", "disk", "disk_warm", "restarted")


def drop_pages(folder: Path) -> None:
    """Drop the system's copies of the files in a folder. What it has not written yet is written first."""
    for entry in entries(folder):
        with entry.path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the states in turn."""
    folder = Path(tempfile.mkdtemp(prefix="prompts-"))
    try:
        yield _measure(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = str(inflated_pair(arguments.shape)[0]) if arguments.model == "demo" and arguments.shape else arguments.model
    settings: dict[str, Any] = {"quantization": arguments.quantization, "kv_cache_dtype": arguments.keys}
    settings |= {"prompt_cache": folder, "max_num_seqs": 1, "use_speculative_decoding": False}
    first, second = (LLM(model, **settings) for _ in range(2))
    length = min(arguments.tokens, first.limits.max_model_len - 2)
    prompt, once = code_prompt(first.tokenizer, 0, length), SamplingParams(temperature=0, max_tokens=1)

    def run(llm: LLM, prepare: Callable[[], object]) -> dict[str, Any]:
        prepare()
        started = time.perf_counter()
        [out] = llm.generate([{"prompt_token_ids": prompt}], once)
        seconds, stored = time.perf_counter() - started, llm.engine.stored_prefixes
        assert stored is not None
        stored.files.flush()
        return {"seconds": seconds, "cached": out.metrics.cached_tokens, "token": out.outputs[0].token_ids[0]}

    def forget(llm: LLM, *also: Callable[[], object]) -> Callable[[], object]:
        return lambda: (llm.reset_prefix_cache(), *(each() for each in also))

    def empty() -> None:
        for entry in entries(folder):
            entry.path.unlink()

    subjects = {
        "cold": lambda: run(first, forget(first, empty)),
        "memory": lambda: run(first, lambda: None),
        "disk": lambda: run(first, forget(first, lambda: drop_pages(folder))),
        "disk_warm": lambda: run(first, forget(first)),
        "restarted": lambda: run(second, forget(second, lambda: drop_pages(folder))),
    }
    runs = {name: [] for name in subjects}  # in this order: each state needs the one before
    for number in range(arguments.rounds):
        for name, subject in subjects.items():
            runs[name].append(subject())
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
    tokens = {run["token"] for each in runs.values() for run in each}
    files = entries(folder)
    return {
        "prompt_tokens": len(prompt),
        "bytes_per_token": sum(entry.size for entry in files) / len(prompt),
        "equal": len(tokens) == 1,
        "cached": {name: each[-1]["cached"] for name, each in runs.items()},
        **{name: plain_values(spreads([{"seconds": run["seconds"]} for run in each])) for name, each in runs.items()},
        "over cold": {
            name: plain_values(
                ratios([{"s": run["seconds"]} for run in each], [{"s": run["seconds"]} for run in runs["cold"]])
            )
            for name, each in runs.items()
        },
    }


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="At the shape of 1B in int4 a token has 32 KiB of keys and values in bfloat16 and takes about 10 ms to "
    "compute, so a disk of 1 GB/s reads it 300 times as fast: the first token from disk takes 1.5% of a computed one.",
    measure=measure, rounds=5,
    options={"model": "demo", "shape": "1b", "quantization": "int4", "keys": "auto", "tokens": 2000},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
