"""The time from `LLM(...)` to the first token, and the memory that it takes: packed anew, and mapped from the cache.

    python benchmarks/start.py [--rounds 5] [--model FOLDER] [--packing auto]

Each start is a process of its own, whose imports are done before. First starts have an empty cache folder, with nothing
kept of earlier runs; the starts after them find what they left. The checkpoint is in the system's page cache. Memory is
the process's peak above what it had after the imports, in parts: anonymous memory, and mapped files.

Pages are what the system took to give the process new memory for packed weights. A virtual machine whose unused pages
go back to its host gets them from there, which may take longer than packing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import spread, write

from speculant.lab.inflation.pair import inflated_pair

MIB, PAUSE_S = 2**20, 6.0  # in a pause the pages of the last process go back to a host
FIRST, CACHED, WITHOUT = "first", "cached", "cache off"
PREDICTED = (
    "1.04B in bfloat16, 12 bits: the first start 1.7 s beside what the pages take (packing 0.8, costs 0.5, gains 0.2), "
    "with those 3.4; cached 0.35 s, of which the check of the mapped file 0.1. Peak memory: the packed weights, and "
    "120 MiB."
)
START = """
import json, sys, time
from importlib import import_module
from pathlib import Path
import torch
from speculant import LLM, SamplingParams
from speculant.kernels.native import Kernels
for name in ("engine.build", "text.tokenizer", "models.native.decoder", "models.backends.native"):
    import_module("speculant." + name)

def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("VmHWM", "Rss"))}

pages, touch = [], Kernels.touch

def timed(kernels, memory):
    started = time.perf_counter()
    touch(kernels, memory)
    pages.append(time.perf_counter() - started)

Kernels.touch = timed
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before, started = memory(), time.perf_counter()
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
made = time.perf_counter() - started
stream = llm.stream("def fibonacci(n):", SamplingParams(temperature=0, max_tokens=16))
first = next(stream)
seconds = time.perf_counter() - started
after = memory()
token_ids = [first.token, *(piece.token for piece in stream)]
model = llm._runtime.checkpoint.model.packed
weights = [each for layer in model.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
sizes = {id(each.memory): each.memory.numel() for each in [*weights, model.table, model.head]}
print(json.dumps({
    "first_token_s": seconds, "made_s": made, "pages_s": sum(pages),
    "weights": f"{llm.weight_packing}, {llm.weight_source}",
    "packed_bytes": sum(sizes.values()), "peak_bytes": after["VmHWM"] - before["VmHWM"],
    "anonymous_bytes": after["RssAnon"] - before["RssAnon"], "file_bytes": after["RssFile"] - before["RssFile"],
    "token_ids": token_ids,
}))
"""


def start(model: Path, folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Start a process with this folder for everything that is kept, and wait until it has ended."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", START, str(model), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(model: Path, rounds: int, arguments: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Start with an empty folder, with what that left, and without the cache, in turn."""
    starts: dict[str, list[dict[str, Any]]] = {FIRST: [], CACHED: [], WITHOUT: []}
    for place in range(rounds):
        time.sleep(PAUSE_S)
        with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
            first = start(model, Path(folder), arguments)
            time.sleep(PAUSE_S)
            starts[FIRST].append(first)
            starts[CACHED].append(start(model, Path(folder), arguments))
            starts[WITHOUT].append(start(model, Path(folder), {**arguments, "weight_cache": "off"}))
        print(f"round {place + 1}", {name: round(own[-1]["first_token_s"], 2) for name, own in starts.items()})
    return starts


def figures(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the quartiles of one kind of start."""
    last = starts[-1]
    return {
        "first_token_s": spread([each["first_token_s"] for each in starts]),
        "made_s": spread([each["made_s"] for each in starts]),
        "pages_s": spread([each["pages_s"] for each in starts]),
        "beside_pages_s": spread([each["first_token_s"] - each["pages_s"] for each in starts]),
        "weights": [each["weights"] for each in starts],
        "packed_mib": last["packed_bytes"] / MIB,
        "peak_beside_packed_mib": spread([(each["peak_bytes"] - each["packed_bytes"]) / MIB for each in starts]),
        "anonymous_mib": spread([each["anonymous_bytes"] / MIB for each in starts]),
        "file_mib": spread([each["file_bytes"] / MIB for each in starts]),
    }


def main() -> None:
    """Measure and write results/start.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a checkpoint in bfloat16 [default: the inflated pair's of 1b]")
    parser.add_argument("--packing", default="auto")
    arguments = parser.parse_args()
    model = arguments.model or inflated_pair("1b")[0]
    for file in model.glob("*.safetensors"):
        file.read_bytes()
    starts = measure(model, arguments.rounds, {"weight_packing": arguments.packing})
    texts = {json.dumps(each["token_ids"]) for own in starts.values() for each in own}
    write("start", PREDICTED, {"same_texts": len(texts) == 1, **{name: figures(own) for name, own in starts.items()}})


if __name__ == "__main__":
    main()
