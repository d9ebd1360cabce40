"""The parts that all peers share: jobs, measurements, and the processes that run them.

A peer is one engine. Each job runs in a process of its own, perhaps with another interpreter, which imports this module
too: so it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRECISIONS = ("bf16", "int8", "int4")  # of weights; each peer has its own formats of them
FLOAT = "f32"  # another precision, which is measured only on request
FILE = "gguf"  # the precision, and the format, of GGUF files that are read as they are
MODES = PLAIN, DRAFT, LOOKUP, DEFAULT = "plain", "draft", "lookup", "default"
_TIMEOUT_S = 3600.0


class PeerError(Exception):
    """A peer failed; the message quotes its output."""


@dataclass(frozen=True)
class Mode:
    """A way to draft: not at all, with the draft model, from the text so far, or by the peer's defaults.

    length: tokens of a draft; None = the peer chooses.
    """

    kind: str
    length: int | None = None

    @property
    def name(self) -> str:
        """The name in tables."""
        return self.kind if self.length is None else f"{self.kind} {self.length}"


@dataclass(frozen=True)
class Pair:
    """The paths of target and draft."""

    target: str
    draft: str


@dataclass(frozen=True)
class Workload:
    """Prompts of one length that run together, as token ids and as text, and the number of greedy tokens after each.

    The ids begin with the tokens that the tokenizer adds to every text. They are the sources of an encoder-decoder
    model. The warm-up is not measured.
    """

    prompts: list[list[int]]
    texts: list[str]
    warm_up: list[list[int]]
    tokens: int

    @property
    def positions(self) -> int:
        """The largest number of positions of a sequence."""
        return max(map(len, self.prompts)) + self.tokens


@dataclass(frozen=True)
class Job:
    """The work of one process: one workload in each mode, with weights of one format."""

    models: Pair
    format: str
    modes: list[Mode]
    workload: Workload
    threads: int

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read the file that `write` wrote."""
        value = json.loads(path.read_text(encoding="utf-8"))
        modes, workload = [Mode(**each) for each in value["modes"]], Workload(**value["workload"])
        return cls(Pair(**value["models"]), value["format"], modes, workload, value["threads"])

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Measurement:
    """The figures of one run; tokens are those of all sequences together.

    first_s: seconds until every sequence has its first token; `first_tokens` exist then. decode_s: from then on.
    passes: of the target, counted for each sequence. drafted: None = unknown. outputs: token ids by sequence, or
    `texts` from a peer that returns text; neither from a peer that runs made-up tokens.
    """

    first_s: float
    decode_s: float
    tokens: int
    first_tokens: int
    passes: int
    drafted: int | None = None
    outputs: list[list[int]] | None = None
    texts: list[str] | None = None

    @property
    def tokens_per_s(self) -> float:
        """The speed after every sequence has its first token."""
        return (self.tokens - self.first_tokens) / self.decode_s

    @property
    def accepted(self) -> int:
        """Drafted tokens that are in the output: each pass adds one token that was not drafted."""
        return self.tokens - self.passes

    def seconds(self, tokens: int) -> float:
        """Return the time for this number of tokens, prompts included: some peers can't stop at an exact number."""
        return self.first_s + (tokens - self.first_tokens) / self.tokens_per_s


class Progress:
    """Records the lengths of outputs, step by step."""

    def __init__(self, sequences: int) -> None:
        self._lengths = [0] * sequences
        self._passes, self._first_tokens = 0, 0
        self._started = time.perf_counter()
        self._first = self._last = self._started

    def record(self, lengths: Sequence[int]) -> None:
        """Record the number of tokens of each sequence after a step."""
        self._last = time.perf_counter()
        self._passes += sum(new > old for new, old in zip(lengths, self._lengths, strict=True))
        self._lengths = list(lengths)
        if not self._first_tokens and all(lengths):
            self._first, self._first_tokens = self._last, sum(lengths)

    def end(self, outputs: list[list[int]], drafted: int | None) -> Measurement:
        """Return the measurement."""
        first_s, decode_s = self._first - self._started, self._last - self._first
        tokens = sum(self._lengths)
        return Measurement(first_s, decode_s, tokens, self._first_tokens, self._passes, drafted, outputs)


class Peer(ABC):
    """One engine.

    formats: its names of the weight formats for each precision. install: the commands that install it.
    """

    name = ""
    install = ""
    formats: Mapping[str, Sequence[str]] = {}

    def missing(self) -> str | None:
        """Return the reason why it can't run; None = it can."""
        try:
            self.version()
        except PeerError as error:
            return str(error)
        return None

    def refusal(self, mode: Mode, batch: int) -> str | None:
        """Return the reason why a mode can't run for a batch of this size; None = it can."""
        return None

    def prepare(self, models: Pair, weights: str, folder: Path) -> Pair:
        """Convert the models to the peer's format, unless `folder` has them already; return the converted models.

        `content_key` is part of a conversion's name, so that other weights or another converter make a new conversion.
        """
        return models

    @abstractmethod
    def version(self) -> str:
        """Return its version. Raises PeerError."""

    @abstractmethod
    def run(self, job: Job) -> dict[str, Measurement]:
        """Run a job in a process of its own; return the measurements by mode. Raises PeerError."""


class PythonPeer(Peer):
    """A peer that is a Python package, in this environment or another. The subclass's module has `measure(job)`."""

    package = ""  # the distribution's name

    def __init__(self, python: str = sys.executable) -> None:
        self.python = python

    def version(self) -> str:
        """See `Peer.version`."""
        return self._version_of(self.package)

    def _version_of(self, package: str) -> str:
        code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
        try:
            done = execute([self.python, "-c", code, package])
        except PeerError as error:
            if "PackageNotFoundError" in str(error):
                raise PeerError(f"{self.python} has no package {package}") from None
            raise
        return done.stdout.strip()

    def run(self, job: Job) -> dict[str, Measurement]:
        """See `Peer.run`."""
        module = type(self).__module__
        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder) / "job.json", Path(folder) / "results.json"
            job.write(files[0])
            execute([self.python, "-m", "benchmarks.peers.worker", module, *map(str, files)], job.threads)
            results = json.loads(files[1].read_text(encoding="utf-8"))
        return {mode: Measurement(**each) for mode, each in results.items()}


def execute(
    command: Sequence[str], threads: int | None = None, paths: Iterable[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, while this process waits. Raises PeerError if it fails.

    threads: for libraries that read OMP_NUM_THREADS. paths: for the modules of a Python program.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, cwd=ROOT, env=environment,
            timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        if done.returncode == -signal.SIGILL:
            raise PeerError(
                f"{command[0]} died of an illegal instruction (SIGILL): it was built for another processor, or its "
                "compiler broke it. Build it again here. For llama.cpp on a processor with AMX, add to cmake "
                "-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8 (benchmarks/results/README.md)"
            )
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise PeerError(f"{' '.join(command[:3])} failed ({done.returncode}): {' / '.join(lines[-3:])}")
    return done


def content_key(model: str, converter: Sequence[str]) -> str:
    """Return a name for the conversion of a model, from its weights, configuration, tokenizer and converter.

    converter: everything else that determines the result, such as the versions of packages.
    """
    digest = hashlib.sha256("\n".join(converter).encode())
    for file in sorted(Path(model).iterdir()):
        if file.suffix in (".safetensors", ".json"):
            with file.open("rb") as content:
                digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def plain_value(measured: Measurement) -> dict[str, Any]:
    """Return a measurement for JSON, without its outputs."""
    value = asdict(measured)
    return {name: each for name, each in value.items() if name not in ("outputs", "texts")}
