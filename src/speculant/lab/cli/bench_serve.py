"""`speculant bench serve`: how much load a server handles, and how long its users wait."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from speculant.cli import (
    LISTENING,
    NEW_TOKENS,
    EngineFlags,
    RemoteChatBackend,
    accepts_flags,
    examples,
    fetch,
    messages,
    print_json,
    progress,
    results,
)
from speculant.config import EngineConfig
from speculant.errors import ConfigError, ServerError
from speculant.lab.bench import CODE, server_prompts
from speculant.lab.cli.bench_io import AsJson, BenchSampling, HistoryFlags, shown_table
from speculant.lab.cli.progress import progress_of_runs

_COMMAND = (sys.executable, "-m", "speculant.cli.main", "serve", "--host", "127.0.0.1", "--port", "0")
_POLL = 0.05  # seconds between looks at a starting server
_END = 40.0  # seconds before it is killed
_MOST_QUOTED = 2000  # characters of its output in an error


@contextmanager
def own_server(settings: Mapping[str, str]) -> Iterator[str]:
    """Run `speculant serve` on a free port of this machine, and yield its address once it serves requests.

    settings: environment variables; every flag of the engine has one. The process ends with the block, after SIGTERM
    too. Raises ServerError, with the server's output, if it ends before.
    """
    with tempfile.TemporaryDirectory() as folder, _sigterm_exits():
        log = Path(folder) / "log"
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **settings},
            )
        try:
            yield _address(process, log)
        finally:
            _end(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server prints its address and answers there."""
    while process.poll() is None:
        found = re.search(rf"^{LISTENING} (\S+)", _text(log), re.MULTILINE)
        if found and _is_healthy(found[1]):
            return found[1]
        time.sleep(_POLL)
    text = _text(log)
    if explained := re.search(r"^error: (.*)\n  fix: (.*)", text, re.MULTILINE):
        raise ServerError(f"the server did not start: {explained[1]}", explained[2])
    raise ServerError(f"the server ended at once: {text[-_MOST_QUOTED:].strip()}", "start it with `speculant serve`.")


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _is_healthy(url: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_END)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Raise SystemExit at SIGTERM, which would end this process at once and leave the server running."""
    if threading.current_thread() is not threading.main_thread():  # there are no signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


EXAMPLES = examples(
    "speculant bench serve demo --draft-model demo",
    "speculant bench serve ./llama --draft-model ./llama-small --max-num-seqs 16 --seconds 60 --json",
    "speculant bench serve demo --draft-model demo --max-waiting 8 --load 1 --load 4",
    "speculant bench serve --url http://127.0.0.1:8000 --clients 64 --max-tokens 64 --prompts prompts.jsonl",
)
CLIENTS = 32  # for a server whose max_num_seqs is unknown
PROMPTS = 256  # built-in ones
LOADS = (0.5, 1.0, 2.0)
NO_SWITCH = "speculation can't be switched on this server: it was measured as it is"
_UNFIT = ("n", "beam_width")  # with these, tokens have no times of their own

Target = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Serve this model: a folder or GGUF file, a Hugging Face id, or demo."),
]
Url = Annotated[str | None, typer.Option(help="Measure this server instead; MODEL is its model's name.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="SPECULANT_API_KEY", help="The server's key. [env: SPECULANT_API_KEY]", show_envvar=False),
]
Prompts = Annotated[
    str, typer.Option(help="code (built in), or a file: a prompt per line, or JSON lines in the form of Spec-Bench.")
]
Loads = Annotated[
    list[float] | None,
    typer.Option("--load", help="Arrivals as a multiple of the capacity; can be repeated. [default: 0.5, 1, 2]"),
]
Seconds = Annotated[float, typer.Option(help="Seconds during which requests arrive, in each run.")]
Rounds = Annotated[int, typer.Option(help="Repetitions of each run.")]
Clients = Annotated[
    int | None,
    typer.Option(
        help="Clients that measure the capacity, at least as many as sequences run at a time."
        f" [default: max_num_seqs; {CLIENTS} with --url]"
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the times at which requests arrive.")]


@accepts_flags
def serve(
    target: Target = None,
    url: Url = None,
    api_key: ApiKey = None,
    prompts: Prompts = CODE,
    loads: Loads = None,
    seconds: Seconds = 10.0,
    rounds: Rounds = 3,
    clients: Clients = None,
    arrival_seed: Seed = 0,
    as_json: AsJson = False,
    *,
    output: HistoryFlags,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure a server under load: throughput and latencies, with speculation on and off.

    First the capacity: requests per second without speculation, while each client sends its next request as soon as it
    has an answer. Then requests arrive at random times, at multiples of the capacity, whether or not earlier ones were
    answered. Both modes get the same requests at the same times, in turn. Latencies count from the time at which a
    request was due.

    Without --url a server is started in a process of its own, which ends with the command.
    """
    from speculant.lab.bench import Load, LoadPlan, connector, measure_serving, serving_document

    files = output.files()
    engine.name_model(target)
    config = None if url else EngineConfig.from_arguments(**engine.values())
    named = engine.remote_model() if url else None
    most = clients if clients is not None else config.max_num_seqs if config else CLIENTS
    plan = LoadPlan(most, tuple(loads or LOADS), seconds, rounds, arrival_seed)
    fields, chosen, connect = _fields(sampling), server_prompts(prompts, PROMPTS), connector(api_key)
    with _running(url, config, engine) as address:
        server = RemoteChatBackend(address, target if url and target else named, api_key)
        load, modes = Load(partial(connect, address), chosen), _modes(server, fields)
        with progress_of_runs(plan.num_runs(len(modes))) as runs:
            measured = measure_serving(load, modes, plan, runs.begin)
    value = {
        "benchmark": "serve",
        "server": {"url": address, "model": server.served["id"], "engine": None if config is None else asdict(config)},
        "speculation": server.served.get("speculation"),
        "prompts": {"source": prompts, "number": len(chosen)},
        "fields": fields,
        **serving_document(measured, plan, comparable=_comparable(sampling)),
    }
    value["notes"] += [] if server.can_switch else [NO_SWITCH]
    files.record(value)
    if files.history is not None:
        messages().print(f"written: {files.history}", style="dim")
    if as_json:
        print_json(value)
    else:
        _show(server.introduction, value)


def _fields(sampling: BenchSampling) -> dict[str, Any]:
    """Return the fields of all requests. Raises ConfigError for settings that can't be measured."""
    if unfit := [name for name in _UNFIT if name in sampling.given]:
        flag = unfit[0].replace("_", "-")
        raise ConfigError(f"--{flag} has no meaning under load", "leave it out: each request has one answer.")
    sampling.params()  # checks ranges
    return {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling.fields()}


def _comparable(sampling: BenchSampling) -> bool:
    params = sampling.params()
    return params.greedy or params.seed is not None


@contextmanager
def _running(url: str | None, config: EngineConfig | None, engine: EngineFlags) -> Iterator[str]:
    """Yield the address of the server. Without a URL it is started, and ends with the block."""
    if config is None:
        assert url is not None
        yield url.rstrip("/").removesuffix("/v1")
        return
    fetch(config)
    with ExitStack() as running:
        with progress("Starting the server"):
            address = running.enter_context(own_server(engine.environment()))
        yield address


def _modes(server: RemoteChatBackend, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of each mode's requests: plain ones and, if the server drafts for them, speculative ones."""
    from speculant.lab.bench import PLAIN, SPECULATIVE

    every = {"model": server.served["id"], **fields}
    modes = {PLAIN: {**every, "speculation": False} if server.can_switch else every}
    if (server.served.get("speculation") or {}).get("on") and fields.get("speculation") is not False:
        modes[SPECULATIVE] = every
    return modes


def _show(introduction: str, value: Mapping[str, Any]) -> None:
    from speculant.lab.bench import conclusions, described_rounds, tables

    console, plan = results(), value["plan"]
    console.print(introduction)
    loop = f"{plan['clients']} clients, each sending its next request as soon as it has an answer"
    console.print(f"\ncapacity: {loop}; {described_rounds(plan['rounds'])}\n", style="bold")
    for table in tables("serve", value["capacity"]):
        console.print(shown_table(table))
    for level in value["loads"]:
        console.print(f"\n{level['load']:g} x capacity: {level['request_rate']:.2f} requests/s arrive\n", style="bold")
        for table in tables("serve", level):
            console.print(shown_table(table))
        for line in conclusions(level):
            console.print(line)
    for note in value["notes"]:
        console.print(f"note: {note}", style="yellow")
