"""llama.cpp, by its own programs: plain, a draft model, lookup; and its bench for several sequences.

Its threads spin while they wait, so nothing else may run at the same time. Each mode is a process of its own, which
loads the model; times are those that the program prints, without loading.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.base import (
    DRAFT,
    FILE,
    LOOKUP,
    PLAIN,
    Job,
    Measurement,
    Mode,
    Pair,
    Peer,
    PeerError,
    content_key,
    execute,
)

COMPLETE, SPECULATE, LOOK_UP = "llama-completion", "llama-speculative-simple", "llama-lookup"
BENCH, QUANTIZE, TOKENIZE = "llama-batched-bench", "llama-quantize", "llama-tokenize"
PROGRAMS = (COMPLETE, SPECULATE, LOOK_UP, BENCH, QUANTIZE, TOKENIZE)
_PLACES = ("", "bin", "build/bin")
_UNROUNDED = "bf16"
_SPARE = 64  # positions beyond those of the workload
_RESULT = '{"n_kv_max"'  # the start of the line of llama-batched-bench
_TRIES = 3
_SHORT = "def add(a, b):"  # of several tokens: AMX multiplies no single row
_BATCH = 2048  # tokens of a pass: more than a prompt's for the program that needs it


class LlamaCpp(Peer):
    """llama.cpp on the processor. folder: of its programs, or of its sources with build/bin; None = on PATH."""

    name = "llama.cpp"
    install = (
        "pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 &&"
        " tar xf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp &&"
        " cmake -B build -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF &&"
        f" cmake --build build -j 2 --target {' '.join(PROGRAMS)}; then add --llama-cpp with this folder"
    )
    formats: Mapping[str, Sequence[str]] = {
        _UNROUNDED: (_UNROUNDED,),
        "int8": ("q8_0",),
        "int4": ("q4_0", "q4_k_m"),
        FILE: (FILE,),
    }

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._helps: dict[str, str] = {}

    def missing(self) -> str | None:
        """Say why it can't run; None = it can."""
        absent = [name for name in PROGRAMS if self._find(name) is None]
        if absent:
            return f"{', '.join(absent)} not found in {self._folder or 'PATH'}"
        return None

    def version(self) -> str:
        """Return its version."""
        output = execute([self._program(COMPLETE), "--version"])
        lines = (output.stderr + output.stdout).splitlines()
        return next((line.removeprefix("version:").strip() for line in lines if line.startswith("version")), "unknown")

    def refusal(self, mode: Mode, batch: int) -> str | None:
        """Refuse drafts for several sequences: these programs draft for one."""
        return "its programs draft for one sequence" if batch > 1 and mode.kind != PLAIN else None

    def prepare(self, models: Pair, weights: str, folder: Path) -> Pair:
        """Write both models as `write_files` does, and try a short prompt. Raises PeerError."""
        prepared = self.write_files(models, weights, folder)
        options = {"-m": prepared.target, "-p": _SHORT, "-n": 2, "-c": _SPARE, "-t": 1}
        execute([self._program(COMPLETE), *flatten(options), "-no-cnv"])
        return prepared

    def write_files(self, models: Pair, weights: str, folder: Path) -> Pair:
        """Write both models as GGUF files, rounded by llama.cpp's own program. Raises PeerError."""
        if weights == FILE:
            return models
        exporter = Path(__file__).with_name("gguf_export.py").read_text(encoding="utf-8")
        made = {}
        for role in ("target", "draft"):
            model = getattr(models, role)
            key = content_key(model, [exporter, self.version()])
            file, unrounded = (folder / f"{role}-{format_}-{key}.gguf" for format_ in (weights, _UNROUNDED))
            if not file.exists():
                self._convert(model, weights, unrounded, file)
            made[role] = str(file)
        return Pair(**made)

    def _convert(self, model: str, weights: str, unrounded: Path, file: Path) -> None:
        partial = file.with_suffix(".partial")
        if not unrounded.exists():
            begun = unrounded.with_suffix(".partial")
            python = [self._folder / "gguf-py"] if self._folder else []
            execute([sys.executable, "-m", "benchmarks.peers.gguf_export", model, str(begun)], paths=python)
            begun.rename(unrounded)
        if file != unrounded:
            execute([self._program(QUANTIZE), str(unrounded), str(partial), weights])
            partial.rename(file)

    def run(self, job: Job) -> dict[str, Measurement]:
        """Run each mode's program. Raises PeerError, also if it reads a prompt as other tokens."""
        if len(job.workload.prompts) > 1:
            return {mode.name: self._bench(job) for mode in job.modes}
        with tempfile.TemporaryDirectory() as folder:
            prompt = Path(folder) / "prompt.txt"
            prompt.write_text(job.workload.texts[0] + "\n", encoding="utf-8")  # the programs drop one end of line
            self._check_tokens(job, prompt)
            return {mode.name: self._generate(job, mode, prompt) for mode in job.modes}

    def _generate(self, job: Job, mode: Mode, prompt: Path) -> Measurement:
        program, options = self._options(job, mode)
        context = job.workload.positions + _SPARE
        common = {
            "-m": job.models.target,
            "-f": prompt,
            "-c": context,
            "-b": max(_BATCH, context),
            "-t": job.threads,
            "-tb": job.threads,
            "--temp": 0,
        }
        command = [self._program(program), *flatten({**common, **options}), "--ignore-eos", "--no-escape"]
        done = execute([*command, *(("-no-cnv", "--no-display-prompt", "--perf") if program == COMPLETE else ())])
        output = done.stderr + done.stdout
        if program == COMPLETE:
            return read_completion(output, done.stdout)
        return read_speculation(output, done.stdout, job.workload.texts[0])

    def _options(self, job: Job, mode: Mode) -> tuple[str, dict[str, object]]:
        """Return a mode's program and its own options; programs that draft stop after the token that passes -n."""
        tokens = job.workload.tokens
        if mode.kind == PLAIN:
            return COMPLETE, {"-n": tokens}
        if mode.kind == LOOKUP:
            return LOOK_UP, {"-n": tokens - 1, self._spelling(LOOK_UP, "n-max"): mode.length}
        drafting: dict[str, object] = {"-md": job.models.draft, "-td": job.threads, "-tbd": job.threads}
        if "--spec-type" in self._help(SPECULATE):
            drafting["--spec-type"] = "draft-simple"
        if mode.kind == DRAFT:
            fixed = {"n-max": mode.length, "n-min": 0, "p-min": 0}
            drafting |= {self._spelling(SPECULATE, name): value for name, value in fixed.items()}
        return SPECULATE, {"-n": tokens - 1, **drafting}

    def _spelling(self, program: str, option: str) -> str:
        """Return this version's spelling of an option of drafts."""
        spellings = f"--spec-draft-{option}", f"--draft-{option.removeprefix('n-')}"
        return next((each for each in spellings if each in self._help(program)), spellings[0])

    def _help(self, program: str) -> str:
        if program not in self._helps:
            self._helps[program] = execute([self._program(program), "--help"]).stdout
        return self._helps[program]

    def _bench(self, job: Job) -> Measurement:
        workload, batch = job.workload, len(job.workload.prompts)
        options = {
            "-m": job.models.target,
            "-c": batch * (workload.positions + _SPARE),
            "-npp": len(workload.prompts[0]),
            "-ntg": workload.tokens,
            "-npl": batch,
            "-t": job.threads,
            "-tb": job.threads,
            "--output-format": "jsonl",
        }
        command = [self._program(BENCH), *flatten(options)]
        output = ""
        for _ in range(_TRIES):  # sometimes it succeeds and prints nothing
            done = execute(command)
            output = done.stdout + done.stderr
            if _RESULT in output:
                break
        return read_bench(output)

    def _check_tokens(self, job: Job, prompt: Path) -> None:
        text = prompt.with_name("exact.txt")
        text.write_text(job.workload.texts[0], encoding="utf-8")
        done = execute([self._program(TOKENIZE), "-m", job.models.target, "-f", str(text), "--ids", "--log-disable"])
        if json.loads(done.stdout.strip().splitlines()[-1]) != job.workload.prompts[0]:
            raise PeerError("llama.cpp reads the prompt as other tokens")

    def _program(self, name: str) -> str:
        found = self._find(name)
        if found is None:
            raise PeerError(f"{name} was not found in {self._folder or 'PATH'}")
        return found

    def _find(self, name: str) -> str | None:
        if self._folder is None:
            return shutil.which(name)
        found = (self._folder / place / name for place in _PLACES)
        return next((str(file.resolve()) for file in found if file.is_file()), None)


def flatten(options: Mapping[str, object]) -> list[str]:
    """Return options as arguments."""
    return [str(part) for pair in options.items() for part in pair]


def read_completion(output: str, text: str) -> Measurement:
    """Read the times of llama-completion. output: all that it printed. Raises PeerError if they are missing."""
    prompt, _ = _find_numbers(output, r"prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
    evaluation, runs = _find_numbers(output, r"(?<!prompt )eval time =\s*([\d.]+) ms /\s*(\d+) runs")
    [sampling] = _find_numbers(output, r"sampling time =\s*([\d.]+) ms")
    made = int(runs) + 1
    return Measurement(prompt / 1e3, (evaluation + sampling) / 1e3, made, 1, made, 0, None, [text])


def read_speculation(output: str, text: str, prompt: str) -> Measurement:
    """Read the times and counts of llama-speculative-simple and llama-lookup, whose text begins with the prompt."""
    [encoded] = _find_numbers(output, r"encoded\s+\d+ tokens in\s+([\d.]+) seconds")
    made, decoded = _find_numbers(output, r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
    [drafted] = _find_numbers(output, r"n_drafted\s+= (\d+)")
    [accepted] = _find_numbers(output, r"n_accept\s+= (\d+)")
    own = text.partition(prompt)[2] if prompt in text else text
    return Measurement(encoded, decoded, int(made), 0, int(made - accepted), int(drafted), None, [own])


def read_bench(output: str) -> Measurement:
    """Read the line of llama-batched-bench; its tokens are made up, and their cost is that of real ones."""
    line = next((line for line in output.splitlines() if line.startswith(_RESULT)), None)
    if line is None:
        raise PeerError(f"{BENCH} printed no result: {output.strip()[-200:]}")
    value = json.loads(line)
    made = value["pl"] * value["tg"]
    return Measurement(value["t_pp"], value["t_tg"], made, 0, made, 0)


def _find_numbers(output: str, pattern: str) -> list[float]:
    found = re.search(pattern, output)
    if found is None:
        raise PeerError(f"no {pattern!r} in its output: {output.strip()[-200:]}")
    return [float(each) for each in found.groups()]
