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
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fleet_compared import LOADS, capacity, compared, measured, simulated

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
    "small error of the capacity moves a long queue. Two servers fit worse than one, as the client shares their cores."
)
SHAPE = ("--hidden-size", "1024", "--layers", "12")
DRAFT = 3  # tokens
SIZES = {"prompt_tokens": 48, "prompt_variation": 0.5, "answer_tokens": 24, "answer_variation": 0.5}
LONGEST = 120  # tokens of an answer or a prompt
LIMITS = ReplicaLimits(max_num_seqs=8, max_num_batched_tokens=512, kv_tokens=8192, prefix_caching=False)
COUNTS, PROMPTS = (1, 2, 4, 8), (8, 16, 32, 64, 128, 256)  # sequences, and tokens of prompts
TOKENS, ROUNDS = 48, 5


@dataclass
class Reply:
    """Times of an answer: when it was due, and those of its events."""

    due: float
    events: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0


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


async def step_s(client: httpx.AsyncClient, prompts: Sequence[Sequence[int]], drafts: int) -> tuple[float, float]:
    """Return the mean time of a step with these sequences, and the tokens per sequence and step."""
    replies = await asyncio.gather(*(ask(client, prompt, TOKENS, drafts) for prompt in prompts))
    begin, end = max(each.events[0] for each in replies), min(each.events[-1] for each in replies)
    inside = [[time for time in each.events if begin < time < end] for each in replies]
    gaps = [later - earlier for times in inside for earlier, later in pairwise(times)]
    return float(np.mean(gaps)), float(np.mean([(each.tokens - 1) / (len(each.events) - 1) for each in replies]))


async def measured_costs(url: str, tokenizer: Tokenizer, drafts: int) -> tuple[EngineCosts, dict[str, Any]]:
    """Measure one server alone; return its costs, and the measurements."""
    steps: dict[str, list[float]] = {}
    rates: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        await step_s(client, [code_prompt(tokenizer, 0, 16)] * max(COUNTS), drafts)
        for number in range(ROUNDS):
            for count in COUNTS:
                prompts = [code_prompt(tokenizer, 100 * number + each, 40) for each in range(count)]
                for length in {0, drafts}:
                    seconds, rate = await step_s(client, prompts, length)
                    steps.setdefault(f"{count} sequences, drafts of {length}", []).append(seconds)
                    rates += [rate] if length else []
            for size in PROMPTS:
                reply = await ask(client, code_prompt(tokenizer, 900 + number, size), 1, 0)
                steps.setdefault(f"prompt of {size}", []).append(reply.events[0] - reply.due)
    typical = {name: float(np.median(times)) for name, times in steps.items()}
    decode = {count: typical[f"{count} sequences, drafts of 0"] for count in COUNTS}
    request_s = max(0.0, typical["prompt of 8"] - decode[8])
    points = {**decode, **{size: typical[f"prompt of {size}"] - request_s for size in PROMPTS[1:]}}
    curve = VerificationCurve(tuple(points), tuple(points.values()))
    alpha, ratio = 0.0, 0.0
    if drafts:
        alpha = _acceptance(float(np.mean(rates)), drafts)
        ratio = max(0.0, (typical[f"1 sequences, drafts of {drafts}"] - decode[1 + drafts]) / drafts / decode[1])
    costs = EngineCosts(curve, (alpha,), ratio, request_s=request_s)
    return costs, {"steps": typical, "alpha": alpha, "cost_ratio": ratio, "request_s": request_s}


def _acceptance(tokens: float, drafts: int) -> float:
    """Return the rate with which drafts of a length give so many tokens per step."""
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
            costs, seen = asyncio.run(measured_costs(urls[0], tokenizer, drafts))
            costs_seen[f"drafts of {drafts}"] = seen
            limits = ReplicaLimits(**{**LIMITS.__dict__, "draft_length": str(drafts)})
            for replicas in range(1, len(urls) + 1):
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
    replies = asyncio.run(run_servers(urls, tokenizer, traffic, drafts))
    seen = measured([each.events[0] - each.due for each in replies], [each.ended - each.due for each in replies])
    said = simulated(len(urls), "least", costs, limits, traffic)
    return {
        "requests": number,
        "rate": load * full * len(urls),
        "measured": seen,
        "simulated": said,
        "difference": compared(seen, said),
    }
