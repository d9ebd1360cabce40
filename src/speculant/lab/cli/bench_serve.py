"""`speculant bench serve`: how much load a server handles, and how long its users wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from speculant.cli.chat_backends import RemoteChatBackend
from speculant.cli.flags import NEW_TOKENS, EngineFlags, accepts_flags
from speculant.cli.generate import fetch
from speculant.cli.terminal import examples, messages, print_json, progress, results
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.bench.workloads import CODE, server_prompts
from speculant.lab.cli.bench_io import AsJson, BenchSampling, History, OutputFiles
from speculant.lab.cli.progress import progress_of_runs

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
    history: History = None,
    *,
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
    from speculant.lab.bench.serving_load import Load, LoadPlan, connector, measure_serving, serving_document

    files = OutputFiles(history=history)
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
    if history is not None:
        messages().print(f"written: {history}", style="dim")
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
    from speculant.lab.cli.server_process import own_server

    fetch(config)
    with ExitStack() as running:
        with progress("Starting the server"):
            address = running.enter_context(own_server(engine.environment()))
        yield address


def _modes(server: RemoteChatBackend, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of each mode's requests: plain ones and, if the server drafts for them, speculative ones."""
    from speculant.lab.bench.measuring import PLAIN, SPECULATIVE

    every = {"model": server.served["id"], **fields}
    modes = {PLAIN: {**every, "speculation": False} if server.can_switch else every}
    if (server.served.get("speculation") or {}).get("on") and fields.get("speculation") is not False:
        modes[SPECULATIVE] = every
    return modes


def _show(introduction: str, value: Mapping[str, Any]) -> None:
    from speculant.lab.bench.report import conclusions, described_rounds, tables

    console, plan = results(), value["plan"]
    console.print(introduction)
    loop = f"{plan['clients']} clients, each sending its next request as soon as it has an answer"
    console.print(f"\ncapacity: {loop}; {described_rounds(plan['rounds'])}\n", style="bold")
    for table in tables("serve", value["capacity"]):
        console.print(table)
    for level in value["loads"]:
        console.print(f"\n{level['load']:g} x capacity: {level['request_rate']:.2f} requests/s arrive\n", style="bold")
        for table in tables("serve", level):
            console.print(table)
        for line in conclusions(level):
            console.print(line)
    for note in value["notes"]:
        console.print(f"note: {note}", style="yellow")
