"""Two servers share a folder of prompts: under load, when one is killed, and when the folder is removed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from speculant import LLM, SamplingParams
from speculant.cache import BlockFiles
from speculant.kept_files import TEMPORARY
from tests.models import VOCAB_SIZE, Shape, write_checkpoint
from tests.servers import ServerProcess, serve_process

__all__ = ["serve_process"]

CLIENTS, REQUESTS = 4, 40
FLAGS = "--dtype float32 --kv-memory 256KiB --block-size 4 --max-num-seqs 4 --prompt-cache-size 200KiB".split()
SETTINGS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def ask(servers: Sequence[ServerProcess], prompts: Sequence[list[int]]) -> list[str]:
    """Send all prompts from several clients, to each server in turn; return the texts."""

    def send(number: int) -> str:
        body = {"prompt": prompts[number], **SETTINGS}
        answer = servers[number % len(servers)].http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(CLIENTS) as clients:
        return [*clients.map(send, range(len(prompts)))]


def read_tokens(server: ServerProcess) -> float:
    """Return how many tokens a server has read from the disk."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = (each for family in families for each in family.samples)
    return sum(each.value for each in samples if each.name.endswith("external_prefix_cache_hits_total"))


@pytest.mark.slow
def test_two_servers_share_a_folder(serve_process: Callable[..., ServerProcess], tmp_path: Path) -> None:
    model, folder, chance = write_checkpoint(tmp_path / "model", Shape(seed=1)), tmp_path / "prompts", random.Random(1)
    beginnings = [[chance.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(6)]
    every = [
        [*chance.choice(beginnings), *(chance.randrange(VOCAB_SIZE) for _ in range(1 + number % 9))]
        for number in range(2 * REQUESTS)
    ]
    plain = LLM(model, dtype="float32").generate([*every], SamplingParams(**SETTINGS))
    texts = [each.outputs[0].text for each in plain]
    prompts, expected = every[:REQUESTS], texts[:REQUESTS]

    def start() -> ServerProcess:
        return serve_process(model, *FLAGS, "--prompt-cache", str(folder)).ready()

    servers = [start(), start()]
    assert ask(servers, prompts) == expected
    assert ask(servers[::-1], prompts) == expected
    assert all(map(read_tokens, servers)), "no server has read what the other one wrote"

    servers[0].process.kill()
    servers[0] = start()
    assert ask(servers, prompts) == expected
    assert read_tokens(servers[0]), "nothing was read after the restart"

    shutil.rmtree(folder, ignore_errors=True)
    assert ask(servers, every[REQUESTS:]) == texts[REQUESTS:]
    assert BlockFiles.entries(folder), "nothing is kept after the folder was removed"
    with ThreadPoolExecutor(1) as others:
        asked = others.submit(ask, servers, prompts)
        while not asked.done():
            shutil.rmtree(folder, ignore_errors=True)
        assert asked.result() == expected

    for server in servers:
        server.signal()
        assert server.wait() == 0
        assert not any("Traceback" in message for message in server.messages), server.messages
    assert not any(BlockFiles.verify(entry.path) for entry in BlockFiles.entries(folder))
    assert not [*folder.rglob("*" + TEMPORARY)]
