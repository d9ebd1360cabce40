"""`speculant train head-tokens`: finds the tokens that a draft model's short head keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speculant.cli.terminal import examples, messages, print_json, progress, progress_of_parts
from speculant.cli.train_static import require_folder, vocab_size_of
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.models.source import read_optional_config, resolve_source

if TYPE_CHECKING:
    import numpy as np

    from speculant.lab.bench.head_sizes import HeadSize

EXAMPLES = examples(
    "speculant train head-tokens README.md docs/*.md --target demo --out head.json",
    "speculant train head-tokens outputs.jsonl --target demo --size 2048 --out head.json",
    "speculant train head-tokens outputs.jsonl --target demo --draft demo --out head.json",
    "speculant train head-tokens outputs.jsonl --target demo --draft demo --method eagle --out head.json",
)
TEXTS, TOKENS = 8, 128  # the most texts along which drafts are compared, and their tokens
SHARE = 4  # by default a head keeps a quarter of the vocabulary (arXiv 2502.14856, section 4)


def head_tokens(
    files: Annotated[list[Path], typer.Argument(help="Text files, or .jsonl files of token ids, one sequence a line.")],
    target: Annotated[
        str, typer.Option("--target", "--tokenizer", help="A folder or GGUF file, a Hugging Face id or demo.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write, in JSON.")],
    size: Annotated[
        int | None, typer.Option(min=1, help="Tokens to keep [default: the fastest with --draft, else a quarter].")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="The draft model or head for which the fastest size is measured.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How it drafts, such as eagle or medusa [default: as a draft model].")
    ] = None,
    draft_quantization: Annotated[str, typer.Option(help="Round the draft's weights: int8, int4 or none.")] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was counted and measured as JSON.")] = False,
) -> None:
    """Find the most frequent tokens in texts like those that the target will write.

    The target's own outputs work best: `speculant generate --json` prints their token ids. A draft model that is
    limited to these tokens is faster: speculative_config={"head_tokens": FILE}. End tokens are always kept.

    With --draft, output heads of several sizes are measured along the texts, and the tokens of the one with the
    most expected tokens per second are written. If no shorter head gains 2%, nothing is written.
    """
    if draft is None and method is not None:
        raise ConfigError(f"--method {method} names no draft", "add --draft.")
    if draft is not None and size is not None:
        raise ConfigError("--size and --draft are given, and --draft is for measuring the size", "leave out one.")
    config = EngineConfig.from_arguments(
        model=target, draft_model=draft, draft_quantization=draft_quantization,
        speculative_config=None if method is None else {"method": method},
    )  # fmt: skip
    outcome = _make(files, config, out, size)
    if as_json:
        print_json(outcome)
    else:
        _show(messages(), out, outcome)


def _show(console: Console, out: Path, outcome: Mapping[str, Any]) -> None:
    if outcome["sizes"]:
        table = Table(box=None, pad_edge=False)
        for heading in ("tokens", "coverage", "acceptance", "ms a token", "ms a draft", "tokens/s", ""):
            table.add_column(heading, justify="right")
        for each in outcome["sizes"]:
            best = each["size"] == outcome["size"]
            table.add_row(
                f"{each['size']:,}", f"{each['coverage']:.1%}", f"{each['acceptance']:.3f}",
                f"{1e3 * each['token_s']:.3g}", f"{1e3 * each['draft_s']:.3g}", f"{each['speed']:.4g}",
                "best" if best else "",
            )  # fmt: skip
        console.print(table)
    if not outcome["written"]:
        console.print("a head of fewer tokens is not faster here, and no file was written: leave head_tokens out")
        return
    console.print(
        f"{out}: {outcome['size']:,} of {outcome['vocab_size']:,} tokens,"
        f" {outcome['coverage']:.1%} of the {outcome['tokens']:,} in the files"
    )


def _make(files: list[Path], config: EngineConfig, out: Path, size: int | None) -> dict[str, Any]:
    import numpy as np

    from speculant.drafting.heads.short import save_head_tokens
    from speculant.lab.training.bigrams import count_tokens
    from speculant.text.token_files import read_sequences
    from speculant.text.tokenizer import Tokenizer

    require_folder(out)
    folder = resolve_source(config.model, "target")
    tokenizer = Tokenizer.load(folder)
    vocab_size = vocab_size_of(folder, tokenizer)
    texts = list[Sequence[int]]()
    with progress("Counting"):
        counts = count_tokens(_keeping_first(read_sequences(files, tokenizer), texts), vocab_size)
    if not counts.sum():
        raise ConfigError("the files hold no tokens", "name files with text.")
    ends = _ends(folder, vocab_size)
    order = _by_use(counts, ends)
    sizes = _measure(config, counts, order, len(ends), texts) if config.draft_model else []
    kept = order[: max(size or _best(sizes) or max(1, vocab_size // SHARE), len(ends))]
    written = not sizes or len(kept) < vocab_size
    if written:
        save_head_tokens(out, kept)
    return {
        "size": len(kept),
        "vocab_size": vocab_size,
        "tokens": int(counts.sum()),
        "coverage": float(counts[np.array(kept)].sum() / counts.sum()),
        "written": written,
        "sizes": [asdict(each) for each in sizes],
    }


def _keeping_first(sequences: Iterable[Sequence[int]], texts: list[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Yield sequences, and add the beginnings of the first ones to `texts`."""
    for sequence in sequences:
        if len(texts) < TEXTS and len(sequence) > 1:
            texts.append(sequence[:TOKENS])
        yield sequence


def _measure(
    config: EngineConfig, counts: np.ndarray[Any, Any], order: Sequence[int], least: int, texts: Sequence[Sequence[int]]
) -> list[HeadSize]:
    from speculant.lab.bench.head_sizes import measure_sizes

    with progress_of_parts() as parts:
        return measure_sizes(config, counts, order, least, texts, parts.begin)


def _best(sizes: Sequence[HeadSize]) -> int:
    """Return the fastest size; 0 = none was measured."""
    from speculant.lab.bench.head_sizes import best_size

    return best_size(sizes).size if sizes else 0


def _by_use(counts: np.ndarray[Any, Any], ends: frozenset[int]) -> list[int]:
    """Return the end tokens, then the others by their counts; the lowest ids among equals."""
    order = (-counts).argsort(kind="stable").tolist()
    return [*sorted(ends), *(token for token in order if token not in ends)]


def _ends(folder: Path, vocab_size: int) -> frozenset[int]:
    """Return the model's end tokens; a folder with only a tokenizer has none."""
    from speculant.models.generation import read_end_tokens, read_generation

    config = read_optional_config(folder)
    return read_end_tokens(read_generation(folder), config, vocab_size) if config else frozenset()
