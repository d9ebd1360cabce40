"""`speculant batch` beside a loop of requests, each with speculation and without: tokens per second.

A loop sends a request, waits for its answer, and sends the next one; here it is the same command with one sequence at a
time (`--max-num-seqs 1`), so no time of a connection counts for it. Each run is a process of its own, which learns the
acceptance of its drafts anew; the time of loading is left out. Runs alternate, round by round, on lines of the round's
own. A figure is the number of generated tokens per second, over those of the loop without speculation in the same
round.

Texts, greedy: "completion" continues openings of code, "edit" repeats code. With --shape, both models of the embedded
pair are inflated: text and acceptance stay, costs are those of the shape.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from speculant.lab.bench.measuring import interleave
from speculant.lab.bench.scripts import COMPLETION, EDIT, SHAPE, Benchmark, prompts_of, quartiles
from speculant.lab.inflation.pair import inflated_pair
from speculant.models.source import resolve_source
from speculant.text.tokenizer import Tokenizer

LOOP, PLAIN, SPECULATIVE = "loop", "plain", "speculation"


def write_requests(path: Path, prompts: Sequence[Sequence[int]], tokens: int) -> Path:
    """Write a batch file of completions of the same length."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": str(place), "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": list(prompt)}}
        for place, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(folder: Path, models: Sequence[str], name: str, seqs: int, speculates: bool) -> dict[str, Any]:
    """Answer the file in a folder; return the command's summary."""
    out = folder / f"{name}.jsonl"
    command = [sys.executable, "-m", "speculant.cli.main", "batch", str(folder / "in.jsonl"), str(out)]
    command += ["--model", models[0], "--draft-model", models[1], "--dtype", "bfloat16", "--max-model-len", "1024"]
    command += ["--max-num-seqs", str(seqs), "--json", f"--{'' if speculates else 'no-'}use-speculative-decoding"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    summary: dict[str, Any] = json.loads(done.stdout)
    return {**summary, "texts": _texts(out)}


def _texts(out: Path) -> dict[str, str]:
    results = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in results}


def figures(runs: Mapping[str, Sequence[dict[str, Any]]], first: str) -> dict[str, Any]:
    """Return the figures of each way to run, over those of the first."""
    base = [each["tokens_per_s"] for each in runs[first]]
    texts = zip(*([each["texts"] for each in own] for own in runs.values()), strict=True)
    return {
        "same_texts": all(each == round_[0] for round_ in texts for each in round_),
        **{
            name: {
                "tokens_per_s": quartiles([each["tokens_per_s"] for each in own]),
                "speed": quartiles([each["tokens_per_s"] / under for each, under in zip(own, base, strict=True)]),
                "tokens_per_pass": quartiles([each["speculation"]["tokens_per_pass"] for each in own]),
            }
            for name, own in runs.items()
        },
    }


def compare(arguments: argparse.Namespace, models: Sequence[str], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Run all ways in turn on as many prompts as a round has."""
    ways = {
        f"{LOOP if seqs == 1 else f'batch of {seqs}'}, {SPECULATIVE if speculates else PLAIN}": (seqs, speculates)
        for seqs in (1, *arguments.seqs)
        for speculates in (False, True)
    }
    lines = arguments.lines
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(place) for place in range(arguments.rounds)]
        for place, folder in enumerate(folders):
            folder.mkdir()
            write_requests(folder / "in.jsonl", prompts[place * lines : (place + 1) * lines], arguments.tokens)
        turns = {way: iter(folders) for way in ways}
        subjects = {
            way: partial(lambda way: run(next(turns[way]), models, way.replace(" ", "-"), *ways[way]), way)
            for way in ways
        }
        return figures(interleave(subjects, arguments.rounds), next(iter(ways)))


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare on each kind of text."""
    embedded = resolve_source("demo", "target"), resolve_source("demo", "draft")
    models = [str(each) for each in (embedded if arguments.shape == "demo" else inflated_pair(arguments.shape))]
    if arguments.shape != "demo":
        arguments.name = f"batch_{arguments.shape}"
    seen: dict[str, Any] = {}
    for text in arguments.texts:
        prompts = prompts_of(text, Tokenizer.load(Path(models[0])), arguments.lines * arguments.rounds)
        seen[text] = compare(arguments, models, prompts)
        yield seen


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="1.04B in bfloat16 on two cores, over the loop without speculation. Completions: loop with speculation "
    "1.6; batch of 8 plain 4, with speculation 4.2; batch of 32 plain 5.5, with speculation 5.4. Edits: 2.5; 3.5, 5; "
    "4.5, 5. The embedded models, completions: 1.2; 3, 3; 4.5, 4.3. Texts are the same everywhere.",
    measure=measure, rounds=3,
    options={
        "shape": SHAPE, "texts": {"nargs": "+", "choices": [COMPLETION, EDIT], "default": [COMPLETION, EDIT]},
        "seqs": [8, 32], "lines": 48, "tokens": 32,
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
