"""`speculant train static`: counts unigrams and bigrams, for the drafter that draws from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant.cli.terminal import examples, messages, print_json, progress
from speculant.errors import ConfigError
from speculant.models.entries import count
from speculant.models.generation import read_generation, read_start_tokens
from speculant.models.source import read_optional_config, resolve_source

if TYPE_CHECKING:
    from speculant.text.tokenizer import Tokenizer

EXAMPLES = examples(
    "speculant train static README.md docs/*.md --tokenizer demo --out tables.safetensors",
    "speculant train static outputs.jsonl --tokenizer demo --out tables.safetensors --continuations 64",
    "speculant train static german.txt --tokenizer google/flan-t5-small --out tables.safetensors",
)
MOST_CONTINUATIONS = 1024


def static(
    files: Annotated[list[Path], typer.Argument(help="Text files, or .jsonl files of token ids, one sequence a line.")],
    tokenizer: Annotated[str, typer.Option(help="The target: a folder or GGUF file, a Hugging Face id or demo.")],
    out: Annotated[Path, typer.Option(help="The file to write, in safetensors format.")],
    continuations: Annotated[
        int, typer.Option(min=0, max=MOST_CONTINUATIONS, help="The most to keep per token; 0 = only unigrams.")
    ] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was counted as JSON.")] = False,
) -> None:
    """Count which token follows which, in texts like those that the target will write.

    The target's own outputs work best: `speculant generate --json` prints their token ids. For an encoder-decoder
    target, each line of a file is one text of its decoder, in a .jsonl file as a JSON string or as token ids. Use the
    file with speculative_config={"method": "static", "tables": FILE}.
    """
    outcome = _make(files, tokenizer, out, continuations)
    if as_json:
        print_json(outcome)
    else:
        messages().print(
            f"{out}: {outcome['tokens']:,} tokens, {outcome['pairs']:,} different pairs,"
            f" {outcome['continuations']:,} kept, {outcome['bytes'] / 2**20:.1f} MiB"
        )


def _make(files: list[Path], model: str, out: Path, continuations: int) -> dict[str, Any]:
    from speculant.drafting.lookup.tables import BigramTables
    from speculant.lab.training.bigrams import count_bigrams
    from speculant.text.tokenizer import Tokenizer

    require_folder(out)
    folder = resolve_source(model, "target")
    tokenizer = Tokenizer.load(folder)
    with progress("Counting"):
        found = count_bigrams(_sequences(files, folder, tokenizer), vocab_size_of(folder, tokenizer))
        tables = BigramTables.of_counts(found.tokens, found.pairs, found.counts, continuations)
        tables.save(out)
    return {
        "tokens": int(found.tokens.sum()),
        "pairs": len(found.pairs),
        "continuations": len(tables.tokens),
        "vocab_size": len(found.tokens),
        "bytes": out.stat().st_size,
    }


def _sequences(files: list[Path], folder: Path, tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    """Yield the sequences of files; those of an encoder-decoder model begin with its start token."""
    from speculant.models.weights.load import read_description
    from speculant.text.text_files import read_sequences

    config = read_optional_config(folder)
    if not config or read_description(config).encoder is None:
        return read_sequences(files, tokenizer)
    start = read_start_tokens(read_generation(folder), config, vocab_size_of(folder, tokenizer))
    return decoder_texts(files, tokenizer, start)


def decoder_texts(files: Sequence[Path], tokenizer: Tokenizer, start: Sequence[int]) -> Iterator[list[int]]:
    """Yield the text of each line after the start tokens, with the end tokens that the tokenizer adds to a text."""
    from speculant.text.text_files import read_lines

    for path in files:
        for line in read_lines(path):
            if line:
                yield [*start, *(tokenizer.encode(line) if isinstance(line, str) else line)]


def require_folder(out: Path) -> None:
    """Check that a file can be written there. Raises ConfigError."""
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}", "make it, or name another file.")


def vocab_size_of(folder: Path, tokenizer: Tokenizer) -> int:
    """Return the rows of the model's output head; for a folder with only a tokenizer, its number of tokens."""
    config = read_optional_config(folder)
    return count(config, "vocab_size") if config else tokenizer.vocab_size
