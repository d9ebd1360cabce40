"""Runs workloads of one checkout on demand: started by revisions.py, with the Python of that checkout.

Reads a line with a workload's name and writes a line with the seconds it took. It uses what revisions have in common.
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
PAIR: dict[str, Any] = {"draft_model": "demo", "spec_length": 4}


class Worker:
    """Engines of one checkout, made when they are first used. large: folders of a target and a draft of a real size."""

    def __init__(self, large: list[str]) -> None:
        self._target, self._draft = large
        self._engines: dict[str, LLM] = {}

    def run(self, workload: str) -> float:
        """Run "model, drafting, batch, distribution" and return the seconds."""
        model, drafting, batch, distribution = workload.split(", ")
        llm = self._engine(model, drafting, int(batch))
        prompts: list[Any] = [CODE[index % len(CODE)] for index in range(int(batch))]
        tokens = 64 if model == "small" else 24
        if distribution == "prompt":
            prompts, tokens = [[7 * place % 900 for place in range(512)]], 1
        temperature = 0.8 if distribution == "sampled" else 0.0
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - started

    def _engine(self, model: str, drafting: str, batch: int) -> LLM:
        key = f"{model}, {drafting}, {batch}"
        if key not in self._engines:
            chosen: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": 1024, "dtype": "bfloat16"}
            chosen["enable_prefix_caching"] = False
            drafts = drafting == "speculative"
            if model == "small":
                self._engines[key] = LLM("demo", **chosen, **(PAIR if drafts else {}))
            else:
                pair: dict[str, Any] = {"draft_model": self._draft, "spec_length": 4} if drafts else {}
                self._engines[key] = LLM(self._target, **chosen, **pair)
        return self._engines[key]


def main() -> None:
    """Serve until the input ends."""
    worker = Worker(json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(worker.run(line.strip()), flush=True)


if __name__ == "__main__":
    main()
