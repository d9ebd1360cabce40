"""The `speculant` command."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from speculant.cli import bench, chat, check_lossless, check_pair, demo, doctor, generate, inflate, plan, serve, train
from speculant.cli.entry import EXIT_INTERRUPTED
from speculant.cli.logs import accepts_log_level
from speculant.cli.streams import prepare_streams
from speculant.cli.terminal import WholeSummaries, end_at_once, show_error
from speculant.errors import SpeculantError

EXIT_RUNTIME = 1  # an error at run time
EXIT_USAGE = 2  # an error in the arguments

app = typer.Typer(
    name="speculant",
    cls=WholeSummaries,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich truncates long flags
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate", epilog=generate.EXAMPLES)(accepts_log_level(generate.generate))
app.command("chat", epilog=chat.EXAMPLES)(accepts_log_level(chat.chat))
app.command("demo", epilog=demo.EXAMPLES)(accepts_log_level(demo.demo))
app.command("doctor", epilog=doctor.EXAMPLES)(accepts_log_level(doctor.doctor))
app.command("check-lossless", epilog=check_lossless.EXAMPLES)(accepts_log_level(check_lossless.check_lossless))
app.command("check-pair", epilog=check_pair.EXAMPLES)(accepts_log_level(check_pair.check_pair))
app.command("inflate", epilog=inflate.EXAMPLES)(accepts_log_level(inflate.inflate))
app.command("plan", epilog=plan.EXAMPLES)(accepts_log_level(plan.plan))
app.command("serve", epilog=serve.EXAMPLES)(accepts_log_level(serve.serve))
app.add_typer(bench.app, name="bench", epilog=bench.EXAMPLES)
app.add_typer(train.app, name="train", epilog=train.EXAMPLES)


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

    SPECULANT_DEBUG=1 raises it instead. Ctrl-C prints one line and ends the process at once with 130.
    """
    prepare_streams()
    if os.environ.get("SPECULANT_DEBUG") == "1":
        app()
        return
    try:
        _run()
    except KeyboardInterrupt:
        end_at_once()
    except SystemExit as end:  # typer's way to end, after Ctrl-C too
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
            sys.stdout.flush()  # here, because an error while the interpreter ends can't be caught
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
        raise SpeculantError(problem, "set SPECULANT_DEBUG=1 to see where, and report it, please.") from error


def _drop_output() -> None:
    """Drop output that can't be written, which the interpreter would try to write again, and fail, at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: OSError) -> SpeculantError:
    """Return the error for a file, a disk or a connection that the system refused."""
    return SpeculantError(
        f"the system refused: {error}",
        "check the path, its permissions and the free space; SPECULANT_DEBUG=1 tells more.",
    )


if __name__ == "__main__":
    main()
