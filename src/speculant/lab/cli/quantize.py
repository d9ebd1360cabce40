"""`speculant quantize`: writes a model with weights of fewer bits."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from speculant.cli import NamedModel, examples, messages, model_first, print_json, progress_of_parts
from speculant.errors import ConfigError, suggest

EXAMPLES = examples(
    "speculant quantize ./llama llama-int4.gguf",
    "speculant quantize ./llama llama-int8.gguf --type int8",
    "speculant quantize ./llama llama-int4",
    "speculant quantize demo demo.gguf --force --json",
)


def quantize(
    model: Annotated[
        str | None,
        typer.Argument(help="A model with floating-point weights: a folder, GGUF file, Hugging Face id or demo."),
    ] = None,
    out: Annotated[str | None, typer.Argument(help="The file NAME.gguf or the folder to write.")] = None,
    named: NamedModel = None,
    type_: Annotated[str, typer.Option("--type", help="int4 or int8; q8_0 or q4_0 in GGUF files only.")] = "int4",
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a model whose weights are rounded to fewer bits.

    llama.cpp reads a file NAME.gguf too; it has the weights that --quantization computes with. A folder is in the
    format of compressed-tensors, which vLLM and transformers read. Its embedding and head are not rounded.
    """
    from speculant.lab.quantize import TYPES, quantize as write
    from speculant.models import CheckpointFiles, resolve_source

    target, place = model_first(named, model, out, needed=("model", "file or folder to write"))
    if type_ not in TYPES:
        raise ConfigError(f"--type {type_} is unknown", suggest(type_, TYPES))
    source, path, started = resolve_source(target, "target"), Path(place), time.perf_counter()
    with progress_of_parts() as parts:
        parts.begin(f"Writing {path}")
        size = write(source, path, type_, lambda name: parts.begin(f"Rounding {name}"), replace=force)
    seconds = time.perf_counter() - started
    if as_json:
        print_json({"path": str(path), "type": type_, "bytes": size, "seconds": seconds})
        return
    messages().print(f"{path}: {size / 2**20:,.1f} MiB in {seconds:.1f} s")
    if CheckpointFiles.open(path).decoder.encoder is not None:
        return
    compare = shlex.join(["speculant", "bench", "quality", target, str(path), "--text"])
    messages().print(f"to compare it with the original: {compare} FILE", soft_wrap=True)
