"""What drafters without a model cost: microseconds to propose and observe a token, and the memory of a full store.

    python benchmarks/lookup_cost.py [--rounds 5] [--quick]

Each method drafts its usual length behind histories of 1k, 8k and 32k tokens and is told of one token a step. That is
the dearest case: a step that gains several tokens costs less for each. "code" is Python's standard library in tokens of
the embedded model, "repeated" the same 500 tokens of it over and over, "random" never matches. Methods take turns.
Beside the steps: what a token of a prompt costs to read. "suffix, plain Python" is what runs without the native
library. The store gets 20,000 requests, twice its bound; "suffix, full store" drafts beside it. --quick keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measuring import spread, write

from speculant.drafting.base import Drafter
from speculant.drafting.lookup import ngram, prompt_lookup, suffix
from speculant.drafting.lookup.ngram import NgramDrafter
from speculant.drafting.lookup.recent_match import LookupDrafter, LookupOptions
from speculant.drafting.lookup.suffix import SuffixDrafter
from speculant.kernels.suffix_index import SuffixAutomaton
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.models.source import resolve_source
from speculant.params import SamplingParams
from speculant.text.tokenizer import Tokenizer
from speculant.types import CommittedRows, Request

HISTORIES, STEPS, VOCABULARY = (1024, 8192, 32768), 400, 128_000
REQUESTS, TEXT = 20_000, 48  # that the store gets, and tokens of each
PREDICTED = (
    "At 32k tokens of code a step takes 20 us with ngram, 10 with prompt_lookup, 20 with suffix, 45 without the native "
    "library, within 1.5 times those at 1k. The store's 524,288 tokens take 60 MB of its 95 MiB."
)


def subjects(stocked: SuffixDrafter) -> dict[str, tuple[Callable[[], Drafter], int]]:
    """Return what is measured, and the tokens that each drafts."""
    options = suffix.SuffixOptions()
    return {
        "ngram": (lambda: NgramDrafter(ngram.NgramOptions()), ngram.METHOD.default_length),
        "prompt_lookup": (lambda: LookupDrafter(LookupOptions()), prompt_lookup.METHOD.default_length),
        "suffix": (lambda: SuffixDrafter(options), suffix.METHOD.default_length),
        "suffix, full store": (lambda: stocked, suffix.METHOD.default_length),
        "suffix, plain Python": (lambda: SuffixDrafter(options, SuffixAutomaton), suffix.METHOD.default_length),
    }


def make_request(seq_id: int, prompt: Sequence[int], output: Sequence[int] = ()) -> Request:
    """Make a request that no engine runs."""
    metrics = RequestMetrics(TimingMetrics(arrival=0.0))
    params, ends = SamplingParams(), frozenset[int]()
    return Request(seq_id, str(seq_id), 0, tuple(prompt), params, 0, ends, metrics, tokens=[*prompt, *output])


def measure(drafter: Drafter, length: int, text: Sequence[int], history: int) -> tuple[float, list[float]]:
    """Return microseconds per token of the prompt, and those of each step."""
    request = make_request(1, text[:history])
    drafter.begin(request)
    started = time.perf_counter()
    drafter.observe(request, CommittedRows(0, request.tokens[:-1]))
    reading = (time.perf_counter() - started) / history
    steps = []
    for token in text[history : history + STEPS]:
        started = time.perf_counter()
        drafter.propose([request], [length])
        spent = time.perf_counter() - started
        request.extend([token])
        rows = CommittedRows(len(request.tokens) - 2, request.tokens[-2:-1], [token])
        started = time.perf_counter()
        drafter.observe(request, rows)
        steps.append(1e6 * (spent + time.perf_counter() - started))
    drafter.end(request)
    return 1e6 * reading, steps


def run_all(stocked: SuffixDrafter, texts: dict[str, list[int]], rounds: int) -> dict[str, Any]:
    """Measure every method on every text and history, in turn."""
    readings, steps = dict[str, list[float]](), dict[str, list[float]]()
    for _ in range(rounds):
        for kind, text in texts.items():
            for history in HISTORIES:
                for name, (make, length) in subjects(stocked).items():
                    reading, taken = measure(make(), length, text, history)
                    case = f"{name}; {kind}, {history}"
                    readings.setdefault(case, []).append(reading)
                    steps.setdefault(case, []).extend(taken)
    return {
        case: {"step_us": spread(taken), "prompt_token_us": spread(readings[case])} for case, taken in steps.items()
    }


def make_texts(longest: int) -> dict[str, list[int]]:
    """Return the three kinds of text, each of at least `longest` tokens."""
    code, tokenizer = list[int](), Tokenizer.from_folder(resolve_source("demo"))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(code) < longest:
            code += tokenizer.encode(path.read_text(encoding="utf-8"))
    generator = random.Random(0)
    return {
        "code": code,
        "repeated": code[:500] * (longest // 500 + 1),
        "random": [generator.randrange(VOCABULARY) for _ in range(longest)],
    }


def stock(drafter: SuffixDrafter, tokens: Sequence[int], requests: int) -> dict[str, Any]:
    """Let requests finish, more than the store holds; return its size and what a request's end cost."""
    before, ends = resident_bytes(), list[float]()
    generator, most = random.Random(0), 0
    for number in range(requests):
        start = generator.randrange(len(tokens) - TEXT)
        request = make_request(number, tokens[start : start + 8], tokens[start + 8 : start + TEXT])
        drafter.begin(request)
        request.finish_reason = "stop"
        started = time.perf_counter()
        drafter.end(request)
        ends.append(1e6 * (time.perf_counter() - started))
        most = max(most, drafter.store.num_bytes if number % 100 == 0 else 0)
    return {
        "requests_given": requests,
        "requests_held": drafter.store.num_texts,
        "tokens_held": drafter.store.num_tokens,
        "most_bytes": most,
        "bound_bytes": 190 * suffix.SuffixOptions().suffix_decoding_corpus_tokens,
        "resident_bytes_more": resident_bytes() - before,
        "end_of_a_request_us": {**spread(ends), "most": max(ends)},
    }


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


def main() -> None:
    """Measure and write results/lookup_cost.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds, a small store; nothing is written")
    arguments = parser.parse_args()
    texts = make_texts(4 * HISTORIES[-1])
    stocked = SuffixDrafter(suffix.SuffixOptions())
    store = stock(stocked, texts["code"], 1000 if arguments.quick else REQUESTS)
    seen = {"store": store, **run_all(stocked, texts, 2 if arguments.quick else arguments.rounds)}
    if arguments.quick:
        print(json.dumps(seen, indent=2))
    else:
        write("lookup_cost", PREDICTED, seen)


if __name__ == "__main__":
    main()
