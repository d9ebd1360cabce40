"""`--profile`: writes a trace of the engine's steps that Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculant.cli.terminal import messages
from speculant.engine.profiling import profiled

if TYPE_CHECKING:
    from speculant.engine.engine import Engine

Profile = Annotated[
    Path | None,
    typer.Option(help="Write a trace of the engine's steps here, for ui.perfetto.dev; profiling slows the run down."),
]


@contextmanager
def profiling(engine: Engine, path: Path | None) -> Iterator[None]:
    """Profile the steps of this block and print the path of the trace; None = do nothing."""
    with profiled(engine, path):
        yield
    if path is not None:
        messages().print(f"trace of the steps: {path}; open it at https://ui.perfetto.dev", style="dim")
