"""Formats of weights beside bfloat16: bytes, divergence, agreement and speed, with llama.cpp's divergence on the files.

The models are SmolLM2-135M-Instruct with weights on no grid (`lab/inflation/rescaled.py`; `make real-models` gets the
original) and the embedded target. The reference is each model's bfloat16 weights on the reference kernels in float32.
`speculant bench quality` measures the same way. GGUF files are made from the bfloat16 weights by llama.cpp's
llama-quantize, if LLAMA_CPP names the folder of its programs; else by the package `gguf`, which can't make q4_k_m.

The text is half written by the model itself, at temperature 1, and half real: pages of this repository for SmolLM2, and
files of Python's standard library that the embedded target was not trained on.

`llama_cpp_kl` is llama-perplexity's mean on the same file, chunks and reference. `speed` is tokens per second of plain
decoding, one request at a time, over that of bfloat16 in the same round; figures are quartiles over the rounds.
`mib` is the size of all matrices in memory, `mib_per_token` the part that each pass reads.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))  # for `tests`, however the script is started

from speculant import LLM, SamplingParams
from speculant.config import EngineConfig
from speculant.engine.build import build_around
from speculant.files import cache_folder
from speculant.lab.bench.acceptance import read_text
from speculant.lab.bench.decoding import COMPLETION, PLAIN, decode, prompts_of
from speculant.lab.bench.measuring import interleave
from speculant.lab.bench.prompt_files import read_prompts
from speculant.lab.bench.quality import Compared, QualityText, document
from speculant.lab.bench.runner import Benchmark, markdown, quartiles, ratio
from speculant.lab.inflation.kept import decoded_model, rescaled_model
from speculant.lab.training.corpus import read_corpus, standard_library
from speculant.models.source import resolve_source
from speculant.models.weights.load import Checkpoint, load_model
from speculant.text.tokenizer import Tokenizer
from tests.gguf_models import convert
from tests.real.llama_cpp import BaseFile, LlamaCpp
from tests.real.texts import pages

SMOLLM2 = Path(os.environ.get("SPECULANT_REAL_MODELS") or cache_folder("models")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = Path(__file__).with_name("real_text.jsonl")
CONTEXT, ANSWER = 512, 320  # tokens of a chunk, and the most of a text that the model writes
PIECE = 1500  # characters of a piece of real text
QUICK_TOKENS = 1024
MIB = 2**20


class Form(NamedTuple):
    """How a model is loaded here, and the type of its GGUF file; None = there is no such file.

    from_file: our engine reads the file too, not the folder.
    """

    quantization: str | None = None
    gguf: str | None = None
    from_file: bool = False


FORMS = {
    "bf16": Form(gguf="BF16"),
    "int8": Form("int8"),
    "int4": Form("int4"),
    **{name: Form(gguf=name.upper(), from_file=True) for name in ("q8_0", "q4_0", "q4_k_m")},
}


def tell(progress: str) -> None:
    """Print a line of progress, with the time."""
    print(time.strftime("%H:%M:%S"), progress, file=sys.stderr, flush=True)


def folder_of(model: str) -> Path:
    """Return the folder of a model, which is made if it is missing."""
    if model == "embedded":
        return resolve_source("demo", "target")
    if not SMOLLM2.exists():
        sys.exit(f"{SMOLLM2} is not there; `make real-models` gets it.")
    return rescaled_model(decoded_model(SMOLLM2))


def write_text(model: str, folder: Path, path: Path, tokens: int) -> None:
    """Write a text of about this many tokens: the model's own texts and pieces of real ones, in random order."""
    llm = LLM(str(folder), dtype="bfloat16", max_num_seqs=16, max_model_len=1024)
    count = tokens // (2 * ANSWER) + 1
    if model == "embedded":
        prompts = prompts_of(COMPLETION, llm.tokenizer, count)
        real = "\n\n".join(each.text for each in read_corpus([standard_library()]).held_out)
    else:
        prompts = _questions(llm.tokenizer, count)
        real = "\n\n".join(pages())
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=ANSWER) for seed in range(count)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    own = [
        llm.tokenizer.decode([*prompt, *output.outputs[0].token_ids], skip_special_tokens=False)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    generator = random.Random(0)
    places = [generator.randrange(len(real) - PIECE) for _ in range(count)]
    texts = [*own, *(real[place : place + PIECE] for place in places)]
    generator.shuffle(texts)
    path.write_text("\n\n".join(texts), encoding="utf-8")


def _questions(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    read = [str(each.content) for each in read_prompts(PROMPTS)]
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": each}]) for each in read]
    return [tokenizer.encode(texts[number % len(texts)], add_special_tokens=False) for number in range(count)]


def make_files(folder: Path, into: Path, forms: Sequence[str], programs: LlamaCpp | None) -> dict[str, Path]:
    """Write the GGUF files that can be made, by name of the form."""
    made = {"bf16": convert(folder, into / "bf16.gguf", "BF16")}
    for name in forms:
        kind = FORMS[name].gguf
        if kind is None or name in made:
            continue
        if programs is not None:
            command = [programs.folder / "llama-quantize", made["bf16"], into / f"{name}.gguf", kind]
            subprocess.run([*map(str, command), str(torch.get_num_threads())], check=True, capture_output=True)
            made[name] = into / f"{name}.gguf"
        elif name != "q4_k_m":
            made[name] = convert(folder, into / f"{name}.gguf", kind)
    return made


def load(folder: Path, form: Form, file: Path | None) -> Checkpoint:
    """Load a model in a form."""
    source = file if form.from_file and file is not None else folder
    kept = cache_folder("weights")
    return load_model(
        str(source), "bfloat16", kernels="auto", quantization=form.quantization, weight_packing="plain",
        weight_cache=kept,
    )  # fmt: skip


def write_base(reference: Checkpoint, text: QualityText, path: Path) -> BaseFile:
    """Write the reference's log-probabilities for llama-perplexity."""
    base = BaseFile(path, text.chunks, reference.model.vocab_size)
    for chunk in text.chunks:
        with torch.inference_mode():
            base.write(reference.model.logits(read_text(reference.model, chunk)).float())
    return base


def quality(reference: Checkpoint, judged: Checkpoint, path: Path, text: QualityText) -> dict[str, Any]:
    """Return the figures of a model."""
    models = Compared(reference, judged, min(reference.model.vocab_size, judged.model.vocab_size))
    found = document(models, path, text, list(models.scores(text)))
    return {
        "kernels": judged.kernels,
        "mib": found["judged"]["weight_bytes"] / MIB,
        "mib_per_token": getattr(judged.model, "bytes_per_pass", found["judged"]["weight_bytes"]) / MIB,
        **{name: found[name] for name in ("kl", "top_1")},
        "perplexity_ratio": found["perplexity"]["ratio"],
    }


def speeds(
    loaded: Mapping[str, Checkpoint], folder: Path, prompt: list[int], tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return the tokens per second of plain decoding of each form, and their ratios to the first one's."""

    def runner(checkpoint: Checkpoint) -> Callable[[], float]:
        config = EngineConfig.from_arguments(
            model=str(folder), dtype="bfloat16", max_num_seqs=1, max_model_len=1024, **PLAIN
        )
        runtime = build_around(config, checkpoint)
        decode(runtime, [prompt], 8)
        return partial(lambda: (tokens - 1) / decode(runtime, [prompt], tokens).decode_s)

    found = interleave({name: runner(each) for name, each in loaded.items()}, rounds)
    first = next(iter(loaded))
    return {name: {"tokens_per_s": quartiles(own), "speed": ratio(found, name, first)} for name, own in found.items()}


def compare(model: str, arguments: argparse.Namespace, into: Path) -> dict[str, dict[str, Any]]:
    """Measure all forms of a model."""
    folder, path, programs = folder_of(model), into / "text.txt", LlamaCpp.find()
    tokens = QUICK_TOKENS if arguments.quick else arguments.tokens
    tell(f"{model}: writing texts and files")
    write_text(model, folder, path, tokens)
    forms = ["bf16", *(name for name in arguments.forms if name != "bf16")]
    files = make_files(folder, into, forms, programs)
    text = QualityText.read(path, Tokenizer.load(folder), CONTEXT, tokens)
    reference = load_model(str(folder), "float32", kernels="reference")
    base = write_base(reference, text, into / "base.kld") if programs else None
    found, loaded = dict[str, dict[str, Any]](), dict[str, Checkpoint]()
    for name in forms:
        form, file = FORMS[name], files.get(name)
        if form.from_file and file is None:
            continue
        tell(f"{model}: {name}")
        loaded[name] = load(folder, form, file)
        found[name] = quality(reference, loaded[name], path, text)
        if file is not None:
            found[name]["file_mib"] = file.stat().st_size / MIB
        if file is not None and base is not None and programs is not None:
            found[name]["llama_cpp_kl"] = programs.divergence(file, base)
    tell(f"{model}: speed")
    measured = speeds(loaded, folder, list(text.chunks[0][:64]), arguments.answer, arguments.rounds)
    return {name: {**each, **measured[name]} for name, each in found.items()}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all models."""
    found = dict[str, Any]()
    for model in arguments.models:
        load_before = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as into:
            found[model] = {"forms": compare(model, arguments, Path(into)), "load": load_before}
        yield found


def show(figures: Mapping[str, Any]) -> str:
    """Return a table for each model."""
    header = ["weights", "MiB", "MiB per token", "mean KL", "same token", "perplexity", "speed", "KL in llama.cpp"]
    tables = [
        f"{model}\n\n{markdown(header, [_row(name, each) for name, each in found['forms'].items()])}"
        for model, found in figures.items()
    ]
    return "\n\n".join(tables)


def _row(name: str, each: Mapping[str, Any]) -> list[str]:
    kl, speed, theirs = each["kl"], each["speed"], each.get("llama_cpp_kl")
    return [
        name, f"{each['mib']:.1f}", f"{each['mib_per_token']:.1f}", f"{kl['mean']:.5f} ± {kl['error'] or 0:.5f}",
        f"{each['top_1']['mean']:.1%}", f"{each['perplexity_ratio']['mean']:.4f}",
        f"{speed['median']:.2f} ({speed['q1']:.2f}-{speed['q3']:.2f})", "" if theirs is None else f"{theirs:.5f}",
    ]  # fmt: skip


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="int8 and q8_0 differ by less than their standard errors. int4 is no further than q4_k_m. On the same"
    " file ours are no further than llama.cpp's by more than a standard error. int4 and q4_0 are twice as fast as bf16.",
    measure=measure, rounds=9, show=show,
    options={
        "models": {"nargs": "+", "choices": ["smollm2", "embedded"], "default": ["smollm2", "embedded"]},
        "forms": {"nargs": "+", "choices": [*FORMS], "default": [*FORMS]},
        "tokens": {"type": int, "default": 16384, "help": "of the text"},
        "answer": {"type": int, "default": 64, "help": "tokens that are generated to measure the speed"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
