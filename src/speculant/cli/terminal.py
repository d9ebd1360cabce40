"""Output: results to stdout, everything else to stderr."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from speculant.errors import SpeculantError


def examples(*commands: str) -> str:
    """Return the end of a command's help, without rewrapping its lines."""
    return "\n".join(("\b", "Examples:", *(f"  {command}" for command in commands)))


def results() -> Console:
    """Return the console for results. Text is printed verbatim: no markup, no highlighting, no wrapping."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def messages() -> Console:
    """Return the console for everything but results."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def show_error(error: SpeculantError) -> None:
    """Print an error and its fix."""
    console = messages()
    console.print("error: ", style="bold red", end="")
    console.print(error.problem)
    console.print("  fix: ", style="bold", end="")
    console.print(error.fix)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON document to stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Show a status while the block runs, on a terminal only."""
    console = messages()
    if console.is_terminal:
        with console.status(doing):
            yield
    else:
        yield


@contextmanager
def progress_of_parts() -> Iterator[Callable[[str], None]]:
    """Yield a function that is called at the start of each part and shows its name while it runs."""
    with ExitStack() as shown:

        def notify(part: str) -> None:
            shown.close()
            shown.enter_context(progress(part))

        yield notify


@contextmanager
def progress_of_runs(number: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that is called before each of so many runs and shows the progress, on a terminal only."""
    console = messages()
    if not console.is_terminal:
        yield lambda name: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=1, transient=True) as bar:
        task = bar.add_task("Warming up", total=number)
        started = itertools.count()
        yield lambda name: bar.update(task, completed=next(started), description=f"Measuring {name.replace('_', ' ')}")
