"""Batches over Ray Data: engines in actors, one of which is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from speculant import LLM, SamplingParams
from speculant.scale import BatchJob, ReplicaOptions, answer_on_ray
from speculant.serving import ServerOptions
from tests.ray_cluster import PAIR, PATIENCE, cluster, kill

__all__ = ["cluster"]

pytestmark = pytest.mark.slow
LINES = 10_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a file of requests, the last one of which is none."""
    path = tmp_path / "in.jsonl"
    bodies = ({"prompt": _prompt(number), "max_tokens": 4 + number % 9, "temperature": 0} for number in range(LINES))
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    path.write_text("\n".join([*lines, "{}"]) + "\n")
    return path


def _prompt(number: int) -> str:
    return f"def function_{number % 97}(value_{number}):"


def _engines() -> Iterator[int]:
    """Yield the processes of engines."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if b"MapWorker" in path.read_bytes():
                yield int(path.parent.name)


def _kill_one(job: BatchJob) -> None:
    """Kill an engine once a third of the lines have a result."""
    deadline = time.monotonic() + 2 * PATIENCE
    while job.left > 2 * LINES // 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(next(_engines()))


def test_a_killed_engine_loses_no_line(cluster: str, source: Path) -> None:
    """10,000 lines on two nodes, an engine of which is killed: complete, nothing twice, the texts of one engine."""
    out, errors = source.with_name("out.jsonl"), source.with_name("errors.jsonl")
    if not ray.is_initialized():
        ray.init(address=cluster, log_to_driver=False)
    with BatchJob.open(source, out, errors) as job:
        killing = threading.Thread(target=_kill_one, args=(job,), daemon=True)
        killing.start()
        answer_on_ray(job, PAIR, ServerOptions(), ["demo"], ReplicaOptions((2, 2), cores=1), lambda: None)
        killing.join(PATIENCE)
        assert (job.left, job.succeeded, job.failed) == (0, LINES, 1)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(each["custom_id"] for each in found) == Counter(str(number) for number in range(LINES))
    assert len(errors.read_text().splitlines()) == 1
    chosen = range(0, LINES, 50)
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}
    alone = LLM(**PAIR).generate(
        [_prompt(number) for number in chosen],
        [SamplingParams(temperature=0, max_tokens=4 + number % 9) for number in chosen],
    )
    assert [texts[str(number)] for number in chosen] == [each.outputs[0].text for each in alone]


def test_a_killed_command_goes_on(source: Path) -> None:
    """The command is killed in the middle and given again; it starts a cluster of its own each time."""
    out = source.with_name("out.jsonl")
    command = [sys.executable, "-m", "speculant.cli.main", "batch", str(source), str(out), "--model", "demo"]
    command += ["--draft-model", "demo", "--replicas", "1", "--replica-cores", "1", "--json"]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE
    while (not out.exists() or out.stat().st_size < 100_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    summary = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert summary["resumed"] > 0
    assert summary["lines"] == LINES + 1
    assert len(source.with_name("out.errors.jsonl").read_text().splitlines()) == 1
    found = Counter(json.loads(line)["custom_id"] for line in out.read_text().splitlines())
    assert found == Counter(str(number) for number in range(LINES))
