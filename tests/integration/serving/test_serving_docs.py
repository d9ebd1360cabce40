"""docs/serving.md lists every route, field and metric, and its program runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from speculant.cli.serve import ServerFlags
from speculant.serving.openai.protocol import ACCEPTED, REFUSED, ChatBody, CompletionBody, ResponseBody
from speculant.serving.options import ServerOptions
from tests.servers import LiveServer

TEXT = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
_OWN = {"model", "messages", "prompt", "stream", "stream_options", "speculant", "parallel_tool_calls", "modalities"}


def test_the_program_runs(demo: LiveServer) -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
    scope: dict[str, Any] = {}
    exec(compile(program.replace("http://127.0.0.1:8000", demo.url), "serving.md", "exec"), scope)
    assert scope["call"].name == "weather"


def test_every_option_is_a_flag_and_documented() -> None:
    options = {field.name for field in dataclasses.fields(ServerOptions)}
    assert set(ServerFlags.names()) == options
    flags = ["--" + ServerFlags.renamed.get(name, name).replace("_", "-") for name in options]
    assert [flag for flag in flags if f"`{flag}`" not in TEXT] == []


def test_every_field_is_documented() -> None:
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields, *ResponseBody.model_fields} - _OWN
    assert [name for name in sorted(fields) if f"`{name}`" not in TEXT] == []
    assert [name for name in (*REFUSED, *ACCEPTED) if f"`{name}`" not in TEXT] == []


def test_every_route_and_metric_is_documented(demo: LiveServer) -> None:
    paths = {path.replace("{model}", "{id}") for path in demo.http.get("/openapi.json").json()["paths"]}
    assert [path for path in paths if path not in TEXT] == []
    page = demo.http.get("/metrics").text
    names = {name.removesuffix("_created") for name in re.findall(r"^# TYPE speculant:(\w+) ", page, re.MULTILINE)}
    assert [name for name in sorted(names) if f"`{name.removesuffix('_total')}" not in TEXT] == []
