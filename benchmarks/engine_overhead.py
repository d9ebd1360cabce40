"""Engine overhead: the time of a step that is not spent inside a model's forward pass or output head.

    python benchmarks/engine_overhead.py [--model demo] [--draft-model demo]

For batches of 1 and 8, plain and speculative, greedy and sampled: seconds per step in the target, in
the draft, and outside both (scheduling, batches, laws, verdicts, commits, text).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from measuring import spread, write

from speculant import LLM, SamplingParams
from speculant.models.decoder import Decoder
from speculant.models.native_decoder import NativeDecoder

MODELS: list[Any] = [Decoder, NativeDecoder]
PROMPTS = ["def read(path):", "class Stack:", "import os\n", "for line in", "def main(", "try:\n", "if not", "return "]
PREDICTED = (
    "Outside the passes: about 0.3 ms a step at batch 1 and 1 ms at batch 8 when plain; with 5 drafts about 1 ms "
    "and 4 ms, as every drafted token needs a law and a draw."
)


class PassClock:
    """Adds up the time inside every decoder's forward and logits while it is installed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added up."""

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def measure(llm: LLM, params: SamplingParams, batch: int, steps: int) -> dict[str, Any]:
    """Run `steps` decoding steps of `batch` prompts and return milliseconds per step, as quartiles."""
    clock = PassClock()
    own = {kind: (kind.forward, kind.logits) for kind in MODELS}
    for index, prompt in enumerate(PROMPTS[:batch]):
        llm.engine.add_request(llm.tokenizer.encode(prompt), params, f"bench-{index}")
    llm.engine.step()
    inside, outside = [], []
    for kind, (forward, logits) in own.items():
        kind.forward, kind.logits = clock.wrap(forward), clock.wrap(logits)
    try:
        for _ in range(steps):
            clock.seconds, started = 0.0, time.perf_counter()
            llm.engine.step()
            outside.append(1e3 * (time.perf_counter() - started - clock.seconds))
            inside.append(1e3 * clock.seconds)
    finally:
        for kind, (forward, logits) in own.items():
            kind.forward, kind.logits = forward, logits
        for index in range(batch):
            llm.engine.abort(f"bench-{index}")
    return {"passes_ms": spread(inside), "outside_ms": spread(outside)}


def main() -> None:
    """Measure and write results/engine_overhead.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, draft in (("plain", None), ("speculative", arguments.draft_model)):
        llm = LLM(arguments.model, draft)
        for law, temperature in (("greedy", 0.0), ("sampled", 0.8)):
            params = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=None, ignore_eos=True)
            for batch in (1, 8):
                figures[f"{name}, {law}, batch {batch}"] = measure(llm, params, batch, arguments.steps)
    write("engine_overhead", PREDICTED, figures)


if __name__ == "__main__":
    main()
