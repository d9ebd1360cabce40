"""Routing by prefixes beside random routing: two replicas on Ray, a core each, the same requests.

Each request has one of some long shared beginnings and an end of its own. A round deploys the replicas anew, so that
caches are empty, and the ways to route alternate. hit rate: prompt tokens found in the cache over all. first token:
time from the request to the first event of its stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from speculant.lab.bench.scripts import Benchmark, quartiles
from speculant.ray.fleet import Fleet
from speculant.ray.local import LocalReplicas
from speculant.ray.options import ReplicaOptions
from speculant.ray.routed import routed
from speculant.serving.inside import InsideRequest, ResponseHead
from speculant.serving.options import ServerOptions

WORDS = ("value", "number", "result", "items", "index", "count", "total", "left", "right", "name", "size", "queue")
AT_A_TIME = 4  # requests


class RandomRouter(PowerOfTwoChoicesRequestRouter):
    """Sends each request to any replica."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """See `RequestRouter`."""
        return [[random.choice(candidate_replicas)]]


@dataclass(frozen=True)
class Seen:
    """What one request found."""

    first_s: float
    prompt_tokens: int
    cached_tokens: int


def prompts(number: int, prefixes: int, tokens: int, seed: str) -> list[str]:
    """Return prompts. Each begins with one of the shared prefixes, which have about `tokens` tokens."""
    chance = random.Random(seed)
    beginnings = [
        f"# part {place}\n" + "".join(f"{chance.choice(WORDS)} = {chance.choice(WORDS)}\n" for _ in range(tokens // 5))
        for place in range(prefixes)
    ]
    return [f"{chance.choice(beginnings)}def function_{place}(" for place in range(number)]


async def ask(fleet: Fleet, prompt: str) -> Seen:
    """Stream one answer."""
    body = {"prompt": prompt, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    request = InsideRequest("POST", "/v1/completions", json.dumps(body).encode())
    started, first, text = time.perf_counter(), 0.0, b""
    async for piece in fleet.responses(routed(request, None)):
        if isinstance(piece, ResponseHead):
            assert piece.status == 200, piece
        elif isinstance(piece, bytes):
            first = first or time.perf_counter() - started
            text += piece
    usage = next(json.loads(line[6:])["usage"] for line in text.decode().split("\n\n") if '"usage":{' in line)
    return Seen(first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


async def run(handle: Any, asked: Sequence[str]) -> list[Seen]:
    """Ask for all prompts, some at a time."""
    fleet, room = Fleet(handle), asyncio.Semaphore(AT_A_TIME)

    async def one(prompt: str) -> Seen:
        async with room:
            return await ask(fleet, prompt)

    return await asyncio.gather(*map(one, asked))


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure both ways in each round."""
    runs: dict[str, list[list[Seen]]] = {"random": [], "prefix": []}
    for number in range(arguments.rounds):
        asked = prompts(arguments.requests, arguments.prefixes, arguments.tokens, str(number))
        for way, found in runs.items():
            router = RandomRouter if way == "random" else None
            values = {"model": arguments.model, "draft_model": arguments.draft_model, "max_num_seqs": 8}
            replicas = LocalReplicas(values, ServerOptions(), ReplicaOptions((2, 2), cores=1), router=router)
            replicas.connect()
            found.append(asyncio.run(run(replicas.start(), asked)))
            serve.shutdown()
        yield {
            way: {
                "hit_rate": quartiles([_share(each) for each in found]),
                "first_token_s": quartiles([statistics.median(seen.first_s for seen in each) for each in found]),
                "first_token_p99_s": quartiles(
                    [statistics.quantiles([seen.first_s for seen in each], n=100)[98] for each in found]
                ),
            }
            for way, found in runs.items()
        }


def _share(seen: Sequence[Seen]) -> float:
    return sum(each.cached_tokens for each in seen) / sum(each.prompt_tokens for each in seen)


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="40 beginnings of about 350 tokens, 400 requests, caches of 8,192 tokens: a cache holds half of the "
    "beginnings. Random: hit rate 0.5. Prefix: 0.85, and half the median time to the first token. (With 16 beginnings, "
    "which one cache holds, the hit rates were 0.84 and 0.91, and the times the same.)",
    measure=measure, rounds=3,
    options={"requests": 400, "prefixes": 40, "tokens": 500, "model": "demo", "draft_model": "demo"},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
