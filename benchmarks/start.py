"""The time from `LLM(...)` to the first token, and its memory: with weights packed anew, and mapped from the cache.

Each start is a process of its own, and the clock starts after its imports. A first start has an empty cache folder; the
next start finds the files that the first one left. The checkpoint is in the system's page cache. Memory is the
process's peak above its memory after the imports, in parts: anonymous memory, and mapped files.

With a draft model, a first start also includes the choice of the draft's type. The costs of a large model's drafts are
measured after the first tokens.

`pages_s` is the time in which the system gave the process new memory for packed weights. On a virtual machine that
returns unused pages to its host this may take longer than packing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speculant.lab.bench import Benchmark, quartiles
from speculant.lab.inflation import inflated_pair

MIB, PAUSE_S = 2**20, 6.0  # during the pause the pages of the last process return to the host
FIRST, CACHED, WITHOUT = "first", "cached", "cache off"
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
weights = [each for layer in model.layers for each in layer.matrices]
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
    """Run a process whose cache is in this folder, which may be a container's; return its figures."""
    arguments = {"weight_cache": str(folder / "weights"), **arguments}
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", START, str(model), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_all(model: Path, rounds: int, arguments: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Start with an empty folder, with the files of that start, and without the cache, in turn."""
    starts: dict[str, list[dict[str, Any]]] = {FIRST: [], CACHED: [], WITHOUT: []}
    for place in range(rounds):
        with tempfile.TemporaryDirectory(dir=Path.home()) as name:
            folder = Path(name)
            time.sleep(PAUSE_S)
            starts[FIRST].append(start(model, folder, arguments))
            time.sleep(PAUSE_S)
            starts[CACHED].append(start(model, folder, arguments))
            starts[WITHOUT].append(start(model, folder, {**arguments, "weight_cache": "off"}))
        print(f"round {place + 1}", {name: round(own[-1]["first_token_s"], 2) for name, own in starts.items()})
    return starts


def figures(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the quartiles of one kind of start."""
    return {
        **{name: quartiles([each[name] for each in starts]) for name in ("first_token_s", "made_s", "pages_s")},
        "beside_pages_s": quartiles([each["first_token_s"] - each["pages_s"] for each in starts]),
        "weights": [each["weights"] for each in starts],
        "packed_mib": starts[-1]["packed_bytes"] / MIB,
        "peak_beside_packed_mib": quartiles([(each["peak_bytes"] - each["packed_bytes"]) / MIB for each in starts]),
        "anonymous_mib": quartiles([each["anonymous_bytes"] / MIB for each in starts]),
        "file_mib": quartiles([each["file_bytes"] / MIB for each in starts]),
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start in all ways, in turn."""
    model = arguments.model or inflated_pair("1b")[0]
    for file in model.glob("*.safetensors"):
        file.read_bytes()
    given = {name: getattr(arguments, name) for name in ("draft_model", "quantization") if getattr(arguments, name)}
    for file in Path(given.get("draft_model", model)).glob("*.safetensors"):
        file.read_bytes()
    starts = run_all(model, arguments.rounds, {"weight_packing": arguments.packing, **given})
    texts = {json.dumps(each["token_ids"]) for own in starts.values() for each in own}
    yield {"same_texts": len(texts) == 1, **{name: figures(own) for name, own in starts.items()}}


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="1.04B in bfloat16, 12 bits: the first start 1.7 s without the time of the pages (packing 0.8, costs "
    "0.5, gains 0.2), with it 3.4; cached 0.35 s, of which the check of the mapped file 0.1. Peak memory: the "
    "packed weights, and 120 MiB.",
    measure=measure, rounds=5,
    options={
        "model": {"type": Path, "help": "a checkpoint in bfloat16 [default: the inflated target of 1b]"},
        "packing": "auto",
        "draft_model": {"help": "a draft model [default: none]"},
        "quantization": {"help": "the type that the target's weights are rounded to [default: none]"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
