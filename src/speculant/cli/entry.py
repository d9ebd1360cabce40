"""What the `speculant` script calls: Ctrl-C has one line while the command line is still being imported, too."""

from __future__ import annotations

import os
import sys

EXIT_INTERRUPTED = 130  # the code of a command that Ctrl-C ended


def main() -> None:
    """Import the command line and run it; see `speculant.cli.main.main`."""
    try:
        from speculant.cli.main import main as run
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)
    run()
