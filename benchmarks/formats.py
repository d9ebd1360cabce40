"""Formats of weights compared with bfloat16: bytes, divergence, agreement, speed, and llama.cpp's divergence.

The models are SmolLM2-135M-Instruct with weights on no grid (`lab/inflation/kept.py`; `make real-models` gets the
original) and the embedded target. The reference is each model's bfloat16 weights on the reference kernels in float32.
`speculant bench quality` measures the same way.

llama.cpp's llama-quantize makes q8_0, q4_0 and q4_k_m from the bfloat16 weights, if LLAMA_CPP names the folder of its
programs; else `speculant quantize` makes q8_0 and q4_0. llama.cpp reads int8 and int4 from files of `speculant
quantize`; the engine rounds the weights itself, to the same numbers. Where a width is not a multiple of 256, as most of
SmolLM2's, q4_k_m has q5_0 and q8_0 in place of q4_k and q6_k.

`gptq` has 4 bits without zero points, `awq` 4 bits with zero points. Both methods (benchmarks/quantised) see texts that
the model writes, and have groups of 64, because SmolLM2's hidden size is not a multiple of 128. `fp8` has a scale for
each block of 128 x 128. In all three, the embedding and the head stay in bfloat16.

The text is half written by the model itself, at temperature 1, and half real: pages of this repository for SmolLM2, and
files of Python's standard library that the embedded target was not trained on.

`llama_cpp_kl` is llama-perplexity's mean on the same file, chunks and reference. `speed` is tokens per second of plain
decoding, one request at a time, over that of bfloat16 in the same round, as quartiles over the rounds.
`mib` is the size of all matrices in memory, `mib_per_token` the part that each pass reads.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # for `tests` and its neighbours, however the script is started

from benchmarks.quantised.awq import scale_inputs
from benchmarks.quantised.gptq import solve, sums_of_inputs

from speculant import LLM, SamplingParams
from speculant.config import EngineConfig
from speculant.engine import build_around
from speculant.files import cache_folder
from speculant.lab.bench import (
    COMPLETION,
    WITHOUT_DRAFTS,
    Bench,
    Benchmark,
    Compared,
    Mode,
    QualityText,
    Workload,
    interleave,
    markdown,
    prompts_of,
    quality_document,
    quartiles,
    ratio,
    read_text,
    shown,
)
from speculant.lab.inflation import decoded_model, rescaled_model
from speculant.lab.quantize import TYPES, quantize
from speculant.lab.training import read_corpus, standard_library
from speculant.models import Checkpoint, load_model, resolve_source
from speculant.text import Tokenizer, read_prompts
from tests.gguf_models import convert
from tests.quantised_folders import (
    HF_FP8,
    Gptq,
    awq_config,
    awq_module,
    e4m3,
    edit_config,
    gptq_module,
    is_linear,
    rounded,
)
from tests.real.llama_cpp import BaseFile, LlamaCpp
from tests.real.texts import pages

SMOLLM2 = Path(os.environ.get("SPECULANT_REAL_MODELS") or cache_folder("models")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = Path(__file__).with_name("real_text.jsonl")
CONTEXT, ANSWER = 512, 320  # tokens of a chunk, and the most of a text that the model writes
PIECE = 1500  # characters of a piece of real text
QUICK_TOKENS = 1024
MIB = 2**20
PACKED = {"gptq": Gptq(size=64, sym=True), "awq": Gptq(size=64), "fp8": Gptq()}  # folders of quantised modules


class Form(NamedTuple):
    """How a model is loaded here, and its name in the table.

    gguf: llama.cpp reads a GGUF file. from_file: the engine reads that file, too.
    packed: the engine reads a folder of quantised modules.
    """

    label: str
    quantization: str | None = None
    gguf: bool = True
    from_file: bool = False
    packed: bool = False


FORMS = {
    "bf16": Form("bfloat16"),
    "int8": Form("`int8`", "int8"),
    "int4": Form("`int4`", "int4"),
    **{name: Form(name.upper(), from_file=True) for name in ("q8_0", "q4_0", "q4_k_m")},
    "gptq": Form("GPTQ, 4 bits", gguf=False, packed=True),
    "awq": Form("AWQ, 4 bits", gguf=False, packed=True),
    "fp8": Form("FP8", gguf=False, packed=True),
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


class Author:
    """A model that writes texts at temperature 1, and real texts of the kind that it was trained on."""

    def __init__(self, model: str, folder: Path) -> None:
        self._llm = LLM(str(folder), dtype="bfloat16", max_num_seqs=16, max_model_len=1024)
        self._is_embedded = model == "embedded"

    def write(self, count: int, first_seed: int = 0) -> list[str]:
        """Write texts after `count` prompts."""
        llm = self._llm
        prompts = (
            prompts_of(COMPLETION, llm.tokenizer, count) if self._is_embedded else _questions(llm.tokenizer, count)
        )
        params = [SamplingParams(temperature=1.0, seed=first_seed + own, max_tokens=ANSWER) for own in range(count)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            llm.tokenizer.decode([*prompt, *output.outputs[0].token_ids], skip_special_tokens=False)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def real(self, count: int, generator: random.Random) -> list[str]:
        """Return pieces of real texts."""
        texts = [each.text for each in read_corpus([standard_library()]).held_out] if self._is_embedded else pages()
        whole = "\n\n".join(texts)
        places = [generator.randrange(len(whole) - PIECE) for _ in range(count)]
        return [whole[place : place + PIECE] for place in places]


def write_texts(model: str, folder: Path, into: Path, tokens: int, calibration: int) -> tuple[Path, Path]:
    """Write a text of about `tokens` tokens, own and real ones in random order, and one of own texts to calibrate."""
    author, generator = Author(model, folder), random.Random(0)
    count, calibrating = tokens // (2 * ANSWER) + 1, calibration // ANSWER + 1
    texts = [*author.write(count), *author.real(count, generator)]
    generator.shuffle(texts)
    paths = into / "text.txt", into / "calibration.txt"
    for path, own in zip(paths, (texts, author.write(calibrating, first_seed=count)), strict=True):
        path.write_text("\n\n".join(own), encoding="utf-8")
    return paths


def _questions(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    read = [str(each.content) for each in read_prompts(PROMPTS)]
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": each}]) for each in read]
    return [tokenizer.encode(texts[number % len(texts)], add_special_tokens=False) for number in range(count)]


def make_files(folder: Path, into: Path, forms: Sequence[str], programs: LlamaCpp | None) -> dict[str, Path]:
    """Write the GGUF files that can be made, by name of the form."""
    made = {"bf16": convert(folder, into / "bf16.gguf", "BF16")}
    for name in (each for each in forms if FORMS[each].gguf and each != "bf16"):
        file = into / f"{name}.gguf"
        if FORMS[name].quantization or (programs is None and name in TYPES):
            quantize(folder, file, name, lambda _: None)
        elif programs is not None:
            command = [programs.folder / "llama-quantize", made["bf16"], file, name.upper()]
            subprocess.run([*map(str, command), str(torch.get_num_threads())], check=True, capture_output=True)
        else:
            continue
        made[name] = file
    return made


def write_packed(name: str, folder: Path, out: Path, sums: Mapping[str, Tensor]) -> Path:
    """Write a model with quantised modules to a folder."""
    stored, found, own = load_file(folder / "model.safetensors"), dict[str, Tensor](), PACKED[name]
    if name == "awq":
        stored = scale_inputs({key: tensor.float() for key, tensor in stored.items()}, sums, own)
    for key, tensor in stored.items():
        module = key.removesuffix(".weight")
        if not is_linear(key, tensor) or module == "lm_head":
            found[key] = tensor.bfloat16()
        elif name == "fp8":
            made = e4m3(128, 128, ".weight_scale_inv")(tensor.float()).tensors
            found |= {module + end: each.contiguous() for end, each in made.items()}
        else:
            parts = (
                awq_module(own, rounded(tensor.numpy(), own)) if name == "awq"
                else gptq_module(own, solve(tensor.float(), sums[module], own))
            )  # fmt: skip
            found |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
    shutil.copytree(folder, out)
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    entries = {"gptq": own.config, "awq": awq_config(own.size), "fp8": {**HF_FP8, "weight_block_size": [128, 128]}}
    edit_config(out, quantization_config=entries[name])
    return out


def load(folder: Path, form: Form, made: Path | None) -> Checkpoint:
    """Load a model in a form; made: its file or folder."""
    source = made if (form.from_file or form.packed) and made is not None else folder
    return load_model(
        str(source), "bfloat16", kernels="auto", quantization=form.quantization, weight_packing="plain",
        weight_cache=cache_folder("weights"),
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
    found = quality_document(models, path, text, list(models.scores(text)))
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
    workload = Workload("text", [prompt])
    mode = Mode(SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))

    def runner(checkpoint: Checkpoint) -> Callable[[], float]:
        config = EngineConfig.from_arguments(
            model=str(folder), dtype="bfloat16", max_num_seqs=1, max_model_len=1024, **WITHOUT_DRAFTS
        )
        bench = Bench(build_around(config, checkpoint))
        bench.warm_up(workload, mode)
        return lambda: bench.run(workload, mode).figures()["request_tokens_per_s"]

    found = interleave({name: runner(each) for name, each in loaded.items()}, rounds)
    first = next(iter(loaded))
    return {name: {"tokens_per_s": quartiles(own), "speed": ratio(found, name, first)} for name, own in found.items()}


def compare(model: str, arguments: argparse.Namespace, into: Path) -> dict[str, dict[str, Any]]:
    """Measure all forms of a model."""
    folder, programs = folder_of(model), LlamaCpp.find()
    tokens, calibration = (QUICK_TOKENS,) * 2 if arguments.quick else (arguments.tokens, arguments.calibration)
    tell(f"{model}: writing texts")
    path, calibrating = write_texts(model, folder, into, tokens, calibration)
    forms = ["bf16", *(name for name in arguments.forms if name != "bf16")]
    tokenizer = Tokenizer.load(folder)
    text = QualityText.read(path, tokenizer, CONTEXT, tokens)
    seen = QualityText.read(calibrating, tokenizer, CONTEXT, calibration)
    reference = load_model(str(folder), "float32", kernels="reference")
    sums = sums_of_inputs(reference.model, seen.chunks) if {"gptq", "awq"} & {*forms} else {}
    tell(f"{model}: writing files")
    made = make_files(folder, into, forms, programs)
    for name in (each for each in forms if FORMS[each].packed):
        tell(f"{model}: writing {name}")
        made[name] = write_packed(name, folder, into / name, sums)
    base = write_base(reference, text, into / "base.kld") if programs else None
    found, loaded = dict[str, dict[str, Any]](), dict[str, Checkpoint]()
    for name in forms:
        form, file = FORMS[name], made.get(name)
        if form.from_file and file is None:
            continue
        tell(f"{model}: {name}")
        loaded[name] = load(folder, form, file)
        found[name] = quality(reference, loaded[name], path, text)
        if form.gguf and file is not None and base is not None and programs is not None:
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
    header = ["Weights", "MiB", "MiB per token", "mean KL", "same token", "perplexity", "speed", "KL in llama.cpp"]
    tables = [
        f"{model}\n\n{markdown(header, [_row(name, each) for name, each in found['forms'].items()])}"
        for model, found in figures.items()
    ]
    return "\n\n".join(tables)


def _row(name: str, each: Mapping[str, Any]) -> list[str]:
    kl, speed, theirs = each["kl"], each["speed"], each.get("llama_cpp_kl")
    return [
        FORMS[name].label, f"{each['mib']:.1f}", f"{each['mib_per_token']:.1f}",
        f"{kl['mean']:.5f} ± {kl['error'] or 0:.5f}",
        f"{each['top_1']['mean']:.1%}", f"{each['perplexity_ratio']['mean']:.4f}",
        shown(speed), "" if theirs is None else f"{theirs:.5f}",
    ]  # fmt: skip


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="int8 and q8_0 differ by less than their standard errors. int4 is no further than q4_k_m. On the same"
    " file ours are no further than llama.cpp's by more than a standard error. int4 and q4_0 are twice as fast.",
    measure=measure, rounds=9, show=show,
    options={
        "models": {"nargs": "+", "choices": ["smollm2", "embedded"], "default": ["smollm2", "embedded"]},
        "forms": {"nargs": "+", "choices": [*FORMS], "default": [*FORMS]},
        "tokens": {"type": int, "default": 16384, "help": "of the text"},
        "calibration": {"type": int, "default": 16384, "help": "tokens that GPTQ and AWQ see"},
        "answer": {"type": int, "default": 64, "help": "tokens that are generated to measure the speed"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
