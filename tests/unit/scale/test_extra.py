"""Without the extra `ray` nothing imports Ray, and what needs it says how to install it; the flags of replicas."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from speculant.cli import app
from speculant.errors import ConfigError

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
        + "import speculant, speculant.ray, speculant.scale.options, speculant.scale.cores, speculant.cli.serve; "
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
    result = CliRunner().invoke(app, ["serve", "demo", "--replicas", "2", "--port", "0", "--access-log", "none"])
    assert isinstance(result.exception, ConfigError)
    assert "Ray is not installed" in str(result.exception)
    assert INSTALL in str(result.exception)


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
