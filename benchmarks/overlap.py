"""What drafting while the target verifies would gain, by the number of cores (arXiv 2408.11850, 2603.03251).

While the target verifies a draft on n - m of n cores, the draft model goes on from a guess of the outcome on m. If the
guess is right, the next pass finds its draft ready; else it is made as usual, on all cores. `one` guesses that all
tokens are accepted, and the draft model's likeliest token after them. `each` has a guess for every number of accepted
tokens: where the first of the others was rejected, the draft model's second token. Its passes have a row for each.
`right` is a bound: one guess that is always right.

Measured: passes and drafted tokens with one thread and with two, of which the least times count; and both models at
once, one thread each. These are Python threads, which release the GIL in native calls. The draft model is as the engine
loads it. Hits are those of greedy texts: where the target's token is among the draft model's.

Modelled: an operation takes s + (t - s) / n on n cores, where t is its time on one core, and s follows from that on
two. It never takes less than its bytes at the bandwidth of the socket, which both models share. Each way has its best
length, and the overlap its best m. The gain is the tokens per second over those of one after the other.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))  # for the script's neighbours, however it is started

from benchmarks.real_text import PROMPTS, STORED, all_prompts, load, place_of

from speculant.cache import slotted_cache
from speculant.config import EngineConfig
from speculant.drafting import grow_chains
from speculant.engine import DraftLoader
from speculant.kernels import open_kernels
from speculant.lab.bench import (
    DRAFT,
    TARGET,
    WITHOUT_DRAFTS,
    Bench,
    Benchmark,
    LoadedPair,
    Mode,
    Text,
    TextReader,
    Workload,
    markdown,
    quartiles,
    timed,
)  # fmt: skip
from speculant.lengths import make_sequence, usual_tokens
from speculant.models import Chain, SequenceInput, build_batch
from speculant.params import SamplingParams
from speculant.sampling import MostLikely
from speculant.types import DraftTree

BEFORE, READ = 128, 2**29  # tokens before the rows; bytes that a probe of the bandwidth reads
LENGTHS, CORES, BANDWIDTHS = (1, 2, 3, 4, 6, 8), (2, 4, 8, 16, 32, 64), (26, 50, 100, 300)  # GB/s
KINDS, PAYS, MOST_CORES = ("one", "each", "right"), 1.05, 128
GREEDY = SamplingParams(temperature=0, max_tokens=None)
Run = Callable[[], object]


class Cost(NamedTuple):
    """Seconds of an operation on one core and on two, and the bytes that it reads."""

    one: float
    two: float
    bytes: float

    def on(self, cores: int, bandwidth: float) -> float:
        """Return the seconds on some cores of a socket with this bandwidth."""
        serial = min(max(0.0, 2 * self.two - self.one), self.one)
        return max(serial + (self.one - serial) / cores, self.bytes / bandwidth)


class Guess(NamedTuple):
    """The tokens that a cycle commits on average, the share of right guesses, and the rows of the draft's passes."""

    tokens: float
    hits: float
    rows: int


def guesses(ranks: Sequence[Sequence[int]], length: int) -> dict[str, Guess]:
    """Return the figures of all kinds of guesses, from the draft's ranks of the tokens of texts."""
    cycles = tokens = one = each = 0
    for text in ranks:
        place = 0
        while place + length < len(text):
            accepted = next((i for i in range(length) if text[place + i]), length)
            rank = text[place + accepted]
            one += accepted == length and not rank
            each += rank == int(accepted < length)
            cycles, tokens, place = cycles + 1, tokens + accepted + 1, place + accepted + 1
    cycles = max(1, cycles)  # short texts have none
    made, hits = tokens / cycles, (one / cycles, each / cycles, 1.0)
    return {
        kind: Guess(made, *own) for kind, own in zip(KINDS, zip(hits, (1, length + 1, 1), strict=True), strict=True)
    }


class Costs(NamedTuple):
    """Of passes of the target by rows, and of a drafted token; factors: of a draft's passes by rows."""

    target: Mapping[int, Cost]
    token: Cost
    factors: Mapping[int, float]

    def in_turn(self, length: int, cores: int, bandwidth: float) -> float:
        """Return the seconds of a cycle, one model after the other."""
        return length * self.token.on(cores, bandwidth) + self.target[length + 1].on(cores, bandwidth)

    def at_once(self, guess: Guess, length: int, cores: int, own: int, bandwidth: float) -> float:
        """Return the mean seconds of a cycle in which the draft model has `own` cores."""
        alone, verified = self.token.on(cores, bandwidth), self.target[length + 1]
        work_s = (1 + length * self.factors[guess.rows]) * self.token.on(own, bandwidth)
        pass_s = verified.on(cores - own, bandwidth)
        done = min(1.0, pass_s / work_s)
        pass_s = max(pass_s, (verified.bytes + done * (length + 1) * self.token.bytes) / bandwidth)
        return pass_s + alone * (guess.hits * (1 - done) * (length + 1) + (1 - guess.hits) * length)

    def gain(self, kind: str, found: Mapping[int, Mapping[str, Guess]], cores: int, bandwidth: float) -> float:
        """Return the speed of a kind of guesses over drafting and verifying in turn."""
        of = {length: own[kind] for length, own in found.items()}
        ways = product(of, range(1, cores))
        best = max(of[k].tokens / self.at_once(of[k], k, cores, own, bandwidth) for k, own in ways)
        return best / max(guess.tokens / self.in_turn(k, cores, bandwidth) for k, guess in of.items())


def pass_of(model: Any, rows: int) -> Run:
    """Return a pass of a model: rows after a text, with their logits."""
    cache, tokens = slotted_cache(model.cache_shape, 1, BEFORE + rows), usual_tokens(BEFORE + rows, model.vocab_size)

    @torch.inference_mode()
    def run(first: int = BEFORE, end: int = BEFORE + rows) -> None:
        inputs = [SequenceInput(0, tokens[first:end], DraftTree.empty())]
        last = model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage).last
        model.logits(last[-rows:])
        cache.truncate_to(0, BEFORE)

    run(0, BEFORE)
    return run


def draft_of(draft: Any, length: int, size: int, loader: DraftLoader) -> Run:
    """Return a greedy draft of a length after a text of the target's `size` tokens."""
    cache, request = slotted_cache(draft.cache_shape, 1, BEFORE + length), make_sequence(0, usual_tokens(BEFORE, size))

    @torch.inference_mode()
    def run(inputs: int = 1) -> None:
        chain = Chain(request, request.tokens[-inputs:], length, MostLikely())
        grow_chains(draft, [chain], cache, size, loader.target.backend.sampler)
        cache.truncate_to(0, BEFORE - 1)

    run(BEFORE)
    return run


def together(subjects: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Time subjects in threads that run at the same time, until each has run often enough."""
    times, begin = {name: list[float]() for name in subjects}, threading.Barrier(len(subjects))

    def repeat(name: str) -> None:
        begin.wait()
        while min(map(len, times.values())) <= rounds:
            times[name] += timed({name: subjects[name]}, 1)[name]

    threads = [threading.Thread(target=repeat, args=[name]) for name in subjects]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return {name: own[:-1] for name, own in times.items()}  # the other one may have ended before the last


def ranks_of(reader: TextReader, text: Text) -> list[int]:
    """Return how many tokens the draft finds likelier than each of a text's, without the first one."""
    logits, chosen = reader.logits(text), torch.tensor(text.output)[:, None]
    ranks: list[int] = (logits > logits.gather(1, chosen)).sum(-1).tolist()
    return ranks[1:]


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure times and hits, and compute the gains."""
    places = dict(zip((TARGET, DRAFT), (str(place_of(each)) for each in arguments.pair), strict=True))
    pair = LoadedPair(load(Path(places[TARGET]), STORED), places)
    runtime = pair.engine(1, **WITHOUT_DRAFTS, dtype="auto")
    config = EngineConfig.from_arguments(model=places[TARGET], draft_model=places[DRAFT])
    loader = DraftLoader(config, pair.target, runtime.tokenizer, ("overlap",))
    target, draft = pair.target.model, loader.load(places[DRAFT])
    prompts = [prompt for _, prompt in all_prompts("", runtime.tokenizer, PROMPTS)][: arguments.prompts]
    mode = Mode(replace(GREEDY, max_tokens=arguments.tokens), sequential=True)
    texts = map(Text, prompts, Bench(runtime).run(Workload("texts", prompts), mode).outputs)
    reader = TextReader(draft, pair.target.backend.sampler, target.vocab_size)
    ranks = [ranks_of(reader, text) for text in texts]
    found = {length: guesses(ranks, length) for length in LENGTHS}
    costs, seen = costs_of(target, draft, loader, arguments.rounds)

    def pays_from(kind: str, bandwidth: float) -> int | None:
        return next((n for n in range(2, MOST_CORES + 1) if costs.gain(kind, found, n, bandwidth) >= PAYS), None)

    yield {
        "pair": arguments.pair, "draft": loader.notes, **seen,
        "guesses": {length: {kind: guess._asdict() for kind, guess in own.items()} for length, own in found.items()},
        "gains": {gb: {n: {kind: costs.gain(kind, found, n, 1e9 * gb) for kind in KINDS} for n in CORES}
                  for gb in BANDWIDTHS},
        "pays_from": {gb: {kind: pays_from(kind, 1e9 * gb) for kind in KINDS} for gb in BANDWIDTHS},
    }  # fmt: skip


def costs_of(target: Any, draft: Any, loader: DraftLoader, rounds: int) -> tuple[Costs, dict[str, Any]]:
    """Return the costs for the model, and all that was measured."""
    models, rows, memory = {"target": target, "draft": draft}, [1, *(1 + k for k in LENGTHS)], torch.ones(READ // 4)
    subjects = {f"{name}, {n} rows": pass_of(model, n) for name, model in models.items() for n in rows}
    subjects |= {f"{n} tokens": draft_of(draft, n, target.vocab_size, loader) for n in (1, 9)}
    times, speeds, both = dict[int, dict[str, float]](), dict[int, float](), dict[str, list[float]]()
    for threads in (2, 1):
        for model in models.values():
            model.kernels = replace(model.kernels, threads=threads)
        probe = open_kernels(threads=threads)
        assert probe is not None
        speeds[threads] = READ / min(probe.read_seconds(memory) for _ in range(rounds))
        times[threads] = {name: min(own) for name, own in timed(subjects, rounds).items()}
    both = together({name: subjects[name] for name in ("target, 5 rows", "9 tokens")}, rounds)
    one, two = ((times[n]["9 tokens"] - times[n]["1 tokens"]) / 8 for n in (1, 2))

    def cost(one: float, two: float, model: Any) -> Cost:
        return Cost(one, two, min(float(model.bytes_per_pass), one * speeds[1]))

    passes = {n: cost(times[1][f"target, {n} rows"], times[2][f"target, {n} rows"], target) for n in rows}
    factors = {n: times[1][f"draft, {n} rows"] / times[1]["draft, 1 rows"] for n in rows}
    return Costs(passes, cost(one, two, draft), factors), {
        "bandwidth_gb_s": {threads: each / 1e9 for threads, each in speeds.items()},
        "seconds": times, "drafted_token_s": (one, two),
        "slower_together": {name: quartiles([each / times[1][name] for each in own]) for name, own in both.items()},
    }  # fmt: skip


def show(seen: Mapping[str, Any]) -> str:
    """Return the table of the gains."""
    cells = [[" / ".join(f"{own[n][kind]:.2f}" for kind in KINDS) for own in seen["gains"].values()] for n in CORES]
    pays = [" / ".join(str(own[kind] or "never") for kind in KINDS) for own in seen["pays_from"].values()]
    rows = [[str(n), *own] for n, own in zip(CORES, cells, strict=True)]
    return markdown(["cores", *(f"{gb} GB/s" for gb in seen["gains"])], [*rows, ["pays from", *pays]])


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Qwen2.5-Coder in Q4_K_M: with 4 tokens the guess of one outcome is right in a quarter of the cycles, "
    "and one for each number of accepted tokens in half. On two cores the overlap is slower than one model after the "
    "other, because the pass takes nearly twice as long on one core. It pays by 5% from 16 cores on.",
    measure=measure, rounds=9, show=show,
    options={
        "pair": {"nargs": 2, "default": ["qwen_1.5b", "qwen_0.5b"], "metavar": ("TARGET", "DRAFT"),
                 "help": "folders, GGUF files or names of tools/real_models.py"},
        "prompts": 10, "tokens": 64,
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
