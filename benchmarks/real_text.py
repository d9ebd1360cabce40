"""Real text: plain decoding, fixed lengths of a draft model, the default with and without it, and a computed oracle.

The target is SmolLM2-135M-Instruct (`make real-models`), inflated to 1.04 billion parameters: the texts of the small
model at the cost of the large one. Draft models are SmolLM2 with noise on its weights: "third_55" costs about a third
of the target's pass, and 0.55 of its tokens are accepted. "embedded" is the embedded pair on openings of code. "head"
is a head of SmolLM2's own (--head FOLDER, made by `speculant train head`), inflated as well; the default has it beside
its lookups. All are made once and kept in ~/.cache/speculant/inflated. With --small, the target has SmolLM2's own size.

Prompts are our own, of ten of Spec-Bench's kinds (arXiv 2401.07851: of MT-bench's categories writing, roleplay, coding,
extraction and stem, and the five other tasks), in real_text.jsonl, by the model's chat template. A round has the next
ones. A text ends where the model ends it. In each round every way runs once, every other round backwards. Each run has
a cache salt of its own (`lab.bench.measuring`), so no way drafts from texts that another one wrote before.

Speed is tokens per second of a request after its first token, over that of plain decoding in the same round; figures
are quartiles over rounds, `by_category` the default's over all prompts of a kind. `best_fixed` may be plain decoding.
The oracle drafts, with the draft model as the default has it, the tokens of plain decoding's texts that will be
accepted, and no others, at the step costs measured here; it is computed, not run. alpha and the cost ratio are measured
as `speculant check-pair` does, on these texts. A head has neither.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speculant.engine import Runtime
from speculant.files import cache_folder
from speculant.lab.bench import (
    COMPLETION,
    DRAFT,
    TARGET,
    WITHOUT_DRAFTS,
    Bench,
    Benchmark,
    BenchRun,
    LengthCosts,
    LoadedPair,
    Mode,
    Text,
    TextReader,
    Way,
    Workload,
    estimate,
    markdown,
    measure_acceptance,
    measure_steps,
    oracle_seconds,
    prompts_of,
    quartiles,
    ratio,
    run_rounds,
    tokens_per_pass,
)
from speculant.lab.inflation import Shape, decoded_model, head_kind, inflate_head, inflated_model, kept_model
from speculant.metrics import SpeculationMetrics
from speculant.models import Checkpoint, load_model, resolve_source
from speculant.params import SamplingParams
from speculant.text import Tokenizer, read_prompts

MODEL = Path(os.environ.get("SPECULANT_REAL_MODELS") or cache_folder("models")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = Path(__file__).with_suffix(".jsonl")
EMBEDDED, HEAD, CONTEXT, FEWEST_TOKENS = "embedded", "head", 512, 2
SHAPES = {
    "target": Shape(1728, 4608, 30, 27, 9),
    "third": Shape(1152, 1536, 30, 18, 6),
    "tenth": Shape(576, 1536, 30, 9, 3),  # SmolLM2's own
}
NOISE = {"55": 0.125, "75": 0.065}  # in standard deviations of a matrix, by alpha
DRAFTS = [*(f"{size}_{alpha}" for size in ("third", "tenth") for alpha in NOISE), EMBEDDED, HEAD]
FIXED, DEFAULT, LOOKUPS = ("2", "4", "8"), "default", "lookups"
LOOKED_UP = ("suffix", "prompt_lookup")  # of the default method
LENGTHS, MOST_ROWS, MOST_TEXTS = (0, 1, 2, 4, 8, 16), 288, 16  # whose costs are measured; texts for alpha and oracle


class Cell(NamedTuple):
    """A place in the table: draft model, type of the target's weights, sequences at a time, temperature."""

    draft: str
    weights: str
    batch: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.draft}, {self.weights}, batch {self.batch}, T = {self.temperature:g}"


def tell(progress: str) -> None:
    """Print a line of progress, with the time."""
    print(time.strftime("%H:%M:%S"), progress, file=sys.stderr, flush=True)


def folders_of(draft: str, arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folders of the target and of a draft model or head, which are made if they are missing."""
    if draft == EMBEDDED:
        return resolve_source("demo", "target"), resolve_source("demo", "draft")
    if not arguments.model.exists():
        sys.exit(f"{arguments.model} is not there; `make real-models` gets it.")
    small = decoded_model(arguments.model)
    target = small if arguments.small else inflated_model(small, SHAPES["target"])
    if draft == HEAD:
        return target, _head(arguments)
    size, alpha = draft.split("_")
    return target, inflated_model(small, SHAPES[size], NOISE[alpha])


def _head(arguments: argparse.Namespace) -> Path:
    """Return the folder of the head, at the target's shape."""
    if arguments.head is None:
        sys.exit("name a head's folder by --head; `speculant train head` makes one.")
    own: Path = arguments.head
    return own if arguments.small else kept_model(own, "1b", lambda folder: inflate_head(own, folder, SHAPES["target"]))


def load(folder: Path, weights: str | None, role: str = "target") -> Checkpoint:
    """Load a model in bfloat16, or rounded to another type."""
    rounding = None if weights == "bfloat16" else weights
    kept = cache_folder("weights")
    return load_model(str(folder), "bfloat16", kernels="auto", role=role, quantization=rounding, weight_cache=kept)


def all_prompts(draft: str, tokenizer: Tokenizer, file: Path) -> list[tuple[str, list[int]]]:
    """Return the prompts of a file by the chat template, and their kinds; openings of code for the embedded pair."""
    if draft == EMBEDDED:
        return [(COMPLETION, prompt) for prompt in prompts_of(COMPLETION, tokenizer, 64)]
    read = read_prompts(file)
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": each.content}]) for each in read]
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [(each.category or "", prompt) for each, prompt in zip(read, tokens, strict=True)]


def engines(pair: LoadedPair, batch: int) -> dict[str, Runtime]:
    """Make the engines; the fixed lengths share one."""
    own, settings = Path(pair.folders[DRAFT]), {"max_model_len": CONTEXT}
    kind = head_kind(own)
    drafting = {"method": kind or "draft_model", "model": DRAFT, "num_speculative_tokens": 8, "draft_length": "fixed"}
    beside = {
        "speculative_config": {"method": "fallback", "members": [*LOOKED_UP, {"method": kind, "model": str(own)}]}
    }
    return {
        "plain": pair.engine(batch, **WITHOUT_DRAFTS, **settings),
        "fixed": pair.engine(batch, drafting, **settings),
        DEFAULT: pair.engine(batch, **(beside if kind else {"draft_model": str(own)}), **settings),
        LOOKUPS: pair.engine(batch, use_speculative_decoding=True, **settings),
    }


def run_all(
    runtimes: Mapping[str, Runtime], prompts: Sequence[list[int]], params: SamplingParams, rounds: int
) -> dict[str, list[BenchRun]]:
    """Run each way once a round, on the round's prompts, after a short warm-up."""
    ways = {name: Way(Bench(runtimes[name]), Mode(params)) for name in ("plain", DEFAULT, LOOKUPS)}
    fixed = Bench(runtimes["fixed"])
    for length in FIXED:
        ways[length] = Way(fixed, Mode(replace(params, speculation={"num_speculative_tokens": int(length)})))
    for way in ways.values():
        way.bench.warm_up(Workload("real text", prompts), way.mode)
    return run_rounds(ways, prompts, rounds, notify=tell)


def measure_costs(runtime: Runtime, prompt: list[int], params: SamplingParams, batch: int) -> LengthCosts:
    """Measure the steps of a batch by the length of its drafts."""
    lengths = [length for length in LENGTHS if batch * (length + 1) <= MOST_ROWS]
    return measure_steps({"draft": lengths}, {"draft": runtime}, prompt, params, 1.0, batch)["draft"]


def oracle(
    runtimes: Mapping[str, Runtime], pair: LoadedPair, texts: Sequence[Text], params: SamplingParams, batch: int
) -> dict[str, Any]:
    """Return the oracle's speed over plain decoding, alpha and the costs."""
    chosen = runtimes[DEFAULT].speculation
    rounding = next((each for each in ("int8", "int4") if f"draft weights in {each}" in chosen), None)
    draft = load(Path(pair.folders[DRAFT]), rounding, "draft")
    target, generator = runtimes["plain"].checkpoint, np.random.default_rng(0)
    sampler, size = target.backend.sampler, target.model.vocab_size
    readers = [TextReader(each.model, sampler, size) for each in (target, draft)]
    found = measure_acceptance(*readers, texts, params)
    costs = measure_costs(runtimes["fixed"], list(texts[0].prompt), params, batch)
    given = [each.given for each in found]
    known = [(generator.random(len(each)) < each).astype(float) for each in given]  # accepted or not, as drawn
    seconds = sum(oracle_seconds(each, costs, costs.lengths[-1], batch) for each in known)
    rest = np.array(costs.other_s)
    return {
        "speed": costs.plain_s / batch * sum(map(len, given)) / seconds,
        "alpha": asdict(estimate([each.overlap for each in found])),
        "cost_ratio": costs.cost_ratio,
        "plain_s": costs.plain_s,
        "V": {str(n): float(v) for n, v in zip(costs.lengths, rest / rest[0], strict=True)},
    }


def compare(cell: Cell, pair: LoadedPair, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell."""
    started, runtimes = time.perf_counter(), engines(pair, cell.batch)
    params = SamplingParams(temperature=cell.temperature, max_tokens=arguments.tokens, min_tokens=FEWEST_TOKENS)
    size = max(arguments.prompts, cell.batch)
    every = itertools.cycle(all_prompts(cell.draft, runtimes["plain"].tokenizer, arguments.file))
    kinds, prompts = zip(*itertools.islice(every, size * arguments.rounds), strict=True)
    load_before, runs = os.getloadavg()[0], run_all(runtimes, prompts, params, arguments.rounds)
    times = {name: [run.figures()["itl_mean_s"] for run in own] for name, own in runs.items()}
    over = {name: ratio(times, "plain", name) for name in times}
    best = max(("plain", *FIXED), key=lambda name: over[name]["median"])
    outputs = itertools.chain(*(run.outputs for run in runs["plain"]))
    texts = [Text(prompt, own) for prompt, own in zip(prompts, outputs, strict=True)]
    bound = None if cell.draft == HEAD else oracle(runtimes, pair, texts[:MOST_TEXTS], params, cell.batch)
    gain = bound["speed"] - 1 if bound else 0.0
    return {
        "cell": cell._asdict(),
        "drafts_by": runtimes[DEFAULT].speculation,
        "plain_tokens_per_s": quartiles([1 / each for each in times["plain"]]),
        "over_plain": {name: each for name, each in over.items() if name != "plain"},
        "best_fixed": best,
        "default_over_best": ratio(times, best, DEFAULT),
        "by_category": by_category(kinds, runs["plain"], runs[DEFAULT]),
        "tokens_per_pass": {name: tokens_per_pass(own) for name, own in runs.items()},
        "acceptance_by_position": {
            name: SpeculationMetrics.total(run.speculation for run in runs[name]).acceptance_by_position
            for name in (*FIXED, DEFAULT)
        },
        **({"oracle": bound} if bound else {}),
        "share_of_the_oracle": (over[DEFAULT]["median"] - 1) / gain if gain > 0.005 else None,
        "as_plain": {name: _share_as(runs["plain"], own) for name, own in runs.items()} if params.greedy else None,
        "load": load_before,
        "seconds": time.perf_counter() - started,
    }


def by_category(kinds: Sequence[str], plain: Sequence[BenchRun], runs: Sequence[BenchRun]) -> dict[str, Any]:
    """Return quartiles of a way's speed over plain decoding's for each kind of prompt."""
    found = dict[str, list[float]]()
    for kind, one, other in zip(kinds, *(_seconds_per_token(each) for each in (plain, runs)), strict=True):
        found.setdefault(kind, []).append(one / other)
    return {kind: quartiles(own) for kind, own in sorted(found.items())}


def _seconds_per_token(runs: Sequence[BenchRun]) -> list[float]:
    """Return each prompt's time per token after the first one; every text has at least two."""
    timings = [timing for run in runs for timing in run.timings]
    return [
        (each.last_token - each.first_token) / (each.num_tokens - 1)
        for each in timings
        if each.first_token is not None and each.last_token is not None
    ]


def _share_as(plain: Sequence[BenchRun], runs: Sequence[BenchRun]) -> float:
    """Return the share of outputs that are plain decoding's."""
    same = [
        a == b for one, other in zip(plain, runs, strict=True) for a, b in zip(one.outputs, other.outputs, strict=True)
    ]
    return sum(same) / len(same)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all cells; a target is loaded once for all that share it."""
    cells, targets = dict[str, Any](), dict[tuple[str, str], Checkpoint]()
    for weights, draft in itertools.product(arguments.weights, sorted(arguments.drafts, key=DRAFTS.index)):
        target, own = folders_of(draft, arguments)
        if (str(target), weights) not in targets:
            targets = {(str(target), weights): load(target, weights)}
        pair = LoadedPair(targets[str(target), weights], {TARGET: str(target), DRAFT: str(own)})
        for batch, temperature in itertools.product(arguments.batches, arguments.temperatures):
            cell = Cell(draft, weights, batch, temperature)
            tell(str(cell))
            cells[str(cell)] = compare(cell, pair, arguments)
            yield {"cells": cells, "summary": summary(list(cells.values()))}


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures over all cells."""
    over_best = [each["default_over_best"]["median"] for each in cells]
    shares = [each["share_of_the_oracle"] for each in cells if each["share_of_the_oracle"] is not None]
    return {
        "least_default_over_plain": min(each["over_plain"][DEFAULT]["median"] for each in cells),
        "cells_at_0.97_of_best_fixed": sum(each >= 0.97 for each in over_best) / len(over_best),
        "median_share_of_the_oracle": float(np.median(shares)) if shares else float("nan"),
    }


def show(figures: Mapping[str, Any]) -> str:
    """Return the table of the cells."""
    names = (*FIXED, DEFAULT, LOOKUPS)
    header = ["cell", "alpha", "c", "plain, tokens/s", *names, "oracle", "default / best fixed", "of oracle", "load"]
    rows = []
    for name, each in figures["cells"].items():
        ratios, share, bound = each["over_plain"], each["share_of_the_oracle"], each.get("oracle")
        rows.append([
            name, f"{bound['alpha']['mean']:.2f}" if bound else "", f"{bound['cost_ratio']:.2f}" if bound else "",
            f"{each['plain_tokens_per_s']['median']:.1f}", *(_spread(ratios[way]) for way in names),
            f"{bound['speed']:.2f}" if bound else "", f"{_spread(each['default_over_best'])}, {each['best_fixed']}",
            "" if share is None else f"{share:.0%}", f"{each['load']:.1f}",
        ])  # fmt: skip
    return (
        markdown(header, rows) + "\n\n" + ", ".join(f"{key} {value:.2f}" for key, value in figures["summary"].items())
    )


def _spread(each: Mapping[str, float]) -> str:
    return f"{each['median']:.2f} ({each['q1']:.2f}-{each['q3']:.2f})"


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="The default is at least 0.98 of plain decoding in every cell and 0.97 of the best fixed length in nine "
    "of ten; it has three quarters of the oracle's gain in the median.",
    measure=measure, rounds=3, show=show,
    options={
        "drafts": {"nargs": "+", "choices": DRAFTS, "default": ["tenth_75", "third_55"]},
        "temperatures": [0.0], "batches": [1],
        "weights": {"nargs": "+", "choices": ["bfloat16", "int8", "int4"], "default": ["bfloat16"]},
        "prompts": {"type": int, "default": 4, "help": "of a round; at least a batch"}, "tokens": 64,
        "model": {"type": Path, "default": MODEL, "help": "SmolLM2's GGUF file"},
        "head": {"type": Path, "default": None, "help": "a head's folder, for the draft \"head\""},
        "small": {"action": "store_true", "help": "keep the target's own size"},
        "file": {"type": Path, "default": PROMPTS, "help": "of prompts, in the form of Spec-Bench"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
