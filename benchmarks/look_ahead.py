"""PaSS for the embedded target: one pass drafts and verifies (arXiv 2311.13581). Its figures beside a draft model's.

Without --head, three look-ahead embeddings are trained with `speculant train head --kind pass`, on one thread. Then the
same prompts run in turn, one request at a time: without drafts, with look-ahead drafts of 1 to 3 tokens and of an
adaptive length, and with the draft model. `speed` is that over plain decoding, round by round. `same`: whether the
greedy texts are those of plain decoding. `passes_per_token` counts every pass of the target; each step has one. In the
paper, a model of 7 billion weights saves up to 30% of the running time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speculant import LLM, SamplingParams
from speculant.cli import app
from speculant.lab.bench import Benchmark, code_prompt, ratio, timed
from speculant.types import RequestOutput

NUM_HEADS, TRAINED, SEQ, RATE = 3, 40_000, 256, 0.01
TEMPERATURES = (0.0, 1.0)
PLAIN = "plain"


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
    """Return the figures of the target's passes."""
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    passes = sum(output.metrics.timing.sampled_passes for output in outputs)
    found = [output.metrics.speculative_decoding for output in outputs]
    tested, accepted = sum(each.num_tested_tokens for each in found), sum(e.num_accepted_draft_tokens for e in found)
    return {
        "tokens_per_pass": tokens / passes,
        "passes_per_token": passes / tokens,
        "accepted_of_tested": accepted / tested if tested else 0.0,
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train if there is no head, and measure all engines at all temperatures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.head or Path(temporary)
        if not (folder / "config.json").exists():
            train(folder, arguments.minutes)
        engines = {name: LLM("demo", max_num_seqs=1, **given) for name, given in subjects(str(folder)).items()}
        seen: dict[str, Any] = {"head": json.loads((folder / "config.json").read_text(encoding="utf-8"))}
    prompts = [code_prompt(engines[PLAIN].tokenizer, index) for index in range(arguments.prompts)]
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=arguments.tokens, ignore_eos=True)
        first = {name: run(llm, prompts, params) for name, llm in engines.items()}
        times = timed({name: partial(run, llm, prompts, params) for name, llm in engines.items()}, arguments.rounds)
        texts = {name: [output.outputs[0].token_ids for output in outputs] for name, outputs in first.items()}
        seen[f"temperature {temperature:g}"] = {
            name: {
                **figures(first[name]),
                "speed": ratio(times, PLAIN, name),
                **({"same": texts[name] == texts[PLAIN]} if temperature == 0 else {}),
            }
            for name in engines
        }
        yield seen


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="sum min(p, q) of the first look-ahead token 0.3, of the third 0.15, below a Medusa head's of the "
    "same training: 768 numbers are learned. 1.35 tokens per pass with one drafted token, 1.4 with two. Two take 9 "
    "rows instead of 1, which cost 2 passes of this small target: only one drafted token is about as fast as plain "
    "decoding, 0.9 to 1.1, and the draft model is faster. The adaptive length is never below 0.97.",
    measure=measure, rounds=3,
    options={"head": {"type": Path, "metavar": "FOLDER"}, "minutes": 2.0, "prompts": 8, "tokens": 96},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
