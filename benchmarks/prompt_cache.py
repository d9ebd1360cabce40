"""Time to the first token of a prompt: computed, known in memory, and read from the prompt cache on disk.

The states are measured in turn, with one engine; in `restarted` a second engine of the same process, loaded before, has
never seen the prompt. With --llama-server, a program of llama.cpp runs the same file in the same rounds: its slot is
saved once, and erased and restored before each reading. Before a read from disk, the system's own copies of the files
are dropped; `disk_warm` shows how much of the time the disk takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from speculant import LLM, SamplingParams
from speculant.cache import BlockFiles
from speculant.lab.bench import Benchmark, code_prompt, plain_values, ratios, spreads
from speculant.lab.inflation import inflated_pair

PORT = "8991"
ADDRESS = f"http://127.0.0.1:{PORT}"
STATES = ("cold", "memory", "disk", "disk_warm", "restarted")


def drop_pages(folder: Path) -> None:
    """Drop the system's copies of the files in a folder. What it has not written yet is written first."""
    for entry in BlockFiles.entries(folder):
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
    settings: dict[str, Any] = {"quantization": arguments.quantization or None, "kv_cache_dtype": arguments.keys}
    settings |= {"prompt_cache": folder / "prompts", "max_num_seqs": 1, "use_speculative_decoding": False}
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
        for entry in BlockFiles.entries(folder / "prompts"):
            entry.path.unlink()

    subjects = {
        "cold": lambda: run(first, forget(first, empty)),
        "memory": lambda: run(first, lambda: None),
        "disk": lambda: run(first, forget(first, lambda: drop_pages(folder / "prompts"))),
        "disk_warm": lambda: run(first, forget(first)),
        "restarted": lambda: run(second, forget(second, lambda: drop_pages(folder / "prompts"))),
    }
    peer = None if not arguments.llama_server else LlamaServer(arguments.llama_server, model, prompt, folder)
    subjects |= peer.subjects() if peer else {}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}  # each state needs the one before
    for number in range(arguments.rounds):
        for name, subject in subjects.items():
            runs[name].append(subject())
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
    if peer:
        peer.end()
    tokens = {run["token"] for name, each in runs.items() for run in each if name in STATES}
    files = BlockFiles.entries(folder / "prompts")
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


class LlamaServer:
    """A server of llama.cpp with one slot, whose keys and values it saves to a file and restores."""

    def __init__(self, program: str, model: str, prompt: Sequence[int], folder: Path) -> None:
        self._prompt, self._folder, self._saved = [*prompt], folder, folder / "slot.bin"
        command = [program, "-m", model, "-c", str(len(prompt) + 64), "-np", "1", "-t", str(torch.get_num_threads())]
        command += ["--slot-save-path", str(folder), "--port", PORT, "--cache-ram", "0"]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self._answers():
            time.sleep(0.2)
        self._complete()
        self._post("/slots/0?action=save", filename=self._saved.name)

    def subjects(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return what runs each of its states once, by name."""
        return {
            "llama.cpp cold": lambda: self._timed(self._erase, self._complete),
            "llama.cpp memory": lambda: self._timed(lambda: None, self._complete),
            "llama.cpp disk": lambda: self._timed(self._erase_and_drop, self._restore, self._complete),
        }

    def end(self) -> None:
        """End the program."""
        self._server.kill()
        self._server.wait()

    def _timed(self, prepare: Callable[[], object], *steps: Callable[[], object]) -> dict[str, Any]:
        prepare()
        started = time.perf_counter()
        answers = [step() for step in steps]
        return {"seconds": time.perf_counter() - started, "cached": answers[-1]["timings"]["cache_n"]}

    def _erase(self) -> None:
        self._post("/slots/0?action=erase")

    def _erase_and_drop(self) -> None:
        self._erase()
        with self._saved.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _restore(self) -> Any:
        return self._post("/slots/0?action=restore", filename=self._saved.name)

    def _complete(self) -> Any:
        return self._post("/completion", prompt=self._prompt, n_predict=1, temperature=0, cache_prompt=True, id_slot=0)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{ADDRESS}/health").status_code == 200
        except httpx.TransportError:
            return False

    def _post(self, path: str, **body: Any) -> Any:
        return httpx.post(f"{ADDRESS}{path}", json=body, timeout=600).raise_for_status().json()


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="At the shape of 1B in int4 a token has 32 KiB of keys and values in bfloat16 and takes about 10 ms to "
    "compute, so a disk of 1 GB/s reads it 300 times as fast: the first token from disk takes 1.5% of a computed one.",
    measure=measure, rounds=5,
    options={"model": "demo", "shape": "1b", "quantization": "int4", "keys": "auto", "tokens": 2000,
             "llama_server": ""},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
