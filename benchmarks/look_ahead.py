"""PaSS for the embedded target: one pass drafts and verifies; its figures beside a draft model's (arXiv 2311.13581).

    python benchmarks/look_ahead.py [--head FOLDER] [--minutes 2] [--prompts 8] [--tokens 96] [--rounds 3]

Without --head, three look-ahead embeddings are trained with `speculant train head --kind pass`, on one thread. Then the
same prompts are run in turn without drafts, with look-ahead drafts of 1 to 3 tokens and of a length that the engine
chooses, and with the draft model; one request at a time. `speed` is that over plain decoding, round by round. `same`:
whether the greedy texts are those of plain decoding. `passes_per_token` counts every pass of the target, of which there
is one per step. The paper has up to 30% of the running time saved, with a model of 7 billion weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import interleave, ratio, write

from speculant import LLM, SamplingParams
from speculant.cli.main import app
from speculant.lab.bench.workloads import code_prompt
from speculant.types import RequestOutput

NUM_HEADS, TRAINED, SEQ, RATE = 3, 40_000, 256, 0.01
TEMPERATURES = (0.0, 1.0)
PLAIN = "plain"
PREDICTED = (
    "sum min(p, q) of the first look-ahead token 0.3, of the third 0.15, below a Medusa head's of the same training: "
    "768 numbers are learned. 1.35 tokens per pass with one drafted token, 1.4 with two. Two take 9 rows instead of 1, "
    "which cost 2 passes of this small target: only one drafted token is about as fast as plain decoding, 0.9 to 1.1, "
    "and the draft model is faster. The length that the engine chooses is never below 0.97."
)


def train(folder: Path, minutes: float) -> None:
    """Train the embeddings into a folder."""
    torch.set_num_threads(1)
    arguments = {
        "kind": "pass", "target": "demo", "out": folder, "minutes": minutes, "tokens": TRAINED, "seq": SEQ,
        "num-heads": NUM_HEADS, "batch": 4, "vector-lr": RATE,
    }  # fmt: skip
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    app(["train", "head", *words], standalone_mode=False)


def subjects(head: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of each engine."""
    own = {"method": "pass", "model": head}
    fixed = {f"pass, {n}": {"speculative_config": {**own, "num_speculative_tokens": n}} for n in (1, 2, 3)}
    return {
        PLAIN: {"use_speculative_decoding": False},
        **fixed,
        "pass, adaptive": {"speculative_config": own},
        "draft model, 4": {"draft_model": "demo", "spec_length": 4},
        "draft model, adaptive": {"speculative_config": {"method": "draft_model", "model": "demo"}},
    }


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Run the prompts one after the other."""
    return [llm.generate([prompt], params)[0] for prompt in prompts]


def figures(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    """Return what a pass brought."""
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    passes = sum(output.metrics.timing.sampled_passes for output in outputs)
    found = [output.metrics.speculative_decoding for output in outputs]
    tested, accepted = sum(each.num_tested_tokens for each in found), sum(e.num_accepted_draft_tokens for e in found)
    return {
        "tokens_per_pass": tokens / passes,
        "passes_per_token": passes / tokens,
        "accepted_of_tested": accepted / tested if tested else 0.0,
    }


def measure(head: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all engines at all temperatures."""
    engines = {name: LLM("demo", max_num_seqs=1, **given) for name, given in subjects(head).items()}
    prompts = [code_prompt(engines[PLAIN].tokenizer, index) for index in range(arguments.prompts)]
    seen: dict[str, Any] = {"head": json.loads((Path(head) / "config.json").read_text(encoding="utf-8"))}
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=arguments.tokens, ignore_eos=True)
        first = {name: run(llm, prompts, params) for name, llm in engines.items()}
        again = {name: partial(run, llm, prompts, params) for name, llm in engines.items()}
        times = interleave(again, arguments.rounds)
        texts = {name: [output.outputs[0].token_ids for output in outputs] for name, outputs in first.items()}
        seen[f"temperature {temperature:g}"] = {
            name: {
                **figures(first[name]),
                "speed": ratio(times, PLAIN, name),
                **({"same": texts[name] == texts[PLAIN]} if temperature == 0 else {}),
            }
            for name in engines
        }
    return seen


def main() -> None:
    """Measure and write results/look_ahead.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.head or Path(temporary)
        if not (folder / "config.json").exists():
            train(folder, arguments.minutes)
        write("look_ahead", PREDICTED, measure(str(folder), arguments))


if __name__ == "__main__":
    main()
