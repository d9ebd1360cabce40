"""Replicas on two Ray nodes: streams, disconnects, a replica that is killed, and numbers that follow the load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from speculant import LLM, SamplingParams
from speculant.scale import MARGIN_S
from tests.ray_cluster import PAIR, PATIENCE, ReplicaServer, cluster, kill

__all__ = ["cluster"]

pytestmark = pytest.mark.slow
STREAMS = 200
LEAVING = 0.3  # share of the clients that disconnect
LONG, LONG_TOKENS = 20, 400  # every 20th stream is long: 400 tokens


@dataclass(frozen=True)
class Asked:
    """One request, and after how many pieces its client leaves; None = it stays."""

    prompt: str
    max_tokens: int
    seed: int | None
    leaves_after: int | None

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of sampling."""
        chance = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {"max_tokens": self.max_tokens, **chance}


@dataclass(frozen=True)
class Answered:
    """What a client got. error: of the stream; None = it ended as it has to."""

    asked: Asked
    replica: str
    text: str
    error: str | None = None


def _requests() -> list[Asked]:
    return [
        Asked(
            f"def function_{number % 23}(value, number={number % 7}):\n",
            LONG_TOKENS if number % LONG == 0 else 16 + number % 32,
            number if number % 2 else None,
            1 + number % 5 if (number * 7) % 10 < 10 * LEAVING and number % LONG else None,
        )
        for number in range(STREAMS)
    ]


async def _ask(
    client: openai.AsyncOpenAI, asked: Asked, watch: Callable[[str, int], None] = lambda *_: None
) -> Answered:
    """Read one stream, up to where its client leaves it. watch: gets the replica and the pieces so far."""
    replica, text = "", ""
    try:
        raw = await client.completions.with_raw_response.create(
            model="demo", prompt=asked.prompt, stream=True, extra_body={"ignore_eos": True}, **asked.params
        )
        replica = raw.headers["x-speculant-replica"]
        pieces = 0
        async with raw.parse() as stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                pieces += 1
                watch(replica, pieces)
                if pieces == asked.leaves_after:
                    break
    except openai.APIError as error:
        return Answered(asked, replica, text, str(error))
    return Answered(asked, replica, text)


@pytest.fixture(scope="module")
def texts() -> dict[Asked, str]:
    """Return the texts of one engine, by request."""
    llm, requests = LLM(**PAIR), _requests()
    found = llm.generate(
        [asked.prompt for asked in requests], [SamplingParams(ignore_eos=True, **asked.params) for asked in requests]
    )
    return {asked: output.outputs[0].text for asked, output in zip(requests, found, strict=True)}


@pytest.fixture
def two(cluster: str) -> Iterator[ReplicaServer]:
    """Return a server with two replicas."""
    server = ReplicaServer(cluster, (2, 2)).ready()
    yield server
    server.stop()


def test_a_killed_replica_harms_no_other_stream(two: ReplicaServer, texts: dict[Asked, str]) -> None:
    """200 streams, 30% of whose clients leave; one of two replicas is killed in the middle."""
    described = two.ask("describe")
    assert len(described) == 2
    assert len({tuple(each["cores"]) for each in described.values()}) == 2, "replicas share cores"
    killed: list[str] = []

    def kill_its_replica(replica: str, pieces: int) -> None:
        if pieces == 5 and not killed:
            killed.append(replica)
            kill(described[replica]["pid"])

    async def run() -> list[Answered]:
        async with openai.AsyncOpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as client:
            asked = _requests()
            tasks = [asyncio.create_task(_ask(client, each)) for each in asked if each.max_tokens < LONG_TOKENS]
            while sum(task.done() for task in tasks) < STREAMS // 8:
                await asyncio.sleep(0.005)
            tasks += [
                asyncio.create_task(_ask(client, each, kill_its_replica))
                for each in asked
                if each.max_tokens == LONG_TOKENS
            ]
            return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    (victim,) = killed
    failed = [each for each in answers if each.error is not None]
    print(f"{len(failed)} of {STREAMS} streams failed: {Counter(each.error for each in failed)}")
    assert {each.replica for each in failed} <= {victim}, failed
    assert all("lost" in (each.error or "") for each in failed)
    assert failed, "no stream of the killed replica was running"
    for each in answers:
        whole = texts[each.asked]
        if each.error is None and each.asked.leaves_after is None:
            assert each.text == whole
        else:
            assert whole.startswith(each.text)
    two.until(lambda: len(two.replicas) == 2, PATIENCE)
    assert victim not in two.replicas
    assert two.http.get("/load").json()["server_load"] == 0
    page = two.http.get("/metrics").text
    idle = [line for line in page.splitlines() if line.startswith(("vllm:num_requests", "vllm:kv_cache_usage"))]
    assert len(idle) == 6
    assert all(line.endswith(" 0.0") for line in idle), idle


def test_numbers_follow_a_step_of_load(cluster: str, texts: dict[Asked, str]) -> None:
    """From one replica to three and back to one, and no request is lost."""
    quick = {"upscale_delay_s": 1.0, "downscale_delay_s": 3.0}
    server = ReplicaServer(cluster, (1, 3), settings=quick).ready()
    staying = [asked for asked in _requests() if asked.leaves_after is None]
    most, answers = 0, list[Answered]()

    async def client_loop(client: openai.AsyncOpenAI, first: int, until: list[bool]) -> None:
        number = first
        while not until:
            answers.append(await _ask(client, staying[number % len(staying)]))
            number += 1

    async def run() -> None:
        nonlocal most
        ended: list[bool] = []
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            tasks = [asyncio.create_task(client_loop(client, 7 * each, ended)) for each in range(24)]
            deadline = time.monotonic() + PATIENCE
            while most < 3 and time.monotonic() < deadline:
                most = max(most, len(await asyncio.to_thread(lambda: server.replicas)))
                await asyncio.sleep(1)
            await asyncio.sleep(5)
            ended.append(True)
            await asyncio.gather(*tasks)

    try:
        assert len(server.replicas) == 1
        asyncio.run(run())
        assert most == 3
        server.until(lambda: len(server.replicas) == 1, PATIENCE)
        assert len({each.replica for each in answers}) == 3
        assert [each for each in answers if each.error is not None or each.text != texts[each.asked]] == []
        assert server.post("/v1/completions", prompt="import os", max_tokens=4, temperature=0)["choices"][0]["text"]
    finally:
        server.stop()


def test_a_replica_that_lost_a_prefix_is_not_preferred(cluster: str) -> None:
    """A text goes to the replica that had it, until its cache has evicted it: then to the one that had least."""
    small = {"model": "demo", "max_model_len": 512, "max_num_seqs": 1, "kv_memory": "2MiB"}  # 32 blocks of 16 tokens
    server = ReplicaServer(cluster, (2, 2), small | {"use_speculative_decoding": False}).ready()

    def ask(kind: str, lines: int, number: int = 0) -> str:
        """Return the replica that answers a prompt, which shares its beginning with others of its kind."""
        prompt = "".join(f"{kind * 8} {number if line > lines // 3 else 0} {line}\n" for line in range(lines))
        body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-speculant-replica"]

    try:
        first = ask("p", 20)
        assert {ask("p", 20) for _ in range(3)} == {first}
        other = ask("q", 26)
        assert other != first, "it has fewer characters"
        for attempt in range(6):
            time.sleep(2 * MARGIN_S)  # so that the text is surely older than those that evict it
            assert {ask("r", 20, 12 * attempt + number) for number in range(12)} == {first}
            time.sleep(6)  # the controller asks replicas every two seconds
            went = ask("p", 20)
            if went != first:
                break
        assert went == other, "it has evicted the text"
        assert {ask("p", 20) for _ in range(3)} == {other}
    finally:
        server.stop()
