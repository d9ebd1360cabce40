"""The entry point of the `speculant` script: it handles Ctrl-C during imports, and prepares the standard streams."""

from __future__ import annotations

import io
import os
import sys

EXIT_INTERRUPTED = 130  # the exit code after Ctrl-C


def main() -> None:
    """Import the command line and run it; see `speculant.cli.main.main`."""
    try:
        from speculant.cli.main import main as run
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)
    run()


def prepare_streams() -> None:
    """Make standard input, output and error usable.

    A closed stream is replaced by an empty one. A character that the output's encoding lacks is replaced instead of
    ending the command. In a locale without an encoding (C, POSIX), input is read as UTF-8. Invalid bytes are an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = sys.stdin.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968", "646")
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="strict")
