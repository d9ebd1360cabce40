"""Real servers against the simulator: each `speculant serve` has one thread and a core of its own.

The costs are measured first, on the first server alone, over HTTP: a step's time by the number of sequences, with and
without drafts, and the time of prompts by their length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks.fleets.compared import LOADS, capacity, compared, measured, simulated

from speculant.lab.bench.server_process import own_server
from speculant.lab.bench.workloads import code_prompt
from speculant.lab.fleet.config import ReplicaLimits, TrafficConfig
from speculant.lab.fleet.costs import EngineCosts
from speculant.lab.fleet.traffic import Arrival, arrivals
from speculant.lab.theory.curve import VerificationCurve
from speculant.models.source import resolve_source
from speculant.text.tokenizer import Tokenizer

SERVERS = (
    "p50 within 10%, and p99 within 15% at 30% and 60%; at 85% the p99 of the first token may differ more, because a "
    "small error of the capacity moves a long queue. Two servers fit worse than one, as the client shares their cores. "
    "A first run missed that, with drafts by up to -71%: the server's work for a request counted as latency although "
    "it takes the engine's core, and the draft model's reading of prompts was not measured. Both are costs of a step "
    "since then, and the prediction is the same."
)
SHAPE = ("--hidden-size", "1024", "--layers", "12")
DRAFT = 3  # tokens
SIZES = {"prompt_tokens": 48, "prompt_variation": 0.5, "answer_tokens": 24, "answer_variation": 0.5}
LONGEST = 120  # tokens of an answer or a prompt
LIMITS = ReplicaLimits(max_num_seqs=8, max_num_batched_tokens=512, kv_tokens=8192, prefix_caching=False)
SAME_STEP = 0.003  # seconds; tokens of one step have events of their own, which come together
COUNTS, PROMPTS = (1, 2, 4, 8), (8, 16, 32, 64, 128, 256)  # sequences, and tokens of prompts
READ, TOKENS, ROUNDS = 64, 48, 7


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


async def measured_costs(url: str, tokenizer: Tokenizer, drafts: int) -> tuple[EngineCosts, dict[str, Any]]:
    """Measure one server alone; return its costs, and the measurements."""
    steps: dict[str, list[float]] = {}
    rates: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        await step_s(client, [code_prompt(tokenizer, 0, 16)] * max(COUNTS), drafts)
        for number in range(ROUNDS):
            for count in COUNTS:
                prompts = [code_prompt(tokenizer, 100 * number + each, READ) for each in range(count)]
                for length in {0, drafts}:
                    seconds, rate, first_s = await step_s(client, prompts, length)
                    steps.setdefault(f"{count} sequences, drafts of {length}", []).append(seconds)
                    rates += [rate] if length else []
                    if length and count == 1:
                        steps.setdefault("reading a prompt", []).append(first_s - seconds)
            for size in PROMPTS:
                reply = await ask(client, code_prompt(tokenizer, 900 + number, size), 1, 0)
                steps.setdefault(f"prompt of {size}", []).append(reply.events[0] - reply.due)
    typical = {name: float(np.median(times)) for name, times in steps.items()}
    curve, ratio = _curve(typical, drafts)
    share, admit_s = _prompts(typical, curve)
    alpha = _acceptance(float(np.mean(rates)), drafts) if drafts else 0.0
    costs = EngineCosts(curve, (alpha,), ratio, admit_s=admit_s, prompt_share=share)
    return costs, {"steps": typical, "alpha": alpha, "cost_ratio": ratio, "prompt_share": share, "admit_s": admit_s}


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
    urls: Sequence[str], tokenizer: Tokenizer, traffic: Sequence[Arrival], drafts: int
) -> list[Reply]:
    """Send requests at their times, each to a server with the fewest that are not answered."""
    loads, started = dict.fromkeys(urls, 0), time.perf_counter()
    async with asyncio.TaskGroup() as tasks, _clients(urls) as clients:

        async def one(number: int, arrival: Arrival) -> Reply:
            url = min(urls, key=lambda each: (loads[each], (urls.index(each) + number) % len(urls)))
            loads[url] += 1
            prompt = code_prompt(tokenizer, number, arrival.prompt)
            reply = await ask(clients[url], prompt, arrival.answer, drafts, started + arrival.seconds)
            loads[url] -= 1
            return reply

        sent = []
        for number, arrival in enumerate(traffic):
            await asyncio.sleep(started + arrival.seconds - time.perf_counter())
            sent.append(tasks.create_task(one(number, arrival)))
        return list(await asyncio.gather(*sent))


class _clients:  # noqa: N801 - used as a function
    """A client for each address."""

    def __init__(self, urls: Sequence[str]) -> None:
        limits = httpx.Limits(max_connections=None)
        self.clients = {
            url: httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) for url in urls
        }

    async def __aenter__(self) -> Mapping[str, httpx.AsyncClient]:
        return self.clients

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients.values():
            await client.aclose()


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


def measure_servers(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the costs, then one and two servers at each load, without drafts and with them."""
    number, rows, costs_seen = 30 if arguments.quick else arguments.requests, list[dict[str, Any]](), dict[str, Any]()
    tokenizer = Tokenizer.load(resolve_source("demo", "target"))
    with ExitStack() as stack:
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
        for drafts in (0, DRAFT):
            limits = replace(LIMITS, draft_length=str(drafts))
            for replicas in range(1, len(urls) + 1):
                costs, seen = asyncio.run(measured_costs(urls[0], tokenizer, drafts))
                costs_seen[f"before {replicas} with drafts of {drafts}"] = seen
                for load in LOADS:
                    row = _row(urls[:replicas], tokenizer, costs, limits, load, number)
                    rows.append({"replicas": replicas, "drafts": str(drafts), "load": load, **row})
                    yield {"part": "servers", "costs": costs_seen, "rows": rows}


def _row(
    urls: Sequence[str], tokenizer: Tokenizer, costs: EngineCosts, limits: ReplicaLimits, load: float, number: int
) -> dict[str, Any]:
    drafts = limits.fixed_length or 0
    full = capacity(costs, limits, SIZES)
    config = TrafficConfig(load * full * len(urls), number, **SIZES)
    traffic = [
        Arrival(each.seconds, min(each.prompt, LONGEST), min(each.answer, LONGEST))
        for each in arrivals(config, f"servers {len(urls)} {drafts} {load}")
    ]
    started, (machine_s, own_s) = time.perf_counter(), processor_s()
    replies = asyncio.run(run_servers(urls, tokenizer, traffic, drafts))
    seconds, (machine_end_s, own_end_s) = time.perf_counter() - started, processor_s()
    seen = measured([each.events[0] - each.due for each in replies], [each.ended - each.due for each in replies])
    said = simulated(len(urls), "least", costs, limits, traffic)
    return {
        "requests": number,
        "processors_used_by_others": (machine_end_s - machine_s - own_end_s + own_s) / seconds,
        "rate": load * full * len(urls),
        "measured": seen,
        "simulated": said,
        "difference": compared(seen, said),
    }
