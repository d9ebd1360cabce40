"""`--log-level`: prints the library's log to standard error. Without it nothing is logged."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from speculant.cli.flags import announce

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogLevel(StrEnum):
    """Log levels, the most verbose first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Option = Annotated[
    LogLevel | None,
    typer.Option(
        help="Log to standard error: info for what is loaded and what fails, debug for preemptions too.",
        envvar="SPECULANT_LOG_LEVEL",
        show_envvar=False,
    ),
]


def show_logs(level: LogLevel) -> None:
    """Send the package's log records of a level and above to standard error, unless a handler is there already."""
    logging.basicConfig(format=FORMAT)
    logging.getLogger("speculant").setLevel(level.upper())


def accepts_log_level(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--log-level` to a command's flags."""
    flag = inspect.Parameter("log_level", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Option)

    @functools.wraps(command)
    def with_logs(*, log_level: LogLevel | None = None, **values: Any) -> None:
        if log_level is not None:
            show_logs(log_level)
        command(**values)

    return announce(with_logs, [*inspect.signature(command, eval_str=True).parameters.values(), flag])
