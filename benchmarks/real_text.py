"""Real text: plain decoding, fixed lengths of a draft model, the default with and without it, and a computed oracle.

--pair takes any two models: folders, GGUF files, or names of tools/real_models.py (`make real-models`), with weights as
they are stored. The other pairs are made. Their target is SmolLM2-135M-Instruct, inflated to 1.04 billion parameters:
the texts of the small model at the cost of the large one. Draft models are SmolLM2 with noise on its weights:
"third_55" costs about a third of the target's pass, and 0.55 of its tokens are accepted. "embedded" is the embedded
pair on openings of code. "head" is a head of SmolLM2's own (--head FOLDER, made by `speculant train head`), inflated as
well; the default has it beside its lookups. All are made once and kept in ~/.cache/speculant/inflated. With --small,
the target has SmolLM2's own size.

Prompts are our own, of ten of Spec-Bench's kinds (arXiv 2401.07851: of MT-bench's categories writing, roleplay, coding,
extraction and stem, and the five other tasks), in real_text.jsonl, by the model's chat template if it has one. A round
has the next ones. A text ends where the model ends it. In each round every way runs once, the default first, every
other round backwards. Each run has a cache salt of its own (`lab.bench.measuring`), so no way drafts from texts that
another one wrote before. With --llama-cpp, llama.cpp runs before plain decoding in each round: the target's GGUF file
without drafts, after the round's first prompt, or in a batch after made-up ones.

Speed is tokens per second of a request after its first token, over that of plain decoding in the same round; figures
are quartiles over rounds, `by_category` the default's over all prompts of a kind. `best_fixed` may be plain decoding.

Both oracles are computed, not run. They draft with the draft model as the default has it, along plain decoding's texts,
at the step costs measured here, and choose the best length for each step. `oracle`, the bar, knows how probably each
token is accepted: at T > 0 sum min(p, q) over the vocabulary; at T = 0 the share accepted among the tokens of which the
draft is about as sure, in ten bins over all texts. `oracle_of_outcomes` knows which tokens are accepted. Neither looks
tokens up. alpha and the cost ratio c are measured as `speculant check-pair` does, on these texts. V is the cost of a
pass by its rows per sequence over that of one. A head has none of these.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[1]))  # for `tools` and the script's neighbours, however it is started

from benchmarks.peers.base import FILE, PLAIN, Job, Mode as PeerMode, Pair as Files, Workload as PeerWorkload
from benchmarks.peers.llama_cpp import LlamaCpp
from tools import real_models

from speculant.config import EngineConfig
from speculant.engine import DraftLoader, Runtime
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
    calibrated,
    estimate,
    markdown,
    measure_acceptance,
    measure_steps,
    oracle_seconds,
    prompts_of,
    quartiles,
    ratio,
    run_rounds,
    shown,
    tokens_per_pass,
)
from speculant.lab.inflation import Shape, decoded_model, head_kind, inflate_head, inflated_model, kept_model
from speculant.metrics import SpeculationMetrics
from speculant.models import Checkpoint, load_model, resolve_source
from speculant.params import SamplingParams
from speculant.text import Tokenizer, read_prompts

Array = NDArray[np.float64]
MODEL = real_models.folder() / real_models.MODELS["smollm2"].file
PROMPTS = Path(__file__).with_suffix(".jsonl")
EMBEDDED, HEAD, CONTEXT, FEWEST_TOKENS = "embedded", "head", 512, 2
STORED, BESIDE = "as stored", "llama.cpp"
SHAPES = {
    "target": Shape(1728, 4608, 30, 27, 9),
    "third": Shape(1152, 1536, 30, 18, 6),
    "tenth": Shape(576, 1536, 30, 9, 3),  # SmolLM2's own
}
NOISE = {"55": 0.125, "75": 0.065}  # in standard deviations of a matrix, by alpha
DRAFTS = [*(f"{size}_{alpha}" for size in ("third", "tenth") for alpha in NOISE), EMBEDDED, HEAD]
FIXED, DEFAULT, LOOKUPS = ("2", "4", "8"), "default", "lookups"
LOOKED_UP = ("suffix", "prompt_lookup")  # of the default method
MADE = ("tenth_75", "third_55")  # the usual pairs
ROUNDED = ("int8", "int4")
LENGTHS, MOST_ROWS, MOST_TEXTS = (0, 1, 2, 4, 8, 16), 288, 40  # whose costs are measured; texts for alpha and oracles
ROOM = 128  # positions after a prompt for which costs are measured


class Cell(NamedTuple):
    """A place in the table: draft model or pair, type of the target's weights, sequences at a time, temperature."""

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


def place_of(model: str) -> Path:
    """Return the folder or the file of a model of --pair."""
    known = real_models.MODELS.get(model)
    place = Path(model) if known is None else real_models.folder() / known.file
    if not place.exists():
        names = ", ".join(real_models.MODELS)
        fix = f"name a folder, a GGUF file, or one of {names}" if known is None else "`make real-models` gets it"
        sys.exit(f"{place} is not there; {fix}.")
    return place


def pairs(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Path, Path]]:
    """Return the name of each draft model or pair, the type of the weights, and the places of target and draft."""
    drafts = arguments.drafts or (() if arguments.pair else MADE)
    for weights, draft in itertools.product(arguments.weights, sorted(drafts, key=DRAFTS.index)):
        yield draft, weights, *folders_of(draft, arguments)
    for names in arguments.pair:
        target, draft = map(place_of, names)
        yield " + ".join(Path(name).name for name in names), STORED, target, draft


def dtype_of(weights: str) -> str:
    """Return the type in which an engine computes."""
    return "auto" if weights == STORED else "bfloat16"


def load(folder: Path, weights: str) -> Checkpoint:
    """Load a target in bfloat16, rounded to another type, or as it is stored."""
    rounding = weights if weights in ROUNDED else None
    kept = cache_folder("weights")
    return load_model(str(folder), dtype_of(weights), kernels="auto", quantization=rounding, weight_cache=kept)


def all_prompts(draft: str, tokenizer: Tokenizer, file: Path) -> list[tuple[str, list[int]]]:
    """Return the prompts of a file by the chat template, and their kinds; openings of code for the embedded pair."""
    if draft == EMBEDDED:
        return [(COMPLETION, prompt) for prompt in prompts_of(COMPLETION, tokenizer, 64)]
    return [(each.category or "", _encode(tokenizer, each.content)) for each in read_prompts(file)]


def _encode(tokenizer: Tokenizer, content: Any) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(str(content))
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}])
    return tokenizer.encode(text, add_special_tokens=False)


def kind_of(pair: LoadedPair) -> str | None:
    """Return the method of the pair's head; None = it has a draft model."""
    own = Path(pair.folders[DRAFT])
    return head_kind(own) if own.is_dir() else None


def engines(pair: LoadedPair, batch: int, **settings: Any) -> dict[str, Runtime]:
    """Make the engines; the fixed lengths share one."""
    own, kind = pair.folders[DRAFT], kind_of(pair)
    drafting = {"method": kind or "draft_model", "model": DRAFT, "num_speculative_tokens": 8, "draft_length": "fixed"}
    beside = {"speculative_config": {"method": "fallback", "members": [*LOOKED_UP, {"method": kind, "model": own}]}}
    return {
        "plain": pair.engine(batch, **WITHOUT_DRAFTS, **settings),
        "fixed": pair.engine(batch, drafting, **settings),
        DEFAULT: pair.engine(batch, **(beside if kind else {"draft_model": own}), **settings),
        LOOKUPS: pair.engine(batch, use_speculative_decoding=True, find_drafts=False, **settings),
    }


def run_all(
    runtimes: Mapping[str, Runtime],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    rounds: int,
    beside: LlamaCppRuns | None,
) -> dict[str, list[BenchRun]]:
    """Run each way once a round, on the round's prompts, after a short warm-up; beside: comes before plain decoding."""
    ways = {name: Way(Bench(runtimes[name]), Mode(params)) for name in (DEFAULT, "plain", LOOKUPS)}
    fixed = Bench(runtimes["fixed"])
    for length in FIXED:
        ways[length] = Way(fixed, Mode(replace(params, speculation={"num_speculative_tokens": int(length)})))
    for way in ways.values():
        way.bench.warm_up(Workload("real text", prompts), way.mode)

    def notify(name: str) -> None:
        if name == "plain" and beside is not None:
            beside.run()
        tell(name)

    return run_rounds(ways, prompts, rounds, notify=notify)


class LlamaCppRuns:
    """Runs llama.cpp without drafts on the target's file, once a round after that round's prompts.

    times: seconds per token of a request, by round.
    """

    def __init__(self, programs: LlamaCpp, pair: LoadedPair, prompts: Sequence[list[list[int]]], tokens: int) -> None:
        self._programs, self._prompts, self._tokens = programs, iter(prompts), tokens
        self._files = Files(pair.folders[TARGET], pair.folders[DRAFT])
        self._tokenizer = Tokenizer.load(Path(pair.folders[TARGET]))
        self.times = list[float]()

    def run(self) -> None:
        """Run the next round."""
        tell(BESIDE)
        own = next(self._prompts)
        texts = [self._tokenizer.decode(each, skip_special_tokens=False) for each in own]
        workload = PeerWorkload(own, texts, [], self._tokens)
        job = Job(self._files, FILE, [PeerMode(PLAIN)], workload, torch.get_num_threads())
        (found,) = self._programs.run(job).values()
        self.times.append(len(own) / found.tokens_per_s)


def llama_cpp(
    pair: LoadedPair, prompts: Sequence[list[int]], batch: int, arguments: argparse.Namespace
) -> LlamaCppRuns | None:
    """Return what runs llama.cpp; None = it isn't asked for, or the target is no file."""
    if arguments.llama_cpp is None or not Path(pair.folders[TARGET]).is_file():
        return None
    programs, size = LlamaCpp(arguments.llama_cpp), len(prompts) // arguments.rounds
    if missing := programs.missing():
        sys.exit(f"{missing}; {programs.install}.")
    rounds = [list(prompts[first : first + batch]) for first in range(0, len(prompts), size)]
    return LlamaCppRuns(programs, pair, rounds, arguments.tokens)


def measure_costs(runtime: Runtime, prompt: list[int], params: SamplingParams, batch: int) -> LengthCosts:
    """Measure the steps of a batch by the length of its drafts."""
    lengths = [length for length in LENGTHS if batch * (length + 1) <= MOST_ROWS]
    return measure_steps({"draft": lengths}, {"draft": runtime}, prompt, params, 1.0, batch)["draft"]


def readers_of(runtime: Runtime, pair: LoadedPair, dtype: str) -> tuple[TextReader, TextReader]:
    """Return readers of texts: the target, and the draft model in the type that the engines have."""
    target, own = runtime.checkpoint, pair.folders[DRAFT]
    config = EngineConfig.from_arguments(model=pair.folders[TARGET], draft_model=own, dtype=dtype)
    loader = DraftLoader(config, target, runtime.tokenizer, (str(target.folder), target.kernels, config.dtype))
    draft, sampler, size = loader.load(own), target.backend.sampler, target.model.vocab_size
    vocabulary = loader.vocabulary_of(draft)
    split = None if vocabulary is None else vocabulary.split
    return TextReader(target.model, sampler, size), TextReader(draft, sampler, size, split)


def oracles(
    runtimes: Mapping[str, Runtime], pair: LoadedPair, texts: Sequence[Text], params: SamplingParams, cell: Cell
) -> dict[str, Any]:
    """Return both oracles' speeds over plain decoding; alpha and the costs."""
    readers = readers_of(runtimes["plain"], pair, dtype_of(cell.weights))
    found = measure_acceptance(*readers, texts, params)
    costs = measure_costs(runtimes["fixed"], list(texts[0].prompt), params, cell.batch)
    given, rest = [each.given for each in found], np.array(costs.other_s)
    plain_s = costs.plain_s / cell.batch * sum(map(len, given))

    def speed(acceptance: Sequence[Array]) -> float:
        return plain_s / sum(oracle_seconds(each, costs, costs.lengths[-1], cell.batch) for each in acceptance)

    generator = np.random.default_rng(0)
    known = [(generator.random(len(each)) < each).astype(float) for each in given]  # accepted or not, as drawn
    sure = [readers[1].confidence(text)[1:] for text in texts] if params.greedy else []
    return {
        "oracle": {
            "speed": speed(as_sure(sure, given) if params.greedy else [each.overlap for each in found]),
            "alpha": asdict(estimate([each.overlap for each in found])),
            "cost_ratio": costs.cost_ratio,
            "plain_s": costs.plain_s,
            "V": {str(n): float(v) for n, v in zip(costs.lengths, rest / rest[0], strict=True)},
        },
        "oracle_of_outcomes": speed(known),
    }


def as_sure(sure: Sequence[Array], accepted: Sequence[Array]) -> list[Array]:
    """Return the expected acceptance along each text, by the draft's probabilities and the outcomes of all texts."""
    shares = calibrated(np.concatenate(sure), np.concatenate(accepted))
    return np.split(shares, np.cumsum([len(each) for each in accepted])[:-1])


def speeds_of(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the speeds of all ways, from their seconds per token in each round."""
    over = {name: ratio(times, "plain", name) for name in times}
    best = max(("plain", *FIXED), key=lambda name: over[name]["median"])
    return {
        "plain_tokens_per_s": quartiles([1 / each for each in times["plain"]]),
        "over_plain": {name: each for name, each in over.items() if name != "plain"},
        "best_fixed": best,
        "default_over_best": ratio(times, best, DEFAULT),
    }


def compare(cell: Cell, pair: LoadedPair, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell."""
    started, size = time.perf_counter(), math.ceil(arguments.prompts / cell.batch) * cell.batch
    every = itertools.cycle(all_prompts(cell.draft, Tokenizer.load(Path(pair.folders[TARGET])), arguments.file))
    kinds, prompts = zip(*itertools.islice(every, size * arguments.rounds), strict=True)
    context = max(CONTEXT, max(map(len, prompts)) + max(arguments.tokens, ROOM))
    runtimes = engines(pair, cell.batch, max_model_len=context, dtype=dtype_of(cell.weights))
    params = SamplingParams(temperature=cell.temperature, max_tokens=arguments.tokens, min_tokens=FEWEST_TOKENS)
    beside = llama_cpp(pair, prompts, cell.batch, arguments)
    load_before, runs = os.getloadavg()[0], run_all(runtimes, prompts, params, arguments.rounds, beside)
    times = {name: [run.figures()["itl_mean_s"] for run in own] for name, own in runs.items()}
    speeds = speeds_of(times | ({BESIDE: beside.times} if beside else {}))
    outputs = itertools.chain(*(run.outputs for run in runs["plain"]))
    texts = [Text(prompt, own) for prompt, own in zip(prompts, outputs, strict=True)][:MOST_TEXTS]
    bounds = {} if kind_of(pair) else oracles(runtimes, pair, texts, params, cell)
    gain = bounds["oracle"]["speed"] - 1 if bounds else 0.0
    return {
        "cell": cell._asdict(),
        "drafts_by": runtimes[DEFAULT].speculation,
        **speeds,
        "by_category": by_category(kinds, runs["plain"], runs[DEFAULT]),
        "tokens_per_pass": {name: tokens_per_pass(own) for name, own in runs.items()},
        "acceptance_by_position": {
            name: SpeculationMetrics.total(run.speculation for run in runs[name]).acceptance_by_position
            for name in (*FIXED, DEFAULT)
        },
        **bounds,
        "share_of_the_oracle": (speeds["over_plain"][DEFAULT]["median"] - 1) / gain if gain > 0.005 else None,
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


def worst_kind(cell: Mapping[str, Any]) -> tuple[float, str]:
    """Return the least speed of the default over plain decoding by kind of prompt, and the kind."""
    return min((own["median"], kind) for kind, own in cell["by_category"].items())


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all cells; a target is loaded once for all that share it."""
    cells, targets = dict[str, Any](), dict[tuple[Path, str], Checkpoint]()
    for draft, weights, target, own in pairs(arguments):
        if (target, weights) not in targets:
            targets = {(target, weights): load(target, weights)}
        pair = LoadedPair(targets[target, weights], {TARGET: str(target), DRAFT: str(own)})
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
        "worst_kind": min(map(worst_kind, cells))[0],
        "cells_at_0.97_of_best_fixed": sum(each >= 0.97 for each in over_best) / len(over_best),
        "median_share_of_the_oracle": float(np.median(shares)) if shares else float("nan"),
    }


def show(figures: Mapping[str, Any]) -> str:
    """Return the table of the cells."""
    names = (*FIXED, DEFAULT, LOOKUPS, BESIDE)
    header = [
        "cell", "plain, tokens/s", *names, "worst kind", "default / best fixed", "tokens a pass",
        "alpha", "c", "V(2), V(3), V(5), V(9)", "oracle of outcomes", "oracle", "of oracle", "load",
    ]  # fmt: skip
    rows = [[name, *_row(each, names)] for name, each in figures["cells"].items()]
    return (
        markdown(header, rows) + "\n\n" + ", ".join(f"{key} {value:.2f}" for key, value in figures["summary"].items())
    )


def _row(each: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    ratios, (least, kind) = each["over_plain"], worst_kind(each)
    return [
        f"{each['plain_tokens_per_s']['median']:.1f}",
        *(shown(ratios[way]) if way in ratios else "" for way in names),
        f"{least:.2f}, {kind}", f"{shown(each['default_over_best'])}, {each['best_fixed']}",
        f"{each['tokens_per_pass'][DEFAULT]:.2f}", *(_bounds(each) if "oracle" in each else [""] * 6),
        f"{each['load']:.1f}",
    ]  # fmt: skip


def _bounds(each: Mapping[str, Any]) -> list[str]:
    bound, share = each["oracle"], each["share_of_the_oracle"]
    return [
        f"{bound['alpha']['mean']:.2f}",
        f"{bound['cost_ratio']:.2f}",
        ", ".join(f"{bound['V'][length]:.2f}" for length in ("1", "2", "4", "8") if length in bound["V"]),
        f"{each['oracle_of_outcomes']:.2f}",
        f"{bound['speed']:.2f}",
        "" if share is None else f"{share:.0%}",
    ]


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="The default is at least 0.98 of plain decoding in every cell and for every kind, and 0.97 of the best "
    "fixed length in nine of ten cells; it has three quarters of the oracle's gain.",
    measure=measure, rounds=3, show=show,
    options={
        "pair": {
            "nargs": 2, "action": "append", "default": [], "metavar": ("TARGET", "DRAFT"),
            "help": "folders, GGUF files or names of tools/real_models.py; may be repeated",
        },
        "drafts": {"nargs": "+", "choices": DRAFTS, "help": f"made ones; without --pair, {' and '.join(MADE)}"},
        "temperatures": [0.0, 0.8], "batches": [1, 8],
        "weights": {
            "nargs": "+", "choices": ["bfloat16", *ROUNDED], "default": ["bfloat16"], "help": "of the made targets",
        },
        "prompts": {"type": int, "default": 10, "help": "of a round; rounded up to whole batches"}, "tokens": 64,
        "llama_cpp": {"type": Path, "default": None, "help": "the folder of llama.cpp's programs"},
        "model": {"type": Path, "default": MODEL, "help": "SmolLM2's GGUF file"},
        "head": {"type": Path, "default": None, "help": "a head's folder, for the draft \"head\""},
        "small": {"action": "store_true", "help": "keep the target's own size"},
        "file": {"type": Path, "default": PROMPTS, "help": "of prompts, in the form of Spec-Bench"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
