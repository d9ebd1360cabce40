"""Output: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import typer
import typer.core
from rich.console import Console
from rich.text import Text
from typing_extensions import override

from speculant.cli.entry import EXIT_INTERRUPTED
from speculant.errors import SpeculantError

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.status import Status
    from rich.table import Table


SPINNER = "dots"
_CONTROL = (*range(9), *range(11, 32), *range(127, 160))  # characters that control a terminal, but not tab and newline
SOON_S, PAUSE_S = 1.0, 5.0  # without a terminal: before the first line of progress, and between lines
LINE_S = 60.0  # the same, between lines of a long task


class WholeSummaries(typer.core.TyperGroup):
    """A group of commands. Its help shows the whole first paragraph of each command's help, not one line of it."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name; None if there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            paragraph = (command.help or "").strip().partition("\n\n")[0]
            command.short_help = command.short_help or " ".join(paragraph.split())
        return command


def command_group(kind: type[WholeSummaries] = WholeSummaries, **settings: Any) -> typer.Typer:
    """Return a group of commands with the settings that all groups share."""
    return typer.Typer(
        cls=kind,
        no_args_is_help=settings.pop("no_args_is_help", True),
        add_completion=False,
        rich_markup_mode=None,  # rich truncates long flags
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _with_hyphens},
        **settings,
    )


def _with_hyphens(name: str) -> str:
    """Return a flag with hyphens; scripts for other programs also write `--max_model_len`."""
    return name.replace("_", "-")


def examples(*commands: str) -> str:
    """Return the examples for the end of a command's help; their lines are not rewrapped."""
    return "\n".join(("\b", "Examples:", *(f"  {command}" for command in commands)))


class VerbatimConsole(Console):
    """Prints text as it is: no markup, no highlighting, no wrapping.

    On a terminal, the characters that control one are left out, except tab and newline: text of a model, a file or a
    server could change what the user sees or types.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, **settings)

    @override
    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(self._harmless(text), **settings)

    def write(self, text: str) -> None:
        """Print a piece of text at once, without a newline."""
        self.file.write(self._harmless(text))
        self.file.flush()

    def _harmless(self, text: str) -> str:
        return text.translate(dict.fromkeys(_CONTROL)) if self.is_terminal else text


def results() -> VerbatimConsole:
    """Return the console for results."""
    return VerbatimConsole()


def messages() -> VerbatimConsole:
    """Return the console for everything but results."""
    return VerbatimConsole(stderr=True)


def notice(text: str) -> None:
    """Print a remark to stderr. On a terminal its lines are broken between words."""
    console = messages()
    console.print(text, style="dim", soft_wrap=not console.is_terminal)


def show_error(error: SpeculantError) -> None:
    """Print an error and its fix."""
    console = messages()
    console.print("error: ", style="bold red", end="")
    console.print(error.problem)
    console.print("  fix: ", style="bold", end="")
    console.print(error.fix)


def end_at_once() -> NoReturn:
    """Print that Ctrl-C stopped the command, and end the process without waiting for its threads."""
    with suppress(OSError):
        sys.stdout.flush()
    console = messages()
    console.print("\nstopped by Ctrl-C" if console.is_terminal else "stopped by Ctrl-C")
    os._exit(EXIT_INTERRUPTED)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON document to stdout, in ASCII where the output can't hold everything."""
    unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(value, indent=2, ensure_ascii=not unicode)
    sys.stdout.write(text.translate({each: f"\\u{each:04x}" for each in _CONTROL if each > ord(" ")}) + "\n")


def plain_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", styles: Sequence[str | None] = ()
) -> Table:
    """Return a table without lines: the first column is text, the others are figures. styles: of the rows."""
    from rich.table import Table

    table = Table(box=None, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    for place, heading in enumerate(header):
        table.add_column(heading, justify="right" if place else "left")
    for row, style in zip_longest(rows, styles):
        table.add_row(*row, style=style)
    return table


class Parts:
    """Shows the current task: at once on a terminal, otherwise in occasional lines.

    Without a terminal, nothing is printed about tasks that take less than a second.
    """

    def __init__(self) -> None:
        self._console, self._shown = messages(), ExitStack()
        self._doing = ""
        self._status: Status | None = None

    def begin(self, part: str) -> None:
        """Show this until the next part begins, or until `end`."""
        shown, self._doing = bool(self._doing), part
        if self._status is not None:
            self._status.update(part, spinner=SPINNER)  # naming the spinner redraws it at once
        elif not shown and self._console.is_terminal:
            self._status = self._shown.enter_context(self._console.status(part, spinner=SPINNER))
        elif not shown:
            self._shown.enter_context(self._lines())

    def end(self) -> None:
        """Show nothing, so that a result can be printed."""
        self._shown.close()
        self._doing, self._status = "", None

    @contextmanager
    def _lines(self) -> Iterator[None]:
        done = threading.Event()
        reporter = threading.Thread(target=self._report, args=(done,), daemon=True)
        reporter.start()
        try:
            yield
        finally:
            done.set()
            reporter.join()

    def _report(self, done: threading.Event) -> None:
        started, pause = time.perf_counter(), SOON_S
        while not done.wait(pause):
            self._console.print(f"{self._doing} ({time.perf_counter() - started:.0f} s)")
            pause = PAUSE_S


@contextmanager
def progress_of_parts() -> Iterator[Parts]:
    """Yield an object that shows which part of the block is running."""
    parts = Parts()
    try:
        yield parts
    finally:
        parts.end()


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Show the progress of the block while it runs; see `Parts`."""
    with progress_of_parts() as parts:
        parts.begin(doing)
        yield


class Bar:
    """Shows how much is done: a bar on a terminal, otherwise a line now and then.

    Lines are as far apart as the time so far, from PAUSE_S to LINE_S seconds; the first one comes after `first_s`.
    """

    def __init__(self, console: Console, bar: Progress | None, total: float, first_s: float) -> None:
        self._console, self._bar, self._started = console, bar, time.perf_counter()
        self._task = None if bar is None else bar.add_task("", total=total)
        self._line_due, self._result_due = self._started + first_s, 0.0

    def show(self, done: float, text: str) -> None:
        """Show how much is done, and a text."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif time.perf_counter() >= self._line_due:
            self._print(text)

    def show_result(self, text: str) -> None:
        """Print an interim result: each one beside a bar, otherwise one now and then."""
        if self._bar is not None or time.perf_counter() >= self._result_due:
            self._print(text)
            self._result_due = self._line_due

    def _print(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))  # a style given to `print` would also apply to the bar
        now = time.perf_counter()
        self._line_due = now + min(LINE_S, max(PAUSE_S, now - self._started))


@contextmanager
def progress_bar(total: float = 1.0, first_s: float | None = None, **settings: Any) -> Iterator[Bar]:
    """Yield an object that shows the progress of the block; see `Bar`. settings: of rich's bar."""
    console, first_s = messages(), SOON_S if first_s is None else first_s
    if not console.is_terminal:
        yield Bar(console, None, total, first_s)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, **settings) as bar:
        yield Bar(console, bar, total, first_s)


def minutes_left(elapsed_s: float, done: float) -> str:
    """Return the time left, in words, from the fraction done."""
    return f"{elapsed_s * (1 / max(done, 1e-9) - 1) / 60:.0f} min left"


Counted = Callable[[int, int, Callable[[float], str]], None]


@contextmanager
def counted_progress(doing: str, number: int) -> Iterator[Counted]:
    """Yield a function that shows how many of a number of lines are done, and the time left.

    Its arguments are how many are done, how many of them were done before, and what returns further text for the
    seconds since the beginning.
    """
    started = time.perf_counter()
    with progress_bar(number) as bar:

        def show(done: int, before: int, more: Callable[[float], str]) -> None:
            seconds = time.perf_counter() - started
            left = f", {minutes_left(seconds, (done - before) / (number - before))}" if done > before else ""
            bar.show(done, f"{doing}: {done:,} of {number:,} lines, {more(seconds)}{left}")

        yield show
