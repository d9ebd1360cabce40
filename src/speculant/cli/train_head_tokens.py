"""`speculant train head-tokens`: finds the tokens that a draft model's short head keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant.cli.terminal import examples, messages, print_json, progress
from speculant.cli.train_static import require_folder, vocab_size_of
from speculant.errors import ConfigError
from speculant.models.source import read_optional_config, resolve_source

if TYPE_CHECKING:
    import numpy as np

EXAMPLES = examples(
    "speculant train head-tokens README.md docs/*.md --tokenizer demo --out head.json",
    "speculant train head-tokens outputs.jsonl --tokenizer demo --size 2048 --out head.json",
)
SHARE = 4  # by default a head keeps a quarter of the vocabulary (arXiv 2502.14856, section 4)


def head_tokens(
    files: Annotated[list[Path], typer.Argument(help="Text files, or .jsonl files of token ids, one sequence a line.")],
    tokenizer: Annotated[str, typer.Option(help="The target: a folder or GGUF file, a Hugging Face id or demo.")],
    out: Annotated[Path, typer.Option(help="The file to write, in JSON.")],
    size: Annotated[int | None, typer.Option(min=1, help="Tokens to keep [default: a quarter of them].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was counted as JSON.")] = False,
) -> None:
    """Find the most frequent tokens in texts like those that the target will write.

    The target's own outputs work best: `speculant generate --json` prints their token ids. A draft model that is
    limited to these tokens is faster: speculative_config={"head_tokens": FILE}. End tokens are always kept.
    """
    outcome = _make(files, tokenizer, out, size)
    if as_json:
        print_json(outcome)
    else:
        messages().print(
            f"{out}: {outcome['size']:,} of {outcome['vocab_size']:,} tokens,"
            f" {outcome['coverage']:.1%} of the {outcome['tokens']:,} in the files"
        )


def _make(files: list[Path], model: str, out: Path, size: int | None) -> dict[str, Any]:
    import numpy as np

    from speculant.drafting.model.head_tokens import save_head_tokens
    from speculant.lab.training.bigrams import count_tokens
    from speculant.text.token_files import read_sequences
    from speculant.text.tokenizer import Tokenizer

    require_folder(out)
    folder = resolve_source(model, "target")
    tokenizer = Tokenizer.load(folder)
    vocab_size = vocab_size_of(folder, tokenizer)
    with progress("Counting"):
        counts = count_tokens(read_sequences(files, tokenizer), vocab_size)
    if not counts.sum():
        raise ConfigError("the files hold no tokens", "name files with text.")
    kept = _most_frequent(counts, size or max(1, vocab_size // SHARE), _ends(folder, vocab_size))
    save_head_tokens(out, kept)
    return {
        "size": len(kept),
        "vocab_size": vocab_size,
        "tokens": int(counts.sum()),
        "coverage": float(counts[np.array(kept)].sum() / counts.sum()),
    }


def _most_frequent(counts: np.ndarray[Any, Any], size: int, ends: frozenset[int]) -> list[int]:
    """Return the end tokens, then the most frequent others; the lowest ids among equals."""
    order = (-counts).argsort(kind="stable").tolist()
    return [*sorted(ends), *(token for token in order if token not in ends)][: max(size, len(ends))]


def _ends(folder: Path, vocab_size: int) -> frozenset[int]:
    """Return the model's end tokens; a folder with only a tokenizer has none."""
    from speculant.models.generation import read_end_tokens, read_generation

    config = read_optional_config(folder)
    return read_end_tokens(read_generation(folder), config, vocab_size) if config else frozenset()
