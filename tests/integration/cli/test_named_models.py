"""Every command takes its model as an argument and as `--model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculant.cli import all_commands
from speculant.errors import ConfigError, RequestError
from tests.commands import error_of, invoke
from tests.models import Checkpoints

NOWHERE = "./no-such-model"
LINE = {"custom_id": "1", "url": "/v1/completions", "body": {"model": "m", "prompt": "Hi"}}
BEFORE = {  # by command: what precedes the argument MODEL
    "generate": ["generate", "Hi"],
    "chat": ["chat"],
    "serve": ["serve"],
    "batch": ["batch", "IN", "OUT"],
    "doctor": ["doctor"],
    "check-lossless": ["check-lossless"],
    "check-pair": ["check-pair"],
    "bench": ["bench"],
    "bench throughput": ["bench", "throughput"],
    "bench latency": ["bench", "latency"],
    "bench compare": ["bench", "compare"],
    "bench sweep": ["bench", "sweep"],
    "bench serve": ["bench", "serve"],
    "bench quality": ["bench", "quality"],
    "quantize": ["quantize"],
    "inflate": ["inflate"],
}
AFTER = {
    "serve": ["--port", "0"],
    "check-pair": ["demo"],
    "bench sweep": ["--draft-model", "demo"],
    "bench quality": ["--text", "IN"],
    "quantize": ["OUT"],
    "inflate": ["OUT", "--shape", "1b"],
}
WITHOUT = {"cache", "demo", "plan", "train"}  # no model, the embedded models, and models that are made


@pytest.mark.parametrize("flag", [(), ("--model",)], ids=["argument", "flag"])
@pytest.mark.parametrize("command", BEFORE)
def test_a_model_is_an_argument_or_a_flag(command: str, flag: tuple[str, ...], tmp_path: Path) -> None:
    places = {"IN": tmp_path / "in.jsonl", "OUT": tmp_path / "out"}
    places["IN"].write_text(json.dumps(LINE), encoding="utf-8")
    given: list[Any] = [*BEFORE[command], *flag, NOWHERE, *AFTER.get(command, ())]
    assert NOWHERE.removeprefix("./") in str(error_of(*(places.get(each, each) for each in given)))


def test_every_command_is_tried() -> None:
    assert {name.split()[0] for name in BEFORE} == all_commands().keys() - WITHOUT


@pytest.mark.parametrize("command", [each for each in BEFORE if each != "bench"])
def test_two_models_are_refused(command: str, tmp_path: Path) -> None:
    places = {"IN": tmp_path / "in.jsonl", "OUT": tmp_path / "out"}
    filled = {"bench quality": ["B"]}.get(command, [])
    given: list[Any] = [*BEFORE[command], "demo", *filled, *AFTER.get(command, ()), "--model", NOWHERE]
    error = error_of(*(places.get(each, each) for each in given))
    assert error.problem == "the model is named twice"


@pytest.mark.parametrize("command", ["generate Hi", "chat", "quantize", "inflate", "bench quality", "check-pair"])
def test_a_command_without_a_model_says_so(command: str) -> None:
    error = error_of(*command.split())
    assert isinstance(error, ConfigError)
    assert error.problem.startswith("no model was ")


def test_a_prompt_s_file_leaves_the_argument_to_the_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hi", encoding="utf-8")
    few = ("--max-tokens", "3", "--ignore-eos", "--prompt-file", file)
    assert "3 tokens in" in invoke("generate", *few, checkpoints.target).stderr
    assert isinstance(error_of("generate", "Hi", checkpoints.target, *few), RequestError)


def test_bench_of_a_model_measures_its_latency(checkpoints: Checkpoints) -> None:
    quick = ("--rounds", "1", "--num-prompts", "1", "--max-tokens", "4", "--json")
    value = json.loads(invoke("bench", checkpoints.target, *quick).stdout)
    assert value["benchmark"] == "latency"
    assert "throughput" in invoke("bench", "--help").stdout


def test_a_server_gets_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[dict[str, Any]] = []
    monkeypatch.setattr("speculant.cli.serve.run", lambda values, *_: got.append(values))
    invoke("serve", "demo", "--chat-template", "{{ messages }}")
    invoke("serve", "demo")
    assert [each.get("chat_template") for each in got] == ["{{ messages }}", None]
