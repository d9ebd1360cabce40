"""Real servers against the simulator: each `speculant serve` has one thread and a core of its own.

Requests come in chunks. Before and after each chunk, the costs are measured on the first server over HTTP: a step's
time by the number of sequences, with and without drafts, the time of prompts by their length, and that of a burst of
requests. Meanwhile the other server, if there is one, gets requests as often as in the chunk. So drifts of the machine
are in both. A figure is the median of the chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks.fleets.compared import LOADS, NAMES, capacity, compared, measured, simulated

from speculant.lab.bench.workloads import code_prompt
from speculant.lab.cli.server_process import own_server
from speculant.lab.fleet.config import FleetConfig, ReplicaLimits, TrafficConfig
from speculant.lab.fleet.costs import EngineCosts
from speculant.lab.fleet.fleet import simulate_fleet
from speculant.lab.fleet.traffic import Arrival, arrivals
from speculant.lab.theory.curve import VerificationCurve
from speculant.models.source import resolve_source
from speculant.text.tokenizer import Tokenizer

SERVERS = (
    "44 of 48 figures within 15%; beyond are 99th percentiles, and first tokens at 85%, because an error of 3% in "
    "the capacity moves the queue by 20%. Before, with costs measured once, on one server alone, and 100 MiB: 25. With "
    "costs measured around each chunk while the neighbour works: 36; nearly all simulated times were too short. The "
    "burst was missing there. Its time sets the level of all costs: work for a request after its first token, and for "
    "batches that change, was in no other measurement. 4% more time gives 43 on the same chunks."
)
SHAPE = ("--hidden-size", "1536", "--layers", "12")
DRAFT = 3  # tokens
SIZES = {"prompt_tokens": 48, "prompt_variation": 0.5, "answer_tokens": 24, "answer_variation": 0.5}
LONGEST = 120  # tokens of an answer or a prompt
LIMITS = ReplicaLimits(max_num_seqs=8, max_num_batched_tokens=512, kv_tokens=8192, prefix_caching=False)
SAME_STEP = 0.003  # seconds; tokens of one step have events of their own, which come together
COUNTS, PROMPTS = (1, 2, 4, 8), (8, 16, 32, 64, 128, 256)  # sequences, and tokens of prompts
READ, TOKENS = 64, 48
SETTLE_S = 0.5  # until a server has cancelled its requests
REQUESTS, BURST = 50, 24  # per server and chunk, and at once

Times = dict[str, float]  # measured ones, in seconds; "tokens per step" of drafts too


@dataclass
class Reply:
    """Times of an answer: when it was due, and those of its events."""

    due: float
    events: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0

    @property
    def steps(self) -> list[float]:
        """The first event of each step."""
        return [
            time for time, before in zip(self.events, [0.0, *self.events], strict=False) if time - before > SAME_STEP
        ]


async def ask(client: httpx.AsyncClient, prompt: Sequence[int], tokens: int, drafts: int, due: float = 0.0) -> Reply:
    """Send a prompt and read its answer to the end."""
    reply = Reply(due or time.perf_counter())
    body = {
        "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "cache_salt": uuid.uuid4().hex, "stream_options": {"include_usage": True},
        "speculation": {"num_speculative_tokens": drafts} if drafts else False,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    reply.events.append(time.perf_counter())
                reply.tokens = (event.get("usage") or {}).get("completion_tokens") or reply.tokens
    reply.ended = time.perf_counter()
    return reply


async def step_s(
    client: httpx.AsyncClient, prompts: Sequence[Sequence[int]], drafts: int
) -> tuple[float, float, float]:
    """Return the mean time of a step with these sequences, the tokens per sequence and step, and the first step's time.

    In the first step with drafts, the draft model reads the prompts.
    """
    replies = await asyncio.gather(*(ask(client, prompt, TOKENS, drafts) for prompt in prompts))
    begin, end = max(each.steps[1] for each in replies), min(each.steps[-1] for each in replies)
    inside = [[time for time in each.steps if begin <= time < end] for each in replies]
    gaps = [later - earlier for times in inside for earlier, later in pairwise(times)]
    rate = float(np.mean([(each.tokens - 1) / (len(each.steps) - 1) for each in replies]))
    return float(np.mean(gaps)), rate, max(each.steps[1] - each.steps[0] for each in replies)


async def measured_times(client: httpx.AsyncClient, tokenizer: Tokenizer, drafts: int, seed: int) -> Times:
    """Measure each time once: of steps by the number of sequences, and of prompts by their length."""
    times, rates = Times(), list[float]()
    for count in COUNTS:
        prompts = [code_prompt(tokenizer, 100 * seed + each, READ) for each in range(count)]
        for length in {0, drafts}:
            seconds, rate, first_s = await step_s(client, prompts, length)
            times[f"{count} sequences, drafts of {length}"] = seconds
            rates += [rate] if length else []
            if length and count == 1:
                times["reading a prompt"] = first_s - seconds
    for size in PROMPTS:
        reply = await ask(client, code_prompt(tokenizer, 100 * seed, size), 1, 0)
        times[f"prompt of {size}"] = reply.events[0] - reply.due
    burst, started = burst_of(seed), time.perf_counter()
    await run_servers([client], prompts_of(tokenizer, burst), burst, drafts)
    times["burst"] = time.perf_counter() - started
    return times | ({"tokens per step": float(np.mean(rates))} if rates else {})


def burst_of(seed: int) -> list[Arrival]:
    """Return requests that come at once."""
    return [replace(each, seconds=0.0) for each in requests(1.0, BURST, f"burst {seed}")]


def engine_costs(measurements: Mapping[int, Times], drafts: int) -> EngineCosts:
    """Return the costs of one server from the means of measured times, by the seed of their requests.

    All costs have a common factor, with which the bursts take as long as they took.
    """
    times = list(measurements.values())
    typical = {name: float(np.mean([each[name] for each in times])) for name in times[0]}
    curve, ratio = _curve(typical, drafts)
    share, admit_s = _prompts(typical, curve)
    alpha = _acceptance(typical["tokens per step"], drafts) if drafts else 0.0
    costs = EngineCosts(curve, (alpha,), ratio, admit_s=admit_s, prompt_share=share)
    limits = replace(LIMITS, draft_length=str(drafts))
    expected = [simulate_fleet(FleetConfig(), costs, limits, burst_of(seed)).seconds for seed in measurements]
    factor = typical["burst"] / float(np.mean(expected))
    scaled = VerificationCurve(curve.tokens, tuple(each * factor for each in curve.costs))
    return replace(costs, seconds=scaled, admit_s=admit_s * factor)


def _curve(typical: Mapping[str, float], drafts: int) -> tuple[VerificationCurve, float]:
    """Return the time of the target's pass by its verified rows, and the cost ratio of a draft.

    The ratio is that of reading a prompt. The rest of a step with drafts is the target's pass.
    """
    decode = {count: typical[f"{count} sequences, drafts of 0"] for count in COUNTS}
    ratio = max(0.0, typical["reading a prompt"]) / typical[f"prompt of {READ}"] if drafts else 0.0
    points = {1: decode[1]}
    for count in COUNTS:
        step = typical[f"{count} sequences, drafts of {drafts}"]
        points[count * (1 + drafts)] = step - drafts * ratio * decode[count]
    return VerificationCurve(tuple(points), tuple(points.values())), ratio


def _prompts(typical: Mapping[str, float], curve: VerificationCurve) -> tuple[float, float]:
    """Return the share of a verified row that a prompt's row counts as, and the time of a request beside its pass.

    The server's work for a request takes the engine's core, so it delays all requests.
    """
    seen, sizes = np.array([typical[f"prompt of {size}"] for size in PROMPTS]), np.array(PROMPTS)
    best = (np.inf, 1.0, 0.0)
    for share in np.linspace(0.05, 2.0, 196):
        passes = curve.relative(np.maximum(1, sizes * share)) * curve.costs[0]
        admit_s = max(0.0, float(np.median(seen - passes)))
        error = float(np.sum(np.log((passes + admit_s) / seen) ** 2))
        best = min(best, (error, float(share), admit_s))
    return best[1:]


def _acceptance(tokens: float, drafts: int) -> float:
    """Return the acceptance rate at which drafts of this length give this many tokens per step."""
    rates = np.linspace(0, 1, 1001)
    means = sum(rates**k for k in range(drafts + 1))
    return float(np.interp(tokens, means, rates))


async def run_servers(
    clients: Sequence[httpx.AsyncClient], prompts: Sequence[Sequence[int]], traffic: Sequence[Arrival], drafts: int
) -> list[Reply]:
    """Send requests at their times, each to a server with the fewest that are not answered."""
    loads, started = [0] * len(clients), time.perf_counter()

    async def one(prompt: Sequence[int], arrival: Arrival) -> Reply:
        chosen = min(range(len(clients)), key=lambda each: (loads[each], random.random()))
        loads[chosen] += 1
        reply = await ask(clients[chosen], prompt, arrival.answer, drafts, started + arrival.seconds)
        loads[chosen] -= 1
        return reply

    async with asyncio.TaskGroup() as tasks:
        sent = []
        for prompt, arrival in zip(prompts, traffic, strict=True):
            await asyncio.sleep(started + arrival.seconds - time.perf_counter())
            sent.append(tasks.create_task(one(prompt, arrival)))
    return [task.result() for task in sent]


@asynccontextmanager
async def busy(
    clients: Sequence[httpx.AsyncClient], tokenizer: Tokenizer, rate: float, drafts: int
) -> AsyncIterator[None]:
    """Meanwhile send requests to each server at this rate. At the end, wait until those that run are cancelled."""

    async def load(client: httpx.AsyncClient, number: int) -> None:
        traffic = requests(rate, 1000, f"busy {number}")
        await run_servers([client], prompts_of(tokenizer, traffic), traffic, drafts)

    tasks = [asyncio.create_task(load(client, number)) for number, client in enumerate(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.sleep(SETTLE_S if tasks else 0)


def requests(rate: float, number: int, seed: str) -> list[Arrival]:
    """Draw requests; none is longer than LONGEST."""
    return [
        Arrival(each.seconds, min(each.prompt, LONGEST), min(each.answer, LONGEST))
        for each in arrivals(TrafficConfig(rate, number, **SIZES), seed)
    ]


def prompts_of(tokenizer: Tokenizer, traffic: Sequence[Arrival]) -> list[list[int]]:
    """Return a prompt of each request's length."""
    return [code_prompt(tokenizer, number, each.prompt) for number, each in enumerate(traffic)]


def processor_s() -> tuple[float, float]:
    """Return the processors' busy seconds so far: of the whole machine, and of this process and its children."""
    tick = os.sysconf("SC_CLK_TCK")
    first, *_ = Path("/proc/stat").read_text().splitlines()
    user, nice, system, _, _, interrupts, soft, *_ = map(int, first.split()[1:])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    own = 0
    for name in ("self", *children):
        fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        own += int(fields[11]) + int(fields[12])
    return (user + nice + system + interrupts + soft) / tick, own / tick


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Start processes of this block on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Chunk:
    """Requests that were sent one after another, and the times measured before and after, by their seeds."""

    traffic: list[Arrival]
    replies: list[Reply]
    times: dict[int, Times]
    rate: float
    others: float  # processors that other processes of the machine used meanwhile

    def figures(self, replicas: int, drafts: int) -> dict[str, Any]:
        """Return the measured and simulated figures."""
        first = [each.events[0] - each.due for each in self.replies]
        seen = measured(first, [each.ended - each.due for each in self.replies])
        costs = engine_costs(self.times, drafts)
        said = simulated(replicas, "least", costs, replace(LIMITS, draft_length=str(drafts)), self.traffic)
        return {
            "rate": self.rate,
            "processors_used_by_others": self.others,
            "times": list(self.times.values()),
            "measured": seen,
            "simulated": said,
            "difference": compared(seen, said),
        }


@dataclass
class Setting:
    """Chunks with the same number of servers, draft length and load."""

    replicas: int
    drafts: int
    load: float
    chunks: list[Chunk] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Return the figures of the chunks, and their medians."""
        chunks = [chunk.figures(self.replicas, self.drafts) for chunk in self.chunks]
        return {
            "replicas": self.replicas,
            "drafts": str(self.drafts),
            "load": self.load,
            "requests": sum(len(chunk.replies) for chunk in self.chunks),
            **{
                kind: {name: float(np.median([each[kind][name] for each in chunks])) for name in NAMES}
                for kind in ("measured", "difference")
            },
            "chunks": chunks,
        }


def measure_servers(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one and two servers at each load, without drafts and with them, in rounds."""
    tokenizer = Tokenizer.load(resolve_source("demo", "target"))
    with ExitStack() as stack:
        urls = _servers(stack)
        settings = [
            Setting(replicas, drafts, load)
            for drafts in (0, DRAFT)
            for replicas in range(1, len(urls) + 1)
            for load in LOADS
        ]
        for number in range(arguments.rounds):
            for setting in settings:
                asyncio.run(_measure_chunk(setting, urls[: setting.replicas], tokenizer, number))
            yield {"part": "servers", "rows": [setting.row() for setting in settings]}


def _servers(stack: ExitStack) -> list[str]:
    """Start a server on each of two cores, or on the only one; return their addresses."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
    command = [sys.executable, "-m", "speculant.cli.main", "inflate", "demo", str(folder), *SHAPE]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    settings = {
        "SPECULANT_MODEL": str(folder), "SPECULANT_DRAFT_MODEL": "demo", "SPECULANT_SPEC_LENGTH": str(DRAFT),
        "SPECULANT_MAX_NUM_SEQS": str(LIMITS.max_num_seqs), "OMP_NUM_THREADS": "1", "SPECULANT_NUM_THREADS": "1",
        "SPECULANT_MAX_NUM_BATCHED_TOKENS": str(LIMITS.max_num_batched_tokens),
    }  # fmt: skip
    urls = list[str]()
    for core in sorted(os.sched_getaffinity(0))[:2]:
        with pinned(core):
            urls.append(stack.enter_context(own_server(settings)))
    return urls


async def _measure_chunk(setting: Setting, urls: Sequence[str], tokenizer: Tokenizer, number: int) -> None:
    """Measure the costs, send the requests, and measure the costs again."""
    drafts, load, limits = setting.drafts, setting.load, replace(LIMITS, draft_length=str(setting.drafts))
    async with AsyncExitStack() as stack:
        unlimited = httpx.Limits(max_connections=None)
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=unlimited)
            )
            for url in urls
        ]
        known = (
            setting.chunks[-1].times if setting.chunks else {0: await measured_times(clients[0], tokenizer, drafts, 0)}
        )
        full = capacity(engine_costs(known, drafts), limits, SIZES)

        async def times(seed: int) -> dict[int, Times]:
            async with busy(clients[1:], tokenizer, load * full, drafts):
                return {seed: await measured_times(clients[0], tokenizer, drafts, seed)}

        before = await times(2 * number + 1)
        rate = load * capacity(engine_costs(before, drafts), limits, SIZES) * len(urls)
        traffic = requests(rate, REQUESTS * len(urls), f"servers {len(urls)} {drafts} {load} {number}")
        prompts = prompts_of(tokenizer, traffic)
        started, (machine_s, own_s) = time.perf_counter(), processor_s()
        replies = await run_servers(clients, prompts, traffic, drafts)
        seconds, (machine_end_s, own_end_s) = time.perf_counter() - started, processor_s()
        others = (machine_end_s - machine_s - own_end_s + own_s) / seconds
        setting.chunks.append(Chunk(traffic, replies, before | await times(2 * number + 2), rate, others))
