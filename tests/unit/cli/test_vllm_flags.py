"""`speculant serve` reads the flags of `vllm serve`: it follows them, names those without effect, or says why not."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest

from speculant.cli import VllmFlags
from speculant.engine import RULES, SERVER_RULES, SHORT, SWITCHES
from speculant.serving import ServerOptions
from tests.commands import error_of, invoke

Served = tuple[dict[str, Any], ServerOptions, str]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that starts a server in name only: it returns the engine's arguments, the options and the message."""

    def serve(*arguments: str) -> Served:
        found: list[Any] = []
        monkeypatch.setattr(importlib.import_module("speculant.cli.serve"), "run", lambda *given: found.append(given))
        message = invoke("serve", "demo", *arguments).stderr
        return found[0][0], found[0][1], message

    return serve


def test_flags_without_effect_are_named(served: Any) -> None:
    given = "--gpu-memory-utilization 0.9 -tp 1 --enforce-eager --trust-remote-code --disable-log-requests".split()
    more = "--reasoning-parser deepseek_r1 --enable-auto-tool-choice --no-enable-chunked-prefill".split()
    values, options, message = served(*given, *more, "--served-model-name", "x")
    assert (values, options) == ({"model": "demo"}, ServerOptions(served_model_names=("x",)))
    for flag in (*given, *more):
        if flag.startswith("--"):
            assert flag.replace("--no-", "--") in message
    assert served()[2] == ""


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--seed", "42"], {"seed": 42}),
        (["--max_model_len", "512"], {"max_model_len": 512}),
        (["--kv-cache-memory-bytes", "1GiB"], {"kv_memory": "1GiB"}),
        (["--model-impl", "transformers"], {"model_backend": "transformers"}),
        (["--scheduling-policy", "fcfs"], {"scheduling_policy": "first-come"}),
        (["--generation-config", "vllm"], {"generation_config": "vllm"}),
        (["--override-generation-config", '{"top_k": 5}'], {"override_generation_config": {"top_k": 5}}),
        (["--speculative_config", '{"method": "ngram_gpu"}'], {"speculative_config": {"method": "ngram"}}),
        (["--root-path", "/llm"], {"root_path": "/llm"}),
        (["--ssl-certfile", "a", "--ssl-keyfile", "b"], {"ssl_certfile": "a", "ssl_keyfile": "b"}),
        (["--tool-call-parser", "llama3_json"], {"tool_parser": "llama3"}),
        (["--tool-call-parser", "hermes"], {"tool_parser": "hermes"}),
        (["--tool-call-parser", "glm45"], {"tool_parser": "glm"}),
    ],
    ids=str,
)
def test_flags_are_followed(arguments: list[str], value: dict[str, Any], served: Any) -> None:
    values, options, message = served(*arguments)
    assert vars(options).items() | values.items() >= value.items() if _plain(value) else values.items() >= value.items()
    assert message == ""


def _plain(value: dict[str, Any]) -> bool:
    return value.keys() <= vars(ServerOptions()).keys()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("-tp 2", "one process"),
        ("--enable-lora", "LoRA"),
        ("--lora-modules a=b", "LoRA"),
        ("--uds /tmp/x", "port"),
        ("--tokenizer-mode mistral", "tokenizer.json"),
        ("--tool-call-parser olmo3", "unknown"),
        ("--ssl-keyfile x", "certificate"),
        ("--root-path llm", "prefix"),
        ("--speculative-config method=ngram,rejection_sample_method=synthetic", "not the model's"),
    ],
)
def test_other_flags_say_why_not(arguments: str, problem: str) -> None:
    error = error_of("serve", "demo", *arguments.split())
    assert problem in error.problem
    assert error.fix


def test_every_argument_of_the_table_is_a_flag() -> None:
    assert {*RULES, *SERVER_RULES} - {"served_model_name"} <= {*VllmFlags.names()}
    assert {*SWITCHES, *SHORT} <= {*RULES, *SERVER_RULES}
    assert not RULES.keys() & SERVER_RULES
    assert "--gpu-memory-utilization" not in invoke("serve", "--help").stdout


def test_the_log_is_silent_about_what_the_command_has_named(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speculant"):
        served("--enforce-eager")
    assert caplog.records == []
