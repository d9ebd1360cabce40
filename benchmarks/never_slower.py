"""Every drafter on three kinds of text: fixed lengths beside the adaptive one and plain decoding.

    python benchmarks/never_slower.py [--texts edit] [--methods suffix] [--rounds 5] [--batch 1] [--shape 1b]

Texts, greedy: "edit" repeats a prompt of code with changes; "completion" continues openings of code; "unseen" continues
random tokens; "held-out" continues pieces of those files of Python's standard library that no model or head was trained
on. Engines run in turn, round by round, on prompts of the round's own, so that no store of finished requests
knows the answers; the first rounds warm up. A round is short, so that what other programs do hits some rounds and not
some engines: by default one batch. A figure is the median over rounds of tokens per second over those of plain
decoding in the same round. `adaptive_over_best` is the adaptive length over the best fixed one, plain too. "default" is
what an engine does if nothing but the two models is named. With --shape, both models of the embedded pair are inflated:
text and acceptance stay, costs are those of the shape.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from measuring import keep, spread

from speculant.config import EngineConfig
from speculant.engine.build import Runtime, build_around
from speculant.lab.bench.workloads import code_prompt
from speculant.lab.inflation.pair import SHAPES, inflated_pair
from speculant.lab.training.corpus import read_corpus, standard_library
from speculant.metrics import SpeculationMetrics
from speculant.models.source import resolve_source
from speculant.models.weights.load import Checkpoint, load_model
from speculant.params import SamplingParams
from speculant.text.tokenizer import Tokenizer

HELD_OUT = "held-out"
TEXTS = ("edit", "completion", "unseen", HELD_OUT)
LENGTHS = (1, 2, 4, 6, 8, 12)
DRAFT, TARGET = "the draft", "the target"  # models, whose folders take these names' places
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"model": DRAFT, "method": "draft_model"},
    "as large as the target": {"model": TARGET, "method": "draft_model"},
    "suffix": {"method": "suffix"},
    "prompt_lookup": {"method": "prompt_lookup"},
    "ngram": {"method": "ngram"},
    "token_recycling": {"method": "token_recycling"},
    "fallback": {"method": "fallback"},
    "default": {"model": DRAFT},
    "random": {"method": "random"},
}
PREDICTED = (
    "Adaptive is at least 0.97 of plain decoding, and of the best fixed length, everywhere. Lookup drafters gain 2 "
    "on edits and nothing on unseen text."
)


class Pair(NamedTuple):
    """A target that is loaded, which all engines share, and the folders of both models."""

    target: Checkpoint
    folders: dict[str, str]

    @classmethod
    def load(cls, shape: str | None = None) -> Pair:
        """Load the embedded target, or the same at a larger shape."""
        pair = [resolve_source("demo", "target"), resolve_source("demo", "draft")]
        target, draft = pair if shape is None else inflated_pair(shape)
        return cls(load_model(str(target), "bfloat16", kernels="auto"), {TARGET: str(target), DRAFT: str(draft)})

    def engine(self, batch: int, config: dict[str, Any] | None, **arguments: Any) -> Runtime:
        """Make an engine; config None = plain."""
        chosen: dict[str, Any] = {"use_speculative_decoding": False}
        if config is not None:
            chosen = {"speculative_config": {key: self.folders.get(str(value), value) for key, value in config.items()}}
        settings = {"dtype": "bfloat16", "max_num_seqs": batch, "max_model_len": 1024, **chosen, **arguments}
        return build_around(EngineConfig.from_arguments(model=self.folders[TARGET], **settings), self.target)


class Outcome(NamedTuple):
    """What a run took and made."""

    seconds: float
    decode_s: float  # of all requests, first tokens aside
    passes: int
    speculation: SpeculationMetrics


def prompts(kind: str, runtime: Runtime, count: int) -> list[list[int]]:
    """Return prompts of one kind of text."""
    tokenizer = runtime.tokenizer
    if kind == "completion":
        return [code_prompt(tokenizer, index) for index in range(count)]
    if kind == "unseen":
        return [[(7919 * (index + 1) * (place + 3)) % 900 + 20 for place in range(64)] for index in range(count)]
    if kind == HELD_OUT:
        return held_out(tokenizer, count)
    made = []
    for index in range(count):
        code = code_prompt(tokenizer, index, 160)
        made.append([*code, *tokenizer.encode("\n\n\n", add_special_tokens=False), *code[: len(code) // 2]])
    return made


def held_out(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return the beginnings of pieces of held-out files, each from another place."""
    documents, found = read_corpus([standard_library()]).held_out, list[list[int]]()
    for index in range(count):
        lines = documents[index % len(documents)].text.splitlines(keepends=True)
        first = random.Random(f"held-out-{index}").randrange(max(1, len(lines) - 20))
        found.append(tokenizer.encode("".join(lines[first : first + 60]))[:64])
    return found


def run(runtime: Runtime, batch: Sequence[Sequence[int]], tokens: int) -> Outcome:
    """Generate so many tokens after each prompt, greedily."""
    engine, params = runtime.engine, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    before, started = engine.metrics.steps, time.perf_counter()
    requests = [engine.add_request(prompt, params, f"{before}-{index}")[0] for index, prompt in enumerate(batch)]
    while engine.has_unfinished():
        engine.step()
    seconds, total = time.perf_counter() - started, SpeculationMetrics()
    for request in requests:
        total.add(request.metrics.speculative_decoding)
    decode_s = sum(request.metrics.timing.decode_s for request in requests)
    return Outcome(seconds, decode_s, engine.metrics.steps - before, total)


def measure(arguments: argparse.Namespace, pair: Pair, kind: str, name: str) -> dict[str, Any]:
    """Compare the lengths of one method on one kind of text."""
    base, batch = METHODS[name], arguments.batch
    engines: dict[str, Runtime] = {"plain": pair.engine(batch, None)}
    for length in arguments.lengths:
        fixed = {**base, "num_speculative_tokens": length, "draft_length": "fixed"}
        engines[str(length)] = pair.engine(batch, fixed)
    engines["adaptive"] = pair.engine(batch, base)
    size, warm_up = arguments.prompts or batch, max(1, arguments.rounds // 4)
    every = prompts(kind, engines["plain"], size * (warm_up + arguments.rounds))
    runs: dict[str, list[Outcome]] = {label: [] for label in engines}
    for first in range(0, len(every), size):
        for label, runtime in engines.items():
            outcome = run(runtime, every[first : first + size], arguments.tokens)
            if first >= size * warm_up:
                runs[label].append(outcome)
    times = {label: [outcome.seconds for outcome in own] for label, own in runs.items()}
    speeds = {
        label: [plain / own for plain, own in zip(times["plain"], times[label], strict=True)]
        for label in engines
        if label != "plain"
    }
    best = max(["plain", *map(str, arguments.lengths)], key=lambda label: statistics.median(speeds.get(label, [1.0])))
    over = [fixed / own for fixed, own in zip(times[best], times["adaptive"], strict=True)]
    tokens = arguments.tokens * size * arguments.rounds
    return {
        "drafts_by": engines["adaptive"].speculation,
        "speed": {label: spread(values) for label, values in speeds.items()},
        "tokens_per_pass": {label: tokens / sum(each.passes for each in own) for label, own in runs.items()},
        "alpha": {label: alpha(own) for label, own in runs.items() if label != "plain"},
        "best_fixed": best,
        "adaptive_over_best": spread(over),
    }


def alpha(runs: Sequence[Outcome]) -> float | None:
    """Return accepted over tested tokens; None = nothing was drafted."""
    total = SpeculationMetrics()
    for outcome in runs:
        total.add(outcome.speculation)
    return total.acceptance_rate if total.num_tested_tokens else None


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=["edit", "completion", "unseen"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, help="of a round; a batch of them by default")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    pair = Pair.load(arguments.shape)
    shape = f"_{arguments.shape}" if arguments.shape else ""
    title = f"never_slower{shape}_batch_{arguments.batch}"
    seen: dict[str, dict[str, Any]] = {kind: {} for kind in arguments.texts}
    for kind, found in seen.items():
        for name in arguments.methods:
            found[name] = measure(arguments, pair, kind, name)
            keep(title, PREDICTED, seen)  # a later one may fail
    print(json.dumps(seen, indent=2))


if __name__ == "__main__":
    main()
