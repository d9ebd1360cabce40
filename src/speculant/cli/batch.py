"""`speculant batch`: a file of requests in, a file of results out."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typing_extensions import override

from speculant.cli.entry import EXIT_INTERRUPTED
from speculant.cli.flags import EngineFlags, FlagGroup, Model, accepts_flags
from speculant.cli.generate import fetch
from speculant.cli.serve import ReplicaFlags
from speculant.cli.terminal import counted_progress, end_at_once, examples, messages, print_json, progress
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.gguf_file import name_of
from speculant.params import MAX_SPECULATIVE_TOKENS
from speculant.scale import ReplicaOptions, check_ray
from speculant.serving import MOST_MESSAGES, ServerOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

    from speculant.engine import AsyncEngine
    from speculant.metrics import EngineMetrics
    from speculant.scale import BatchJob

_SHOWN_S = 0.5  # between two updates of the progress
_SEQS = 32  # that run at a time: benchmarks/batch.py
_PLENTY = 2**31  # no bound: the file's owner owns the engine
EXAMPLES = examples(
    "speculant batch requests.jsonl results.jsonl --model demo --draft-model demo",
    "speculant batch requests.jsonl results.jsonl --model ./llama --served-model-name gpt-4o-mini --json",
    "speculant batch requests.jsonl results.jsonl --model /models/llama --replicas 4 --ray-address 10.0.0.1:6379",
    "speculant batch requests.jsonl results.jsonl --errors failed.jsonl --model ./qwen --max-num-seqs 64",
)


class BatchFlags(FlagGroup):
    """The options of a server that change its answers."""

    sets = ServerOptions

    served_model_names: Annotated[list[str], "Name of the model in the requests; can be repeated."]
    tool_parser: Annotated[str, "Format of tool calls [default: that of the chat template]."]
    per_request_spec_decode_metrics: Annotated[str, "Figures on speculation in results: none, summary or detailed."]

    renamed: ClassVar[Mapping[str, str]] = {"served_model_names": "served_model_name"}

    def options(self) -> ServerOptions:
        """Return a server's options, without deadlines."""
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in self.given.items()}
        never = dict.fromkeys(
            ("body_timeout", "text_timeout", "queue_timeout", "first_token_timeout", "request_timeout")
        )
        sizes = dict.fromkeys(
            ("max_body_bytes", "max_prompts", "max_samples", "max_prompt_characters", "max_large_texts"), _PLENTY
        )
        values: dict[str, Any] = {**never, **sizes, "max_draft_tokens": MAX_SPECULATIVE_TOKENS, **given}
        return ServerOptions(max_messages=MOST_MESSAGES, max_buffered_bytes=2 * _PLENTY, **values)


class BatchEngineFlags(EngineFlags):
    """The engine's arguments, with more sequences at a time: nobody waits for a first token."""

    defaults: ClassVar[Mapping[str, object]] = {"max_num_seqs": _SEQS}

    @override
    def parsed(self) -> dict[str, Any]:
        return {"max_num_seqs": _SEQS, **super().parsed()}


class PoolFlags(ReplicaFlags):
    """Engines on a Ray cluster that take lines in turn; there is nothing to route."""

    left_out = ("routing", "imbalance")


@accepts_flags
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The requests, in OpenAI's batch format (JSONL).")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file of the results. A run that was killed goes on.")],
    target: Model = None,
    errors: Annotated[
        Path | None,
        typer.Option(help="The file of the lines that failed [default: NAME.errors.jsonl for OUT NAME.jsonl]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON at the end.")] = False,
    *,
    server: BatchFlags,
    engine: BatchEngineFlags,
    replicas: PoolFlags,
) -> None:
    """Answer a file of requests.

    Each line of IN is a request as OpenAI's batch API takes it, to /v1/chat/completions or /v1/completions. Each gets
    one line in OUT, or in the file of errors if it failed. Results are in no particular order: match them by custom_id.

    After a kill, a crash or Ctrl-C, give the same command again: finished lines stay, the others are computed. To try
    failed lines again, delete the file of errors first. The exit code is 0 when every line has a result, even if it is
    an error.
    """
    try:
        from speculant.scale import BatchJob, Origin
    except ImportError as error:
        raise ConfigError(
            f"the server's packages are not installed: {error}", 'pip install -c constraints.txt "speculant[serve]"'
        ) from error

    engine.name_model(target)
    values, options, pool = engine.values(), server.options(), replicas.options()
    config, started = EngineConfig.from_arguments(**values), time.perf_counter()
    failures = errors or out.with_name(f"{out.name.removesuffix('.jsonl')}.errors.jsonl")
    with progress(f"Reading {source}"):
        job = BatchJob.open(source, out, failures)
    with job:
        metrics: EngineMetrics | None = None
        if job.left:
            places = [fetch(config)]
            if config.tokenizer is not None:
                from speculant.models import resolve_tokenizer

                places.append(resolve_tokenizer(config.tokenizer, config.tokenizer_revision, config.download_dir))
            job.made_with(Origin.of(places, config, options), config.model)
            started, metrics = (_here if pool is None else partial(_on_ray, pool))(job, values, options)
        summary = _summary(job, time.perf_counter() - started, metrics)
    if as_json:
        print_json(summary)
    else:
        messages().print(_told(summary, out, failures))


def _here(job: BatchJob, values: dict[str, Any], options: ServerOptions) -> tuple[float, EngineMetrics | None]:
    """Answer all lines with one engine of this process; return when that began, and the engine's totals."""
    from speculant.serving import load_app

    with progress("Loading the models"):
        app = load_app(values, options, _names(values))
    engine: AsyncEngine = app.state.server.engine
    messages().print(f"speculation is {'on' if engine.speculating else 'off'}: {engine.speculation}")
    started = time.perf_counter()
    stopped_by = asyncio.run(_answer(job, engine, app))
    if stopped_by is not None:
        _stop(job, stopped_by)
    return started, engine.metrics


def _on_ray(
    pool: ReplicaOptions, job: BatchJob, values: dict[str, Any], options: ServerOptions
) -> tuple[float, EngineMetrics | None]:
    """Answer all lines with engines on a Ray cluster; return when that began, and no totals."""
    check_ray()
    from speculant.scale import answer_on_ray, connect

    with progress("Connecting to Ray"):
        connect(pool)
    started, came = time.perf_counter(), list[signal.Signals]()

    def stop(number: int, _: object) -> None:
        came.append(signal.Signals(number))
        raise KeyboardInterrupt

    for which in (signal.SIGINT, signal.SIGTERM):  # Ray has set handlers of its own
        signal.signal(which, stop)
    with counted_progress("Answering", job.count) as show:

        def shown() -> None:
            show(job.count - job.left, job.resumed, _state(job, job.completion_tokens))

        try:
            answer_on_ray(job, values, options, _names(values), pool, shown)
        except KeyboardInterrupt:
            _stop(job, came[0])
    return started, None


def _names(values: Mapping[str, Any]) -> list[str]:
    return [name_of(values["model"]), values["model"]]


async def _answer(job: BatchJob, engine: AsyncEngine, app: FastAPI) -> signal.Signals | None:
    """Answer all lines; return the signal that stopped this, if one did."""
    from speculant.scale import answer_lines, inside, places_of

    answering = asyncio.create_task(answer_lines(job, inside(app), places_of(app)))
    with _stopped_by_signals(answering) as stopped, counted_progress("Answering", job.count) as show:
        while not answering.done():
            show(job.count - job.left, job.resumed, _state(job, engine.metrics.tokens))
            await asyncio.wait({answering}, timeout=_SHOWN_S)
    await app.state.server.close()
    if not answering.cancelled():
        await answering  # raises its error
    return stopped[0] if stopped and answering.cancelled() else None


@contextmanager
def _stopped_by_signals(task: asyncio.Task[None]) -> Iterator[list[signal.Signals]]:
    """Cancel a task at Ctrl-C and SIGTERM, and list the signals that came; a second one ends the process."""
    came, loop = list[signal.Signals](), asyncio.get_running_loop()

    def stop(which: signal.Signals) -> None:
        if came:
            end_at_once()
        came.append(which)
        task.cancel()

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, stop, which)
    try:
        yield came
    finally:
        for which in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(which)


def _stop(job: BatchJob, stopped_by: signal.Signals) -> None:
    """Say how to go on, and end with the exit code of the signal."""
    job.sync()
    done = job.count - job.left
    messages().print(f"{done:,} of {job.count:,} lines have a result. To go on, give the same command again:")
    messages().print(shlex.join(["speculant", *sys.argv[1:]]))
    raise SystemExit(EXIT_INTERRUPTED if stopped_by == signal.SIGINT else 128 + stopped_by)


def _state(job: BatchJob, tokens: int) -> Callable[[float], str]:
    """Return what shows the state of a run after some seconds."""

    def shown(seconds: float) -> str:
        failed = f", {job.failed:,} failed" if job.failed else ""
        return f"{tokens / max(seconds, 1e-9):,.1f} tokens/s{failed}"

    return shown


def _summary(job: BatchJob, seconds: float, metrics: EngineMetrics | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lines": job.count,
        "succeeded": job.succeeded,
        "failed": job.failed,
        "resumed": job.resumed,
        "seconds": seconds,
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
        "completion_tokens": job.completion_tokens,
        "tokens_per_s": job.completion_tokens / seconds if job.completion_tokens else 0.0,
    }
    if metrics is None:
        return found
    return found | {
        "speculation": {
            "draft_tokens": metrics.draft_tokens,
            "accepted_tokens": metrics.accepted_tokens,
            "draft_acceptance_rate": metrics.accepted_tokens / metrics.draft_tokens if metrics.draft_tokens else 0.0,
            "tokens_per_pass": metrics.tokens / metrics.sampled_passes if metrics.sampled_passes else 0.0,
        }
    }


def _told(summary: Mapping[str, Any], out: Path, failures: Path) -> str:
    """Return the summary as text."""
    parts = [f"{summary['succeeded']:,} of {summary['lines']:,} lines answered in {summary['seconds']:.1f} s"]
    parts += [f"{summary['failed']:,} failed, see {failures}"] if summary["failed"] else []
    parts += [f"{summary['resumed']:,} had a result before"] if summary["resumed"] else []
    parts.append(f"{summary['completion_tokens']:,} tokens, {summary['tokens_per_s']:,.1f} a second")
    if "speculation" in summary:
        parts.append(f"{summary['speculation']['tokens_per_pass']:.2f} tokens for each pass of a sequence")
    return f"{out}: {'; '.join(parts)}"
