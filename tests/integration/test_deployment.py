"""The files in deploy/ fit the server: the dashboard's metrics, the unit's deadlines, the image's files and flags."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculant import AsyncEngine
from speculant.cli import app
from speculant.serving import LAST_EVENTS, ServerOptions
from tests.models import Checkpoints
from tests.servers import LiveServer, serve

__all__ = ["serve"]
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "speculant.service"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return dict(json.loads((DEPLOY / "grafana" / "speculant.json").read_text(encoding="utf-8")))


def _expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query")


def test_panels_have_ids_and_places_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]
        assert panel["type"] == "row" or panel["targets"]
        names = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(names)) == len(names)


def test_a_dashboard_s_variables_are_declared(dashboard: dict[str, Any]) -> None:
    declared = {each["name"] for each in dashboard["templating"]["list"]}
    assert declared == {"datasource", "prefix", "model"}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard)))
    assert used - {"__rate_interval", "__all"} == declared
    prefixes = next(each for each in dashboard["templating"]["list"] if each["name"] == "prefix")
    assert prefixes["query"] == "speculant,vllm"


@pytest.mark.parametrize(
    ("prefix", "own"), [("speculant", "speculant"), ("vllm", "vllm"), ("vllm", "speculant"), ("vllm", "own")]
)
def test_every_metric_of_the_dashboard_is_served(
    dashboard: dict[str, Any], serve: Callable[..., LiveServer], checkpoints: Checkpoints, prefix: str, own: str
) -> None:
    """prefix: the dashboard's variable. own: the server's --metrics-prefix, beside which it has vLLM's names."""
    engine = AsyncEngine(checkpoints.target, draft_model=checkpoints.near, spec_length=3)
    server = serve(engine, metrics_prefix=own).ready()
    server.post("/v1/completions", prompt="def f", max_tokens=20, temperature=0, ignore_eos=True)
    page = server.http.get("/metrics").text
    samples = dict(re.findall(rf"^{prefix}:(\w+)(\{{.*\}})? ", page, re.MULTILINE))
    expressions = list(_expressions(dashboard))
    named = {name for each in expressions for name in re.findall(r"\$\{prefix\}:(\w+)", each)}
    assert len(named) > 12
    assert named - set(samples) == set()
    (pattern,) = {each for text in expressions for each in re.findall(r'__name__=~"([^"]+)"', text)}
    assert len(re.findall(rf"^{pattern}{{", page, re.MULTILINE)) == 1, "with any prefix, and counted once"
    for expression in expressions:
        for label, name in re.findall(r"by \((\w+)\) \(rate\(\$\{prefix\}:(\w+)", expression):
            assert f'{label}="' in samples[name], expression
    assert all('model_name="' in samples[name] for name in named)


def _unit() -> ConfigParser:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT, encoding="utf-8")
    return unit


def _starts(*arguments: str) -> None:
    """Check that the server's command has these arguments: its only error is the missing model."""
    result = CliRunner().invoke(app, [*arguments], env={"SPECULANT_MODEL": None})
    assert "no model was given" in str(result.exception), result.output


def test_the_unit_waits_longer_than_the_server_drains() -> None:
    service = _unit()["Service"]
    _, *arguments = service["ExecStart"].split()
    _starts(*arguments)
    drain = float(arguments[arguments.index("--drain-timeout") + 1])
    assert drain == ServerOptions().drain_timeout
    assert float(service["TimeoutStopSec"]) > drain + LAST_EVENTS
    assert service["DynamicUser"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    copy.write_text(text.replace("/opt/speculant/bin/speculant", sys.executable), encoding="utf-8")
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert [line for line in result.stderr.splitlines() if UNIT.name in line] == []


def _stages() -> list[str]:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]


def test_the_image_is_built_from_what_is_there() -> None:
    build, final = _stages()
    copied = [name for line in re.findall(r"^COPY (?!--)(.*)$", build, re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "src", "csrc"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert "-c constraints.txt" in build
    assert re.findall(r"^COPY (.*)$", final, re.MULTILINE) == ["--from=build /opt/speculant /opt/speculant"]


def test_the_image_has_no_compiler_and_no_root() -> None:
    build, final = _stages()
    assert "g++" in build
    assert "g++" not in final
    assert int(re.findall(r"^USER (\d+)$", final, re.MULTILINE)[-1]) > 0
    assert "HEALTHCHECK" in final


def test_the_image_s_command_exists() -> None:
    final = _stages()[1]
    commands = dict(re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", final, re.MULTILINE))
    _, *arguments = json.loads(commands["ENTRYPOINT"])
    _starts(*arguments)
    assert json.loads(commands["CMD"]) == ["demo", "--draft-model", "demo"]


@pytest.mark.parametrize("given", ["{port}", "--port\0{port}", "--port={port}"])
def test_the_image_s_health_check_follows_the_port(
    given: str, serve: Callable[..., LiveServer], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """It reads the command line of the container's first process; without a port there, it is the entry point's."""
    check = json.loads(re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", _stages()[1], re.MULTILINE)[0])
    entry = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", _stages()[1], re.MULTILINE)[0])
    server = serve(AsyncEngine(checkpoints.target)).ready()
    port = server.url.rpartition(":")[2]
    line = tmp_path / "cmdline"
    if given == "{port}":
        line.write_text("\0".join([*entry[:-1], port, "demo"]))
    else:
        line.write_text("\0".join([*entry, "demo", given.format(port=port), "--log-level", "info"]))
    command = [sys.executable, *(argument.replace("/proc/1/cmdline", str(line)) for argument in check[1:])]
    assert subprocess.run(command, check=False).returncode == 0
    server.in_loop(lambda: setattr(server.state, "draining", True))
    server.until(lambda: server.state.draining)
    assert subprocess.run(command, check=False).returncode == 1


def test_the_image_s_context_has_its_parts_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    first, *patterns = [line for line in lines if line and not line.startswith("#")]
    assert first == "*"
    copied = [
        name for line in re.findall(r"^COPY (?!--)(.*)$", _stages()[0], re.MULTILINE) for name in line.split()[:-1]
    ]
    assert sorted(line[1:] for line in patterns if line.startswith("!")) == sorted(copied)
    assert "**/*.so" in patterns, "a library for the processor of the machine that builds the image"
