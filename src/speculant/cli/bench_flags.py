"""The flags that several bench commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MANY, FEW = 32, 4  # default numbers of prompts that run together, and one at a time

Target = Annotated[str | None, typer.Argument(metavar="MODEL", help="The model: a folder, a Hugging Face id, or demo.")]
Prompts = Annotated[
    str,
    typer.Option(
        help="code, edit (code that begins again) or random (token ids), which are built in;"
        " or a file: a prompt a line, or JSON lines as those of Spec-Bench."
    ),
]
Number = Annotated[int | None, typer.Option(help=f"How many prompts [default: {MANY}; all of a file].")]
FewNumber = Annotated[int | None, typer.Option(help=f"How many prompts [default: {FEW}; all of a file].")]
Lengths = Annotated[
    list[int] | None, typer.Option("--prompt-length", help="Tokens per prompt; repeated, each is measured in turn.")
]
Rounds = Annotated[int, typer.Option(help="How often each way is run.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write the figures with charts here, as one HTML file.")]
Trace = Annotated[
    Path | None, typer.Option("--trace", help="Write the phases of the steps of one prompt here, for ui.perfetto.dev.")
]
History = Annotated[
    Path | None,
    typer.Option("--history", help="Append a line with the ratios here, for speculant bench history."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything that was measured as JSON.")]
