"""Options of replicas, the number of them, and what needs Ray."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve.config import AutoscalingContext
from typer.testing import CliRunner

from speculant.cli import app
from speculant.errors import ConfigError
from speculant.scale import (
    FULL,
    PROXIES,
    ReplicaOptions,
    needed,
    read_arguments,
    replica_range,
    wanted_replicas,
    with_absolute_paths,
)
from tests.commands import error_of


@pytest.mark.parametrize(("text", "wanted"), [("4", (4, 4)), ("1:4", (1, 4)), (3, (3, 3)), ("2:2", (2, 2))])
def test_ranges_are_read(text: Any, wanted: tuple[int, int]) -> None:
    assert replica_range(text) == wanted


@pytest.mark.parametrize("text", ["", "x", "1:", ":4", "1:2:3", "1-4", "1.5", True, None])
def test_other_texts_are_no_ranges(text: Any) -> None:
    with pytest.raises(ConfigError, match="not N or LOW:HIGH"):
        replica_range(text)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"replicas": (0, 2)}, "replicas=0:2"),
        ({"replicas": (3, 2)}, "replicas=3:2"),
        ({"replicas": (-1, -1)}, "replicas=-1:-1"),
        ({"cores": 0}, "replica_cores=0"),
        ({"routing": "loads"}, "replica_routing='loads'"),
        ({"imbalance": -1}, "replica_imbalance=-1"),
    ],
)
def test_options_are_checked(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ReplicaOptions(**values)


def test_arguments_are_read_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULANT_API_KEY", "sk-1")
    monkeypatch.setenv("SPECULANT_DTYPE", "float64")
    values, options, replicas = read_arguments(
        {
            "model": "demo",
            "max_num_seqs": "8",
            "metrics_without_key": "true",
            "served_model_names": "a,b",
            "queue_timeout": "null",
            "replicas": "1:4",
            "replica_cores": "2",
            "replica_routing": "load",
            "replica_imbalance": 3,
            "priority_range": "-10:10",
        }
    )
    assert values == {"model": "demo", "max_num_seqs": 8, "dtype": "float64"}
    assert (options.api_keys, options.metrics_without_key) == (("sk-1",), True)
    assert (options.served_model_names, options.queue_timeout) == (("a", "b"), None)
    assert options.priority_range == (-10, 10)
    assert replicas == ReplicaOptions((1, 4), 2, "load", 3)


def test_one_key_is_a_list_of_keys() -> None:
    assert read_arguments({"model": "demo", "api_keys": "12345"})[1].api_keys == ("12345",)


def test_a_wrong_key_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        read_arguments({"model": "demo", "api_keys": 12345})
    assert "api_keys has the wrong type" in str(caught.value)
    assert "12345" not in str(caught.value)


def test_paths_of_this_folder_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    given = {"model": "target", "draft_model": "demo", "dtype": "target", "speculative_config": {"model": "target"}}
    assert with_absolute_paths(given) == {
        "model": str(tmp_path / "target"),
        "draft_model": "demo",
        "dtype": "target",
        "speculative_config": {"model": str(tmp_path / "target")},
    }


def test_given_arguments_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULANT_MODEL", "other")
    monkeypatch.setenv("SPECULANT_API_KEY", "sk-1")
    values, options, _ = read_arguments({"model": "demo", "api_keys": ["sk-2"]})
    assert (values["model"], options.api_keys) == ("demo", ("sk-2",))
    assert read_arguments({})[0] == {"model": "other"}


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "no model is given"),
        ({"model": "demo", "replica": 2}, "'replica' is no argument.*replicas"),
        ({"model": "demo", "max_num_seqs": "many"}, "max_num_seqs='many' has the wrong type"),
        ({"model": "demo", "replica_cores": "all"}, "cores='all' has the wrong type"),
        ({"model": "demo", "replicas": "some"}, "replicas 'some'"),
        ({"model": "demo", "replicas": "0"}, "replicas=0:0"),
        ({"model": "demo", "max_body_bytes": "0"}, "max_body_bytes=0"),
        *(({"model": "demo", name: "1"}, f"'{name}' has no effect behind Ray's proxies") for name in sorted(PROXIES)),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECULANT_MODEL", raising=False)
    with pytest.raises(ConfigError, match=f"(?s){problem}"):
        read_arguments(args)


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ([{}, {}], 5),  # no figures: as now
        ([{"a": 0.0}, {"a": 0.0}], 1),
        ([{"a": FULL}, {}], 1),
        ([{"a": FULL + 0.01}, {}], 2),
        ([{"a": 3 * FULL}, {"a": 0.1}], 3),  # a queue of requests
        ([{"a": 0.1}, {"a": FULL, "b": FULL}], 2),  # memory is short
        ([{"a": 0.1, "b": 0.1, "c": 0.1}, {}], 1),
    ],
)
def test_needed_replicas_follow_the_larger_load(shares: list[dict[str, float]], wanted: int) -> None:
    assert needed(shares, 5) == wanted


def test_the_policy_reads_the_figures_of_ray() -> None:
    figures = {"places": {"a": 1.0, "b": 2.0}, "tokens": {"a": 0.1}}
    context = SimpleNamespace(aggregated_metrics=figures, current_num_replicas=2)
    assert wanted_replicas(cast("AutoscalingContext", context)) == (4, {})
    context.aggregated_metrics = None
    assert wanted_replicas(cast("AutoscalingContext", context)) == (2, {})


# --- without the extra `ray` nothing imports Ray, and what needs it says how to install it; the flags of replicas


INSTALL = 'pip install -c constraints.txt "speculant[ray]"'
WITHOUT = "import sys; sys.modules['ray'] = None; "  # as if it were not installed
COMMAND = "from speculant.cli.main import main; sys.argv[1:] = {}; main()"


def _python(code: str) -> tuple[int, str]:
    """Run code in a process of its own; return its status and what it prints."""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    return found.returncode, " ".join((found.stdout + found.stderr).split())


def test_nothing_else_needs_ray() -> None:
    status, printed = _python(
        WITHOUT
        + "import speculant, speculant.ray, speculant.scale.options, speculant.cli.serve; "
        + COMMAND.format(["serve", "--help"])
    )
    assert status == 0, printed
    assert "--replica-routing" in printed


def test_the_application_says_how_ray_is_installed() -> None:
    status, printed = _python(WITHOUT + "import speculant.ray; speculant.ray.app")
    assert status == 1
    assert f"ConfigError: Ray is not installed: {INSTALL}" in printed or INSTALL in printed


def test_the_command_says_how_ray_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    caplog.set_level(logging.ERROR, "asyncio")  # the command sets it, and this undoes it
    error = error_of("serve", "demo", "--replicas", "2", "--port", "0", "--access-log", "none")
    assert isinstance(error, ConfigError)
    assert "Ray is not installed" in str(error)
    assert INSTALL in str(error)


def test_unknown_names_are_no_attributes() -> None:
    import speculant.ray

    with pytest.raises(AttributeError, match="nothing"):
        _ = speculant.ray.nothing


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--replicas", "some"], "not N or LOW:HIGH"),
        (["--replicas", "0"], "replicas=0:0"),
        (["--replicas", "3:2"], "replicas=3:2"),
        (["--replicas", "2", "--replica-cores", "0"], "replica_cores=0"),
        (["--replicas", "2", "--replica-cores", "all"], "--replica-cores"),
        (["--replicas", "2", "--replica-routing", "loads"], "loads"),
        (["--replicas", "2", "--replica-imbalance", "-1"], "replica_imbalance=-1"),
        (["--replica-cores", "2"], "add --replicas N"),
        (["--ray-address", "auto"], "add --replicas N"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["serve", "demo", "--port", "0", *flags])
    assert result.exit_code != 0
    assert problem in f"{result.output} {result.exception}"
