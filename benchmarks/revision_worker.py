"""Runs workloads of one checkout: revisions.py starts it with the Python of that checkout.

It reads a line with a workload's name and writes a line with the seconds it took. It uses only names that all revisions
have. The argument: the folders of a target and a draft model of a real size, as JSON.

"pass, WEIGHTS, BEFORE, ROWS" is one pass of the target over some rows after a text, and the logits of the last row, or
of all rows if they are at most 64. WEIGHTS: bfloat16, a type to round to, or a GGUF file.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from speculant import LLM, SamplingParams
from speculant.cache.storage import slotted_cache
from speculant.models.base import SequenceInput, build_batch
from speculant.models.weights.load import load_model
from speculant.types import DraftTree

CODE = [
    "def read(path):\n",
    "class Stack:\n",
    "import os\n",
    "for name in names:\n",
    "def main(argv=None):\n",
    "try:\n",
]
ROOM, CHUNK = 16, 512  # positions beside those of a pass; rows of the passes over the text before it
Engines = dict[Any, Any]


def run(workload: str, folders: list[str], engines: Engines) -> float:
    """Run "model, drafting, batch, distribution" and return the seconds; engines are made when they are first used."""
    *key, distribution = workload.split(", ")
    model, drafting, batch = key
    if (model, drafting, batch) not in engines:
        target, draft = ("demo", "demo") if model == "small" else folders
        pair: dict[str, Any] = {"draft_model": draft, "spec_length": 4} if drafting == "speculative" else {}
        engines[model, drafting, batch] = LLM(
            target, max_num_seqs=int(batch), max_model_len=1024, dtype="bfloat16", enable_prefix_caching=False, **pair
        )
        if measurement := getattr(engines[model, drafting, batch].engine, "measurement", None):
            measurement.finish()
    prompts: list[Any] = [CODE[index % len(CODE)] for index in range(int(batch))]
    tokens = 64 if model == "small" else 24
    if distribution == "prompt":
        prompts, tokens = [[7 * place % 900 for place in range(512)]], 1
    params = SamplingParams(temperature=0.8 if distribution == "sampled" else 0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    engines[model, drafting, batch].generate(prompts, params)
    return time.perf_counter() - started


@torch.inference_mode()
def run_pass(workload: str, folders: list[str], models: Engines) -> float:
    """Run "pass, WEIGHTS, BEFORE, ROWS" and return the seconds; the text is computed when it is first used."""
    _, weights, *sizes = workload.split(", ")
    before, rows = map(int, sizes)
    if weights not in models:
        rounded = None if weights == "bfloat16" or weights.endswith(".gguf") else weights
        source = weights if weights.endswith(".gguf") else folders[0]
        models[weights] = load_model(source, "bfloat16", kernels="native", quantization=rounded).model
    model = models[weights]
    if (weights, before, rows) not in models:
        cache = models[weights, before, rows] = slotted_cache(model.cache_shape, 1, before + rows + ROOM)
        for first in range(0, before, CHUNK):
            forward(model, cache, min(CHUNK, before - first), 0)
    cache = models[weights, before, rows]
    started = time.perf_counter()
    forward(model, cache, rows, rows if rows <= 64 else 1)
    seconds = time.perf_counter() - started
    cache.truncate_to(0, before)
    return seconds


def forward(model: Any, cache: Any, rows: int, logits: int) -> None:
    """Compute some rows, and the logits of the last ones."""
    tokens = [7 * place % 900 for place in range(rows)]
    batch = build_batch([SequenceInput(0, tokens, DraftTree.empty())], cache, model.cache_shape.device)
    hidden = model.forward(batch, cache.storage, ()).last
    if logits:
        model.logits(hidden[-logits:])


if __name__ == "__main__":
    made: Engines = {}
    for line in sys.stdin:
        measured = run_pass if line.startswith("pass, ") else run
        print(measured(line.strip(), json.loads(sys.argv[1]), made), flush=True)
