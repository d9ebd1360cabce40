"""The `speculant` command."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer.main

from speculant.cli.entry import EXIT_INTERRUPTED, prepare_streams
from speculant.cli.terminal import WholeSummaries, command_group, end_at_once, show_error
from speculant.errors import SpeculantError

EXIT_RUNTIME = 1  # an error at run time
EXIT_USAGE = 2  # an error in the arguments

COMMANDS = {  # with the first paragraph of each one's help, so that the list of commands imports none of them
    "generate": "Complete a prompt.",
    "chat": "Talk to a model.",
    "demo": "Compare plain and speculative decoding with the embedded models.",
    "doctor": "Report this machine's features and the cost of missing ones; or a model's sizes and types.",
    "serve": "Serve a model, or several, over HTTP, in the shape of OpenAI's API.",
    "batch": "Answer a file of requests.",
    "cache": "List, prune, verify or forget what is kept on disk between runs.",
}
FURTHER = "speculant.commands"  # entry points of tables like COMMANDS; each one's commands stand beside it
OWN = "speculant.cli"


def all_commands() -> dict[str, tuple[str, str]]:
    """Return the commands of this package and of entry points: by name, the package and the summary of each."""
    from importlib.metadata import entry_points

    found = {name: (OWN, summary) for name, summary in COMMANDS.items()}
    for point in entry_points(group=FURTHER):
        package = point.module.rpartition(".")[0]
        found |= {name: (package, summary) for name, summary in point.load().items()}
    return found


class LazyCommands(WholeSummaries):
    """Imports a command when it is used, and all of them to suggest one in place of an unknown name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return list(all_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name; None if there is none."""
        wanted = {cmd_name: (OWN, "")} if cmd_name in COMMANDS else all_commands()
        for name in [cmd_name] if cmd_name in wanted else wanted:
            if name not in self.commands:
                self.add_command(_import(wanted[name][0], name), name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in all_commands().items()])


def _import(package: str, name: str) -> Any:
    """Return the command of a module: its function of the same name, or the group `app`."""
    function = name.replace("-", "_")
    module = importlib.import_module(f"{package}.{function}")
    group: typer.Typer | None = getattr(module, "app", None)
    if group is None:
        from speculant.cli.flags import accepts_log_level

        group = command_group()
        group.command(name, epilog=module.EXAMPLES)(accepts_log_level(getattr(module, function)))
    return typer.main.get_command(group)


app = command_group(LazyCommands, name="speculant")


def _print_version(wanted: bool) -> None:
    if wanted:
        from speculant import __version__

        typer.echo(f"speculant {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Make language models answer faster without changing what they say.

    `speculant demo` shows it with the embedded models; `speculant COMMAND --help` has examples.
    """


def main() -> None:
    """Run the command line. An error is printed with its fix, without a traceback, and sets the exit code.

    SPECULANT_DEBUG=1 raises it instead. Ctrl-C prints one line and ends the process at once, with exit code 130.
    """
    prepare_streams()
    if os.environ.get("SPECULANT_DEBUG") == "1":
        app()
        return
    try:
        _run()
    except KeyboardInterrupt:
        end_at_once()
    except SystemExit as end:  # typer raises it at the end, and after Ctrl-C
        if end.code == EXIT_INTERRUPTED:
            end_at_once()
        raise
    except SpeculantError as error:
        show_error(error)
        sys.exit(EXIT_USAGE if isinstance(error, ValueError) else EXIT_RUNTIME)


def _run() -> None:
    """Run a command. Raises SpeculantError for every failure."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # now: an error at the interpreter's exit can't be caught
    except BrokenPipeError:  # the reader has closed the pipe
        _drop_output()
        sys.exit(EXIT_RUNTIME)
    except SpeculantError:
        raise
    except OSError as error:
        _drop_output()
        raise _refused(error) from error
    except Exception as error:
        problem = f"Speculant failed: {type(error).__name__}: {error}"
        raise SpeculantError(problem, "set SPECULANT_DEBUG=1 to see where, and please report it.") from error


def _drop_output() -> None:
    """Drop output that can't be written. Otherwise the interpreter would try again at its exit, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: OSError) -> SpeculantError:
    """Return the error for a file, a disk or a connection that the system refused."""
    return SpeculantError(
        f"the system refused: {error}",
        "check the path, its permissions and the free space; SPECULANT_DEBUG=1 shows more.",
    )


if __name__ == "__main__":
    main()
