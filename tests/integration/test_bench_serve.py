"""`speculant bench serve`, as it is typed, against small live servers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from speculant import AsyncEngine
from speculant.errors import ConfigError, ServerError
from speculant.lab.cli import bench_serve, own_server
from tests.commands import error_of, invoke
from tests.models import Checkpoints
from tests.servers import LiveServer, serve

__all__ = ["serve"]
SHORT = ("--seconds", "0.2", "--rounds", "1", "--max-tokens", "4", "--load", "0.5", "--load", "8")
SHORTEST = ("--seconds", "0.2", "--rounds", "1", "--max-tokens", "2", "--load", "0.5")
FIGURES = {
    "requests", "completed", "refused", "failed", "seconds", "requests_per_s", "tokens_per_s", "ttft_p50_s",
    "ttft_p90_s", "ttft_p99_s", "itl_p50_s", "itl_p90_s", "itl_p99_s", "itl_mean_s", "e2e_p50_s", "e2e_p90_s",
    "e2e_p99_s", "lag_p99_s",
}  # fmt: skip


_invoke = partial(invoke, "bench", "serve", SPECULANT_MODEL=None, SPECULANT_API_KEY=None)
_error = partial(error_of, "bench", "serve")


def _engine(checkpoints: Checkpoints, **arguments: Any) -> AsyncEngine:
    return AsyncEngine(
        checkpoints.target, draft_model=checkpoints.near, spec_length=3, dtype="float64", max_num_seqs=2, **arguments
    )


def test_a_running_server_is_measured(serve: Callable[..., LiveServer], checkpoints: Checkpoints) -> None:
    server = serve(_engine(checkpoints, max_waiting=1), served_model_names=("small",), api_keys=("secret",)).ready()
    arguments = ("--url", f"{server.url}/v1", "--api-key", "secret", "--clients", "2", *SHORT)
    value = json.loads(_invoke(*arguments, "--json").stdout)
    assert value["benchmark"] == "serve"
    assert value["server"] == {"url": server.url, "model": "small", "engine": None}
    assert value["speculation"]["on"] is True
    assert value["plan"] == {"clients": 2, "loads": [0.5, 8.0], "seconds": 0.2, "rounds": 1, "seed": 0}
    assert set(value["capacity"]["runs"]) == {"plain", "speculative"}
    rate = value["capacity"]["runs"]["plain"]["requests_per_s"]["median"]
    assert [level["request_rate"] for level in value["loads"]] == [0.5 * rate, 8.0 * rate]
    for level in value["loads"]:
        outputs = level["outputs"]
        assert outputs["identical"] == {"speculative": outputs["outputs"]}
        assert outputs["outputs"] > 0
        for figures in level["runs"].values():
            assert set(figures) == FIGURES
            counts = [figures[name]["median"] for name in ("completed", "refused", "failed", "requests")]
            assert sum(counts[:3]) == counts[3]
            assert figures["failed"]["median"] == 0
    crowded = value["loads"][1]["runs"]["plain"]
    assert crowded["refused"]["median"] > 0, (
        "three have places, and eight times as many come as are served, even if the machine was slower before"
    )
    metrics = server.http.get("/metrics", headers={"Authorization": "Bearer secret"}).text
    drafts = [line for line in metrics.splitlines() if line.startswith("speculant:spec_decode_num_drafts_total")]
    assert float(drafts[0].split()[-1]) > 0


@pytest.mark.slow
def test_its_own_server_starts_and_ends(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(bench_serve.subprocess, "Popen", Popen)
    shown = _invoke(checkpoints.target, "--no-use-speculative-decoding", "--max-num-seqs", "2", *SHORT).stdout
    assert [process.returncode for process in started] == [0]
    assert shown.startswith("target at http://127.0.0.1:")
    assert "speculation is off: use_speculative_decoding is False" in shown
    assert "capacity: 2 clients" in shown
    assert "8 x capacity" in shown
    assert "first token p50 (ms)" in shown
    assert "speculative" not in shown.partition("\n")[2]
    assert "\x1b[" not in shown


def test_a_server_that_does_not_start_is_explained() -> None:
    settings = {"SPECULANT_MODEL": "demo", "SPECULANT_MAX_NUM_SEQS": "-1"}
    with pytest.raises(ServerError, match="max_num_seqs") as caught, own_server(settings):
        pass
    assert "did not start" in caught.value.problem
    assert caught.value.fix


@pytest.mark.slow
def test_sigterm_ends_the_server_too(checkpoints: Checkpoints) -> None:
    urls: list[str] = []

    def interrupted() -> None:
        with own_server({"SPECULANT_MODEL": checkpoints.target}) as url:
            urls.append(url)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        interrupted()
    assert left.value.code == 128 + signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls[0]}/health", trust_env=False)


@pytest.mark.slow
def test_speculation_off_measures_plain_alone(serve: Callable[..., LiveServer], checkpoints: Checkpoints) -> None:
    server = serve(_engine(checkpoints)).ready()
    value = json.loads(_invoke("--url", server.url, *SHORTEST, "--speculation", "off", "--json").stdout)
    assert list(value["capacity"]["runs"]) == ["plain"]
    assert value["fields"]["speculation"] is False
    assert value["plan"]["clients"] == 32


def test_the_server_s_refusal_is_shown(
    serve: Callable[..., LiveServer], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    server, prompts = serve(_engine(checkpoints)).ready(), tmp_path / "prompts.txt"
    prompts.write_text("x " * 500, encoding="utf-8")
    error = _error("--url", server.url, *SHORT, "--prompts", str(prompts))
    assert "the server completed no request" in error.problem
    assert "(400)" in error.problem


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        ((), "no model was given", "--model"),
        (("demo", "--model", "other"), "named twice", "--model"),
        (("demo", "--n", "2"), "--n has no meaning", "leave it out"),
        (("demo", "--beam-width", "2"), "--beam-width has no meaning", "leave it out"),
        (("demo", "--rounds", "0"), "rounds=0", "above 0"),
        (("demo", "--load", "0"), "load=0", "above 0"),
        (("demo", "--clients", "0"), "clients=0", "above 0"),
        (("demo", "--prompts", "random"), "vocabulary", '"code"'),
        (("demo", "--prompts", "/nowhere"), "can't be read", "file"),
        (("demo", "--dtype", "float31"), "float31", "float32"),
        (("--url", "http://127.0.0.1:1", "--max-num-seqs", "2"), "--max-num-seqs has no meaning", "speculant serve"),
        (("--url", "http://127.0.0.1:1"), "can't be reached", "--url"),
        (("--url", "nowhere"), "not the address", "http://"),
    ],
)
def test_a_mistake_is_explained(arguments: tuple[str, ...], problem: str, fix: str) -> None:
    error = _error(*arguments)
    assert problem in error.problem
    assert fix in error.fix


def test_without_httpx_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    error = _error("demo")
    assert isinstance(error, ConfigError)
    assert "pip install" in error.fix


def test_help_has_examples() -> None:
    shown = " ".join(_invoke("--help", COLUMNS="250").stdout.split())
    assert "Examples: speculant bench serve" in shown
    assert "--load" in shown
    assert "0 is greedy; higher is more varied. [default: 0]" in shown
