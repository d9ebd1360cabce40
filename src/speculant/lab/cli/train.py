"""`speculant train`: trains small models, drafts and heads. A command's flags are the fields of its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from speculant.cli import (
    FlagGroup,
    accepts_flags,
    accepts_log_level,
    command_group,
    examples,
    messages,
    print_json,
    progress,
    progress_of_parts,
)
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.cli.progress import show_training, shown_progress
from speculant.lab.training import BoostedConfig, HeadTrainingConfig, Seq2SeqConfig, TrainingConfig

if TYPE_CHECKING:
    import numpy as np

    from speculant.lab.bench import HeadSize
    from speculant.lab.training import DraftsRun, Show, TrainingRun
    from speculant.text import Tokenizer

EXAMPLES = examples(
    "speculant train lm --out target --minutes 75",
    "speculant train lm --out target --minutes 75 --resume",
    "speculant train lm --out draft --distill-from target --hidden 128 --layers 2 --minutes 15",
    "speculant train lm --out poems --data ./poems --suffix .txt --steps 2000",
)
_DRAFT_EXAMPLES = examples(
    "speculant train draft --boosted 2 --target demo --out drafts --minutes 10",
    "speculant train draft --parallel 8 --target demo --start demo --out drafts --minutes 20",
    "speculant train draft --boosted 3 --target demo --start demo --out drafts --minutes 5",
    "speculant train draft --boosted 3 --target demo --start demo --out drafts --minutes 5 --resume",
    """speculant generate "def" --model demo --speculative-config """
    """'{"method": "specinfer", "model": "drafts/1", "models": ["drafts/2"]}'""",
)
_HEAD_EXAMPLES = examples(
    "speculant train head --kind eagle --target demo --out eagle-head --minutes 20",
    "speculant train head --kind eagle --target demo --out eagle-head --minutes 20 --resume",
    "speculant train head --kind eagle3 --target demo --out eagle3-head --draft-vocab 2048 --minutes 20",
    "speculant train head --kind eagle3 --target MODEL --chat --out head --draft-vocab 8192 --minutes 90",
    "speculant train head --kind medusa --target demo --out medusa-head --num-heads 4 --steps 2000",
    "speculant train head --kind mtp --target MODEL --out head --with-target MODEL-mtp --minutes 90",
)
_SEQ2SEQ_EXAMPLES = examples(
    "speculant train seq2seq english.txt german.txt --out target --minutes 60",
    "speculant train seq2seq english.txt german.txt --out target --minutes 60 --resume",
    "speculant train seq2seq english.txt german.txt --out draft --teacher target --hidden 128 --layers 2 --minutes 15",
)
_NEEDED = {"out": "FOLDER", "target": "demo", "kind": "KIND"}  # flags without a default, and a value to suggest

Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")]

app = command_group(help="Train small models: a target, a draft for a target, or a head.", epilog=EXAMPLES)


@app.callback()
def train() -> None:
    """Train small models: a target, or a draft for a target."""


class RunFlags(FlagGroup):
    """The annotated fields of a run's configuration."""

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls.sets, include_extras=True)
        every = [(field.name, hints[field.name]) for field in dataclasses.fields(cls.sets)]
        cls.__annotations__ = {name: _of_flag(hint) for name, hint in every if get_origin(hint) is Annotated}

    def config(self, **arguments: Path) -> Any:
        """Return the configuration. Raises ConfigError if a flag that must be given is missing."""
        needed = [name for name in _NEEDED if name in self.names()]
        for name in needed:
            if name not in self.given:
                problem = "there is no folder to write to" if needed == ["out"] else f"--{name} is missing"
                raise ConfigError(problem, f"add --{name} {_NEEDED[name]}.")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in self.given.items()}
        return self.sets(**values, **arguments)


def _of_flag(hint: Any) -> Any:
    """Return the annotation of a flag for that of a field: a tuple is a flag that can be repeated."""
    kind, description = get_args(hint)
    return Annotated[list[get_args(kind)[0]] if get_origin(kind) is tuple else kind, description]  # type: ignore[misc]


class TrainingFlags(RunFlags):
    """The model, the data and the length of a training run."""

    sets = TrainingConfig


class BoostedFlags(RunFlags):
    """The drafts, the texts and the length of the runs."""

    sets = BoostedConfig


class HeadFlags(RunFlags):
    """The head, its texts and the length of its training."""

    sets = HeadTrainingConfig


class Seq2SeqFlags(RunFlags):
    """The model, its pairs of texts and the length of a run."""

    sets = Seq2SeqConfig


@app.command("lm", epilog=EXAMPLES)
@accepts_log_level
@accepts_flags
def lm(resume: Resume = False, as_json: AsJson = False, *, flags: TrainingFlags) -> None:
    """Train a Llama-format language model, and its tokenizer, on text files.

    When the run ends, the folder can be used as `--model` or `--draft-model`. --resume continues an
    interrupted run from its last checkpoint.
    """
    from speculant.lab.training import LanguageRun

    _carry_out(LanguageRun(flags.config(), _shown()), resume, as_json)


@app.command("draft", epilog=_DRAFT_EXAMPLES)
@accepts_log_level
@accepts_flags
def draft(resume: Resume = False, as_json: AsJson = False, *, flags: BoostedFlags) -> None:
    """Train several small drafts for one tree, or one draft that predicts several tokens in one pass.

    The target continues prompts. The first draft learns the target's distributions at every token of these texts. Each
    later draft learns them where no earlier one predicts the target's likeliest token. In the method specinfer, the
    first draft is the `model` and the others are the `models`. With --parallel, there is one draft, which also learns
    to predict further tokens from masks; it is the `model` of the method parallel (PARD, arXiv 2504.18583).
    """
    from speculant.lab.training import DraftsRun

    _carry_out(DraftsRun(flags.config(), _shown()), resume, as_json)


@app.command("seq2seq", epilog=_SEQ2SEQ_EXAMPLES)
@accepts_log_level
@accepts_flags
def seq2seq(
    sources: Annotated[Path, typer.Argument(help="A file with a source per line; in .jsonl files a JSON string.")],
    targets: Annotated[Path, typer.Argument(help="A file of the same form with the targets, in the same order.")],
    resume: Resume = False,
    as_json: AsJson = False,
    *,
    flags: Seq2SeqFlags,
) -> None:
    """Train an encoder-decoder model in T5's format (1.1), and its tokenizer, on pairs of texts.

    The encoder reads a source, and the decoder learns to write its target. Texts with line breaks are JSON strings in
    .jsonl files. With --teacher, the model is a draft: it learns the teacher's distributions and has its tokenizer.
    When the run ends, the folder can be used as `--model` or `--draft-model`.
    """
    from speculant.lab.training import Seq2SeqRun

    _carry_out(Seq2SeqRun(flags.config(sources=sources, targets=targets), _shown()), resume, as_json)


@app.command("head", epilog=_HEAD_EXAMPLES)
@accepts_log_level
@accepts_flags
def head(resume: Resume = False, as_json: AsJson = False, *, flags: HeadFlags) -> None:
    """Train a head on texts that the target itself writes.

    The target continues prompts, or with --chat writes conversations. The head learns the target's distributions from
    its hidden states, which are kept on disk. When the run ends, the folder can be used:
    --speculative-config '{"method": KIND, "model": FOLDER}'.
    """
    from speculant.lab.training import HeadRun

    _carry_out(HeadRun(flags.config(), _shown()), resume, as_json)


def _shown() -> Show:
    from speculant.lab.training import Show

    return Show(progress, shown_progress, show_training, messages().print)


def _carry_out(run: TrainingRun[Any, Any] | DraftsRun, resume: bool, as_json: bool) -> None:
    """Train, and print what was measured."""
    outcome = run.carry_out(resume)
    if as_json:
        print_json(dataclasses.asdict(outcome))
    else:
        for line in run.summary(outcome):
            messages().print(line)


_STATIC_EXAMPLES = examples(
    "speculant train static README.md docs/*.md --tokenizer demo --out tables.safetensors",
    "speculant train static outputs.jsonl --tokenizer demo --out tables.safetensors --continuations 64",
    "speculant train static german.txt --tokenizer google/flan-t5-small --out tables.safetensors",
)
MOST_CONTINUATIONS = 1024


@app.command(epilog=_STATIC_EXAMPLES)
@accepts_log_level
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
    outcome = _count_pairs(files, tokenizer, out, continuations)
    if as_json:
        print_json(outcome)
    else:
        messages().print(
            f"{out}: {outcome['tokens']:,} tokens, {outcome['pairs']:,} different pairs,"
            f" {outcome['continuations']:,} kept, {outcome['bytes'] / 2**20:.1f} MiB"
        )


def _count_pairs(files: list[Path], model: str, out: Path, continuations: int) -> dict[str, Any]:
    from speculant.drafting import BigramTables
    from speculant.lab.training import count_bigrams
    from speculant.models import resolve_source
    from speculant.text import Tokenizer

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
    from speculant.models import read_description, read_generation, read_optional_config, read_start_tokens
    from speculant.text import read_sequences

    config = read_optional_config(folder)
    if not config or read_description(config).encoder is None:
        return read_sequences(files, tokenizer)
    start = read_start_tokens(read_generation(folder), config, vocab_size_of(folder, tokenizer))
    return decoder_texts(files, tokenizer, start)


def decoder_texts(files: Sequence[Path], tokenizer: Tokenizer, start: Sequence[int]) -> Iterator[list[int]]:
    """Yield the text of each line after the start tokens, with the end tokens that the tokenizer adds to a text."""
    from speculant.text import read_lines

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
    from speculant.models import count, read_optional_config

    config = read_optional_config(folder)
    return count(config, "vocab_size") if config else tokenizer.vocab_size


_TOKENS_EXAMPLES = examples(
    "speculant train head-tokens README.md docs/*.md --target demo --out head.json",
    "speculant train head-tokens outputs.jsonl --target demo --size 2048 --out head.json",
    "speculant train head-tokens outputs.jsonl --target demo --draft demo --out head.json",
    "speculant train head-tokens outputs.jsonl --target demo --draft demo --method eagle --out head.json",
)
TEXTS, TOKENS = 8, 128  # the most texts along which drafts are compared, and their tokens
SHARE = 4  # by default a head keeps a quarter of the vocabulary (arXiv 2502.14856, section 4)


@app.command(epilog=_TOKENS_EXAMPLES)
@accepts_log_level
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
    outcome = _keep_tokens(files, config, out, size)
    if as_json:
        print_json(outcome)
    else:
        _show_sizes(messages(), out, outcome)


def _show_sizes(console: Console, out: Path, outcome: Mapping[str, Any]) -> None:
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


def _keep_tokens(files: list[Path], config: EngineConfig, out: Path, size: int | None) -> dict[str, Any]:
    import numpy as np

    from speculant.drafting import save_head_tokens
    from speculant.lab.training import count_tokens
    from speculant.models import resolve_source
    from speculant.text import Tokenizer, read_sequences

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
    sizes: list[HeadSize] = []
    wanted = size or max(1, vocab_size // SHARE)
    if config.draft_model:
        from speculant.lab.bench import best_size, measure_sizes

        with progress_of_parts() as parts:
            sizes = measure_sizes(config, counts, order, len(ends), texts, parts.begin)
        wanted = best_size(sizes).size
    kept = order[: max(wanted, len(ends))]
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


def _by_use(counts: np.ndarray[Any, Any], ends: frozenset[int]) -> list[int]:
    """Return the end tokens, then the others by their counts; the lowest ids among equals."""
    order = (-counts).argsort(kind="stable").tolist()
    return [*sorted(ends), *(token for token in order if token not in ends)]


def _ends(folder: Path, vocab_size: int) -> frozenset[int]:
    """Return the model's end tokens; a folder with only a tokenizer has none."""
    from speculant.models import read_end_tokens, read_generation, read_optional_config

    config = read_optional_config(folder)
    return read_end_tokens(read_generation(folder), config, vocab_size) if config else frozenset()
