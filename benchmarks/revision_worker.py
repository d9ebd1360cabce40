"""Runs workloads of one checkout: revisions.py starts it with the Python of that checkout.

It reads a line with a workload's name and writes a line with the seconds it took. It uses only names that all revisions
have. The argument: the folders of a target and a draft model of a real size, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from speculant import LLM, SamplingParams

CODE = [
    "def read(path):\n",
    "class Stack:\n",
    "import os\n",
    "for name in names:\n",
    "def main(argv=None):\n",
    "try:\n",
]
Engines = dict[tuple[str, str, str], LLM]


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
    prompts: list[Any] = [CODE[index % len(CODE)] for index in range(int(batch))]
    tokens = 64 if model == "small" else 24
    if distribution == "prompt":
        prompts, tokens = [[7 * place % 900 for place in range(512)]], 1
    params = SamplingParams(temperature=0.8 if distribution == "sampled" else 0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    engines[model, drafting, batch].generate(prompts, params)
    return time.perf_counter() - started


if __name__ == "__main__":
    made: Engines = {}
    for line in sys.stdin:
        print(run(line.strip(), json.loads(sys.argv[1]), made), flush=True)
