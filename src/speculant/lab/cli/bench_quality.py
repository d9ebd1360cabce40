"""`speculant bench quality`: how far a model's distributions are from another model's, along a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speculant.cli import (
    EXIT_INTERRUPTED,
    NamedModel,
    examples,
    fetch,
    model_first,
    plain_table,
    print_json,
    progress,
    results,
)
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.cli.bench_io import AsJson
from speculant.lab.cli.progress import shown_progress

if TYPE_CHECKING:
    from speculant.lab.bench import ChunkScores, Compared, QualityText

EXAMPLES = examples(
    "speculant bench quality ./llama --quantization-b int4 --text book.txt",
    "speculant bench quality ./llama --kv-cache-dtype-b int8 --text book.txt",
    "speculant bench quality ./llama llama-Q4_K_M.gguf --text book.txt --tokens 65536",
    "speculant bench quality ./llama ./llama-gptq --dtype-a float32 --kernels-a reference --text book.txt --json",
)
CONTEXT, TOKENS = 512, 16384

Reference = Annotated[
    str | None, typer.Argument(metavar="A", help="The reference: a folder, GGUF file, hub id or demo.")
]
Judged = Annotated[str | None, typer.Argument(metavar="B", help="The model that is judged [default: A's files].")]
Text = Annotated[Path | None, typer.Option("--text", help="A UTF-8 file with the text.")]
Context = Annotated[int, typer.Option(help="Tokens of a chunk; its first half is not scored.")]
Tokens = Annotated[int, typer.Option(help="The most tokens of the text to use.")]
DtypeA = Annotated[str | None, typer.Option("--dtype-a", help="A's type: auto, float64, float32 or bfloat16.")]
DtypeB = Annotated[str | None, typer.Option("--dtype-b", help="The same of B.")]
QuantizationA = Annotated[str | None, typer.Option("--quantization-a", help="Round A's weights to int8 or int4.")]
QuantizationB = Annotated[str | None, typer.Option("--quantization-b", help="The same of B.")]
CacheA = Annotated[
    str | None, typer.Option("--kv-cache-dtype-a", help="A's keys and values: auto, int8, bfloat16 or float32.")
]
CacheB = Annotated[str | None, typer.Option("--kv-cache-dtype-b", help="The same of B.")]
KernelsA = Annotated[str | None, typer.Option("--kernels-a", help="A's kernels: auto, native or reference.")]
KernelsB = Annotated[str | None, typer.Option("--kernels-b", help="The same of B.")]
Device = Annotated[str | None, typer.Option(help="Where to compute both: cpu, cuda, or one such as cuda:1.")]


def quality(
    reference: Reference = None,
    judged: Judged = None,
    named: NamedModel = None,
    text: Text = None,
    context: Context = CONTEXT,
    tokens: Tokens = TOKENS,
    dtype_a: DtypeA = None,
    dtype_b: DtypeB = None,
    quantization_a: QuantizationA = None,
    quantization_b: QuantizationB = None,
    kv_cache_dtype_a: CacheA = None,
    kv_cache_dtype_b: CacheB = None,
    kernels_a: KernelsA = None,
    kernels_b: KernelsB = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far a model's distributions are from a reference model's, along a text.

    The figures are the divergence KL(A || B) in nats with its percentiles, the share of positions at which both models
    find the same token likeliest, and both perplexities. Chunks are cut and scored as in llama-perplexity, so figures
    can be compared with llama.cpp's. Ctrl-C shows the figures so far.
    """
    model_a, model_b = model_first(named, reference, judged, needed=("model",))
    if text is None:
        raise ConfigError("no text was given", "add --text FILE with a text to read, best of 10,000 tokens or more.")
    sides = [
        _config(
            model_a,
            device,
            dtype=dtype_a,
            quantization=quantization_a,
            kernels=kernels_a,
            kv_cache_dtype=kv_cache_dtype_a,
        ),
        _config(
            model_b or model_a,
            device,
            dtype=dtype_b,
            quantization=quantization_b,
            kernels=kernels_b,
            kv_cache_dtype=kv_cache_dtype_b,
        ),
    ]
    for side in sides:
        fetch(side)
    with progress("Loading the models"):
        models, read = _prepare(sides[0], sides[1], text, context, tokens)
    scores, complete = _compare(models, read)
    from speculant.lab.bench import quality_document

    value = quality_document(models, text, read, scores)
    if as_json:
        print_json(value)
    else:
        _show(results(), value)
    if not complete:
        raise typer.Exit(EXIT_INTERRUPTED)


def _config(model: str, device: str | None, **given: str | None) -> EngineConfig:
    """Return the configuration of one side; None = the default."""
    values = {name: value for name, value in {**given, "device": device}.items() if value is not None}
    return EngineConfig.from_arguments(model=model, **values)


def _prepare(
    reference: EngineConfig, judged: EngineConfig, path: Path, context: int, tokens: int
) -> tuple[Compared, QualityText]:
    """Read the text, then load both models."""
    from speculant.lab.bench import Compared, QualityText
    from speculant.models import resolve_source
    from speculant.text import Tokenizer

    text = QualityText.read(path, Tokenizer.load(resolve_source(reference.model)), context, tokens)
    models = Compared.load(reference, judged)
    models.check(text)
    return models, text


def _compare(models: Compared, text: QualityText) -> tuple[list[ChunkScores], bool]:
    """Return the scores of the chunks, and whether these are all: Ctrl-C ends the comparison early."""
    scores: list[ChunkScores] = []
    try:
        with shown_progress("Comparing") as watch:
            for each in models.scores(text):
                scores.append(each)
                watch(len(scores) / len(text.chunks))
    except KeyboardInterrupt:
        if not scores:
            raise
    return scores, len(scores) == len(text.chunks)


def _show(console: Console, value: Mapping[str, Any]) -> None:
    for letter, name in (("A", "reference"), ("B", "judged")):
        console.print(f"{letter}: {_described(value[name])}{_share(value) if letter == 'B' else ''}")
    text, kl = value["text"], value["kl"]
    part = "" if text["chunks"] == text["chunks_of_text"] else f" of {text['chunks_of_text']}"
    chunks = f"{text['chunks']}{part} chunks of {text['context']} tokens"
    console.print(f"{text['file']}: {chunks}, {text['scored']} scored positions\n")
    console.print(_table(value))
    tail = ", ".join(f"{label} {kl[name]:.3g}" for label, name in TAIL)
    console.print(f"\nKL(A || B) of single positions: {tail}")
    if text["chunks"] == 1:
        console.print("note: one chunk gives no intervals; use a longer text", style="yellow")


TAIL = (("median", "median"), ("90%", "p90"), ("99%", "p99"), ("99.9%", "p99_9"), ("maximum", "max"))


def _described(model: Mapping[str, Any]) -> str:
    size = "" if model["weight_bytes"] is None else f", {model['weight_bytes'] / 2**20:,.1f} MiB of weights"
    return f"{model['name']}, {model['dtype']}, kernels: {model['kernels']}{size}"


def _share(value: Mapping[str, Any]) -> str:
    """Return B's part of A's weights."""
    ours, theirs = value["judged"]["weight_bytes"], value["reference"]["weight_bytes"]
    return f", {ours / theirs:.2f} of A's" if ours and theirs else ""


def _table(value: Mapping[str, Any]) -> Table:
    perplexity = value["perplexity"]
    rows = {
        "mean KL(A || B)": value["kl"],
        "same likeliest token": value["top_1"],
        "perplexity of A": perplexity["reference"],
        "perplexity of B": perplexity["judged"],
        "perplexity of B / A": perplexity["ratio"],
    }
    lines = []
    for name, each in rows.items():
        error, interval = "-", "-"
        if each["error"] is not None:
            error, interval = f"{each['error']:.2g}", f"{each['low']:.5g} to {each['high']:.5g}"
        lines.append((name, f"{each['mean']:.5g}", error, interval))
    return plain_table(("", "mean", "std. error", "95% interval"), lines)
