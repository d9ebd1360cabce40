"""`speculant batch` with the embedded pair: the server's answers, signals, and what it says."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from speculant import AsyncEngine
from speculant.models import resolve_source
from tests.batches import check_complete, read, request, write
from tests.commands import error_of, invoke
from tests.servers import LiveServer

SCALING = Path(__file__).parents[3] / "docs/scaling.md"
PAIR = ("--model", "demo", "--draft-model", "demo")
CHAT = {"messages": [{"role": "user", "content": "Sort a list."}], "max_tokens": 12}
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"prompt": f"def f{n}(x):\n", "max_tokens": 16, "temperature": 0}) for n in range(6)),
    *(("/v1/completions", {"prompt": "import", "max_tokens": 16, "seed": n}) for n in range(3)),
    ("/v1/completions", {"prompt": ["a =", "b ="], "n": 2, "max_tokens": 8, "seed": 5, "logprobs": 2}),
    ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    ("/v1/chat/completions", {**CHAT, "seed": 9, "logprobs": True}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "x", "model": "another"}),
    ("/v1/completions", {"prompt": [7] * 100_000}),
]
LINES = [
    {"custom_id": f"c{place}", "method": "POST", "url": url, "body": body} for place, (url, body) in enumerate(BODIES)
]
_CHANCE = frozenset({"id", "created"})  # differ between two answers to one request


_run = partial(invoke, "batch")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Return a server of the embedded pair."""
    live = LiveServer(AsyncEngine("demo", draft_model="demo")).ready()
    yield live
    live.stop()


def test_results_are_the_answers_of_the_server(server: LiveServer, tmp_path: Path) -> None:
    source, out, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.errors.jsonl"))
    # a fixed length: the engine may choose not to draft on a busy machine
    summary = json.loads(_run(write(source, LINES), out, *PAIR, "--spec-length", "3", "--json").stdout)
    check_complete(LINES, out, errors)
    found = {result["custom_id"]: result["response"] for result in read(out, errors)}
    for line in LINES:
        response = server.http.post(line["url"], json=line["body"])
        assert found[line["custom_id"]]["status_code"] == response.status_code
        expected, body = response.json(), found[line["custom_id"]]["body"]
        for answer in (expected, body):
            for name in _CHANCE & answer.keys():
                del answer[name]
            answer.get("usage", {}).pop("prompt_tokens_details", None)  # cached tokens depend on the neighbours
        assert body == expected
    failed = [result["response"]["status_code"] for result in read(errors)]
    assert sorted(failed) == [400, 400, 404]
    assert (summary["lines"], summary["succeeded"], summary["failed"], summary["resumed"]) == (15, 12, 3, 0)
    assert summary["completion_tokens"] == sum(
        result["response"]["body"]["usage"]["completion_tokens"] for result in read(out)
    )
    assert summary["speculation"]["accepted_tokens"] > 0


def test_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.findall(r"^```sh\n(.*?)^```$", SCALING.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    noting = f'speculant() {{ printf "%s\\0" "$@"; }}\nset -e\n{block}'  # the command itself runs in this process
    noted = subprocess.run(["bash", "-c", noting], cwd=tmp_path, check=True, capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    command, *arguments = noted.stdout.split("\0")[:-1]
    assert command == "batch"
    _run(*arguments)
    assert {result["custom_id"] for result in read(tmp_path / "results.jsonl")} == {"a", "b"}


def test_finished_batch_loads_no_model(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [request(1), "nonsense"]), tmp_path / "out.jsonl"
    first = _run(source, out, *PAIR)
    assert "1 of 2 lines answered" in first.stderr
    assert f"1 failed, see {tmp_path / 'out.errors.jsonl'}" in first.stderr
    again = _run(source, out, "--model", tmp_path / "no-model")
    assert "2 had a result before" in again.stderr


def test_a_run_is_not_continued_with_another_model(tmp_path: Path) -> None:
    """Whose results would stand among the first ones. Speed may change."""
    source, out = write(tmp_path / "in.jsonl", [request(1)]), tmp_path / "out.jsonl"
    _run(source, out, *PAIR)
    write(source, [request(1), request(2)])
    before = out.read_bytes()
    draft = resolve_source("demo", "draft")
    for other, what in (
        (("--model", draft), f"another model than {draft}"),
        ((*PAIR, "--dtype", "float64"), "other settings"),
    ):
        assert f"were made with {what}" in str(error_of("batch", source, out, *other))
        assert out.read_bytes() == before
    _run(source, out, *PAIR, "--max-num-seqs", "3", "--no-use-speculative-decoding")
    assert {result["custom_id"] for result in read(out)} == {"r1", "r2"}


def test_lines_with_the_same_beginning_share_it(tmp_path: Path) -> None:
    beginnings = [f"# {letter}\n" + "x = [1, 2, 3]\n" * 20 for letter in "abcd"]
    lines = [request(number, beginnings[number % 4] + f"y{number} =") for number in range(40)]
    arguments = (*PAIR, "--max-num-seqs", "2", "--kv-memory", "2MiB", "--json")
    found = json.loads(_run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", *arguments).stdout)
    least = 32 * 192  # whole blocks of all lines but the first two of each beginning, which may start in one step
    assert found["cached_tokens"] >= least > 0.7 * found["prompt_tokens"]


def test_names_of_the_model_are_its_own(tmp_path: Path) -> None:
    line = request(1)
    line["body"]["model"] = "gpt-4o-mini"
    source, out = write(tmp_path / "in.jsonl", [line]), tmp_path / "results"
    _run(source, out, *PAIR, "--served-model-name", "gpt-4o-mini", "--errors", tmp_path / "failed")
    assert [result["response"]["body"]["model"] for result in read(out)] == ["gpt-4o-mini"]
    assert read(tmp_path / "failed") == []


def _start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "speculant.cli.main", "batch", *map(str, arguments), *PAIR]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _long(count: int, tokens: int = 48) -> list[dict[str, Any]]:
    """Return lines whose answers have many tokens, in groups with the same beginning."""
    lines = [request(number, f"def g{number % 3}(x):\n" * 4 + f"# {number}\n") for number in range(count)]
    for line in lines:
        line["body"]["max_tokens"] = tokens
    return lines


def _size(out: Path) -> int:
    return out.stat().st_size if out.exists() else 0


def _wait_for_results(process: subprocess.Popen[str], out: Path, size: int) -> None:
    """Wait until the results have grown."""
    deadline = time.monotonic() + 120
    while process.poll() is None and _size(out) <= size:
        assert time.monotonic() < deadline, "no result came"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("signal_", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_signal_stops_and_says_how_to_go_on(signal_: signal.Signals, code: int, tmp_path: Path) -> None:
    lines = _long(300)
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = _start(source, out)
    _wait_for_results(process, out, 0)
    process.send_signal(signal_)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "give the same command again" in said
    assert "Traceback" not in said
    done = read(out)
    assert 0 < len(done) < len(lines)
    assert f"{len(done)} of 300 lines have a result" in said


def _kill_until_done(kills: int, count: int, folder: Path, seed: int) -> None:
    """Kill a command this many times at random moments, let it end, and check its results."""
    chance, lines = random.Random(seed), _long(count)
    source, out, errors = write(folder / "in.jsonl", lines), folder / "out.jsonl", folder / "out.errors.jsonl"
    in_answers = 0
    for place in range(kills):
        process, before = _start(source, out), _size(out)
        if place % 5 == 0:
            time.sleep(chance.uniform(0, 4))  # at any moment, most of them before the first answer
        else:
            _wait_for_results(process, out, before)
            time.sleep(chance.uniform(0, 0.5))
        assert process.poll() is None, "the batch ended before its last kill: give it more lines"
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        in_answers += _size(out) > before
    assert in_answers >= kills // 2
    process = _start(source, out)
    _, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    check_complete(lines, out, errors)
    assert read(errors) == []


@pytest.mark.slow  # unit/scale/test_batch_job.py has a kill at every byte
def test_a_few_kills_lose_nothing(tmp_path: Path) -> None:
    _kill_until_done(3, 150, tmp_path, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twelve_kills_lose_nothing(tmp_path: Path) -> None:
    _kill_until_done(12, 500, tmp_path, seed=2)
