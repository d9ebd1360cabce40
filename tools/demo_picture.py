"""Draw the comparison of `speculant demo` as docs/figures/demo.svg.

    python tools/demo_picture.py

The picture is the same on every machine: greedy texts, unrounded draft weights, a fixed draft length, no speeds.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from speculant import LLM, RequestOutput, SamplingParams
from speculant.cli import ACCEPTED, CHOSEN, DTYPE, PROMPT, SPEC_LENGTH

PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "demo.svg"
WIDTH = 108  # columns
PROMPTS = {"class Cache:\n    def get(self, key):\n        try:": 30, "def read(path):": 37}  # prompt -> tokens


def draw() -> str:
    """Return the picture."""
    llm = LLM("demo", "demo", spec_length=SPEC_LENGTH, dtype=DTYPE, draft_quantization="none", max_num_seqs=1)
    table = Table(box=None, padding=(0, 2, 1, 0), expand=True)
    for way in ("plain", "speculative"):
        table.add_column(way, ratio=1)
    for prompt, tokens in PROMPTS.items():
        cells = [decode(llm, prompt, tokens, drafting) for drafting in (False, True)]
        plain, speculative = (result.outputs[0].token_ids for _, result in cells)
        assert plain == speculative
        table.add_row(*(Group(text, passes(result)) for text, result in cells))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(table, legend())
    picture = console.export_svg(title="speculant demo", unique_id="demo")
    return re.sub(r" *@font-face \{.*?\}\n*", "", picture, flags=re.DOTALL)  # no fonts from other sites


def decode(llm: LLM, prompt: str, tokens: int, drafting: bool) -> tuple[Text, RequestOutput]:
    """Return a prompt with its answer in the demo's colours, and the result."""
    text = Text(prompt, style=PROMPT)
    params = SamplingParams(temperature=0, max_tokens=tokens, speculation=None if drafting else False)
    for piece in llm.stream(prompt, params, cache_salt=str(drafting)):  # neither run finds its prompt in the cache
        colour = "" if not drafting else ACCEPTED if piece.drafted else CHOSEN
        text.append(piece.text, style=f"not dim {colour}")
    assert piece.output is not None
    return text, piece.output


def passes(result: RequestOutput) -> Text:
    """Return the line below a text."""
    tokens, passes = len(result.outputs[0].token_ids), result.metrics.timing.sampled_passes
    return Text(f"{tokens} tokens in {passes} passes of the target", style="bold")


def legend() -> Text:
    """Return the meaning of the colours."""
    own = " tokens are the target's own. Both texts have the same tokens."
    return Text.assemble(("Green", ACCEPTED), " tokens were drafted and accepted, ", ("yellow", CHOSEN), own)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
