"""docs/serving.md lists every route, field and metric, and its program runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from tools import serving_tables

from speculant.cli import ServerFlags
from speculant.serving import ACCEPTED, REFUSED, ChatBody, ServerOptions
from tests.servers import LiveServer

TEXT = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_program_runs(demo: LiveServer) -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
    scope: dict[str, Any] = {}
    exec(compile(program.replace("http://127.0.0.1:8000", demo.url), "serving.md", "exec"), scope)
    assert scope["call"].name == "weather"


def test_every_option_is_a_flag() -> None:
    assert set(ServerFlags.names()) == {field.name for field in dataclasses.fields(ServerOptions)}


def test_the_tables_are_those_of_the_code() -> None:
    assert serving_tables.updated(TEXT) == TEXT, "run: python tools/serving_tables.py"
    assert [name for name in (*ChatBody.model_fields, *REFUSED, *ACCEPTED) if f"`{name}`" not in TEXT] == []
    assert "| `--queue-timeout`: 60 s |" in TEXT


def test_every_route_and_metric_is_documented(demo: LiveServer) -> None:
    paths = {path.replace("{model}", "{id}") for path in demo.http.get("/openapi.json").json()["paths"]}
    assert [path for path in paths if path not in TEXT] == []
    page = demo.http.get("/metrics").text
    names = {name.removesuffix("_created") for name in re.findall(r"^# TYPE speculant:(\w+) ", page, re.MULTILINE)}
    assert [name for name in sorted(names) if f"`{name.removesuffix('_total')}" not in TEXT] == []
