"""The command line, as a test types it, in the test's process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from speculant.cli import app
from speculant.errors import SpeculantError


def invoke(*arguments: object, code: int = 0, stdin: str | None = None, **env: str | None) -> Result:
    """Run a command that ends with this exit code; an error is raised. env: variables of the environment."""
    result = CliRunner().invoke(app, [*map(str, arguments)], input=stdin, catch_exceptions=False, env=env)
    assert result.exit_code == code, result.output
    return result


def json_of(*arguments: object, code: int = 0, **env: str | None) -> dict[str, Any]:
    """Run a command with --json; return what it prints."""
    return dict(json.loads(invoke(*arguments, "--json", code=code, **env).stdout))


def error_of(*arguments: object, **env: str | None) -> SpeculantError:
    """Run a command that fails; return its error. No model is named in the environment."""
    error = CliRunner().invoke(app, [*map(str, arguments)], env={"SPECULANT_MODEL": None, **env}).exception
    assert isinstance(error, SpeculantError), error
    return error
