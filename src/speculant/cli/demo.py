"""`speculant demo`: plain beside speculative decoding with the embedded pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speculant.cli.comparison import Pair, run, summary
from speculant.cli.terminal import print_json, progress, results
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from speculant.engine.llm import LLM, StreamPiece

EXAMPLES = "\n\n".join(
    [
        "Examples:",
        "speculant demo",
        "speculant demo --spec-length 3 --max-tokens 64",
        "speculant demo --temperature 0.8 --seed 7",
        "speculant demo --json",
    ]
)
PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "class TestQueue(unittest.TestCase):\n    def test_",
    "import os\nimport sys\n\ndef main(argv=None):\n",
    "    def __init__(self, name, parent=None):\n",
)
DTYPE = "float32"
ACCEPTED, CHOSEN, PLAIN = "green", "bold yellow", "dim"


def demo(
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96,
    spec_length: Annotated[int, typer.Option(help="Tokens to draft per step.")] = 5,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Fixes the text when the temperature is above 0.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print texts and figures as JSON.")] = False,
) -> None:
    """Show plain beside speculative decoding with the embedded models.

    Each prompt is decoded twice, once a token per pass of the target and once with a draft. Accepted
    draft tokens are green; yellow ones the target chose itself. Both texts are the same.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    with progress("Loading the embedded models"):
        llm = _load(spec_length)
        _decode_both(llm, "warm up", params_with(params, max_tokens=8), _ignore, _ignore)
    console = Console(quiet=True) if as_json else results()
    _introduce(console, llm)
    pairs = [_show_pair(console, llm, prompt, params) for prompt in PROMPTS]
    if as_json:
        print_json({**summary(pairs), "speculation": llm.speculation, "pairs": [asdict(pair) for pair in pairs]})
    else:
        _conclude(console, summary(pairs))


def _load(spec_length: int) -> LLM:
    from speculant.engine.llm import LLM

    return LLM("demo", "demo", spec_length=spec_length, dtype=DTYPE, max_num_seqs=1)


def params_with(params: SamplingParams, **changes: Any) -> SamplingParams:
    """Return the parameters with some values changed."""
    from dataclasses import replace

    return replace(params, **changes)


def _decode_both(
    llm: LLM,
    prompt: str,
    params: SamplingParams,
    show_plain: Callable[[StreamPiece], None],
    show_speculative: Callable[[StreamPiece], None],
) -> Pair:
    plain = run(llm, prompt, params_with(params, speculation=False), show_plain)
    return Pair(prompt, plain, run(llm, prompt, params, show_speculative))


def _ignore(piece: StreamPiece) -> None:
    """Show nothing."""


def _show_piece(console: Console, piece: StreamPiece, style: str = "") -> None:
    console.print(piece.text, style=style or (ACCEPTED if piece.drafted else CHOSEN), end="")
