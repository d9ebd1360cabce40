"""What the peers share: a job, what is measured, and the process that does it.

A peer is one engine. Each job runs in a process of its own, perhaps with another interpreter, which reads this module
too: it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
PRECISIONS = ("bf16", "int8", "int4")  # of weights; each peer has its own formats of them
PLAIN, DRAFT, LOOKUP, DEFAULT = "plain", "draft", "lookup", "default"
_TIMEOUT_S = 3600.0


class PeerError(Exception):
    """A peer that could not do its job: what it said."""


@dataclass(frozen=True)
class Mode:
    """How tokens are drafted: not at all, by the draft model, from the text so far, or as the peer does by itself.

    length: tokens of a draft; None = the peer's own choice.
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
    """Prompts of one length that run together, as token ids and as text, and how many tokens follow each, greedily.

    The ids begin with those that the tokenizer adds to every text. The warm-up is not measured.
    """

    prompts: list[list[int]]
    texts: list[str]
    warm_up: list[list[int]]
    tokens: int

    @property
    def positions(self) -> int:
        """The most that one sequence needs."""
        return max(map(len, self.prompts)) + self.tokens


@dataclass(frozen=True)
class Job:
    """What one process runs: one workload in each mode, with weights of one format."""

    models: Pair
    format: str
    modes: list[Mode]
    workload: Workload
    threads: int

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what `write` wrote."""
        value = json.loads(path.read_text(encoding="utf-8"))
        modes, workload = [Mode(**each) for each in value["modes"]], Workload(**value["workload"])
        return cls(Pair(**value["models"]), value["format"], modes, workload, value["threads"])

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Measurement:
    """What one run took and made; tokens of all sequences together.

    first_s: seconds until every sequence has its first token, and `first_tokens` are there. decode_s: from then to the
    end. passes: of the target, counted for each sequence. drafted: None = the peer does not tell. outputs: token ids by
    sequence, or `texts` from a peer that gives text; neither from one that runs made-up tokens.
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
        """The speed once every sequence has its first token."""
        return (self.tokens - self.first_tokens) / self.decode_s

    @property
    def accepted(self) -> int:
        """Drafted tokens that are in the output: each pass adds one token that was not drafted."""
        return self.tokens - self.passes

    def seconds(self, tokens: int) -> float:
        """Return the time for so many tokens, prompts included: some peers can't end at an exact number."""
        return self.first_s + (tokens - self.first_tokens) / self.tokens_per_s


class Progress:
    """Watches outputs grow, step by step."""

    def __init__(self, sequences: int) -> None:
        self._lengths = [0] * sequences
        self._passes, self._first_tokens = 0, 0
        self._started = time.perf_counter()
        self._first = self._last = self._started

    def record(self, lengths: Sequence[int]) -> None:
        """Note the number of tokens that each sequence has after a step."""
        self._last = time.perf_counter()
        self._passes += sum(new > old for new, old in zip(lengths, self._lengths, strict=True))
        self._lengths = list(lengths)
        if not self._first_tokens and all(lengths):
            self._first, self._first_tokens = self._last, sum(lengths)

    def end(self, outputs: list[list[int]], drafted: int | None) -> Measurement:
        """Return what was measured."""
        return Measurement(
            self._first - self._started,
            self._last - self._first,
            sum(self._lengths),
            self._first_tokens,
            self._passes,
            drafted,
            outputs,
        )


class Peer(Protocol):
    """One engine.

    formats: its names of the weight formats for each precision. install: the commands that install it.
    """

    name: str
    install: str
    formats: Mapping[str, Sequence[str]]

    def missing(self) -> str | None:
        """Say why it can't run; None = it can."""

    def version(self) -> str:
        """Return its version."""

    def refusal(self, mode: Mode, batch: int) -> str | None:
        """Say why a mode can't run with so many sequences at once; None = it can."""

    def prepare(self, models: Pair, weights: str, folder: Path) -> Pair:
        """Convert the models, unless `folder` has them from before, and return the paths of what the peer reads.

        A conversion's name is made of `content_key`, so that other weights or another converter make a new one.
        """

    def run(self, job: Job) -> dict[str, Measurement]:
        """Run a job in a process of its own; return what was measured, by mode. Raises PeerError."""


class PythonPeer:
    """A peer that is a Python package, in this environment or another. A subclass's module has `measure(job)`."""

    name = ""
    package = ""  # the distribution's name
    install = ""
    formats: Mapping[str, Sequence[str]] = {}

    def __init__(self, python: str = sys.executable) -> None:
        self.python = python

    def missing(self) -> str | None:
        """Say why it can't run; None = it can."""
        try:
            self.version()
        except PeerError as error:
            return str(error)
        return None

    def version(self) -> str:
        """Return the package's version. Raises PeerError."""
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

    def refusal(self, mode: Mode, batch: int) -> str | None:
        """Say why a mode can't run with so many sequences at once; None = it can."""
        return None

    def prepare(self, models: Pair, weights: str, folder: Path) -> Pair:
        """Return the models as they are."""
        return models

    def run(self, job: Job) -> dict[str, Measurement]:
        """Run a job in a process of its own. Raises PeerError."""
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
    """Run a command to its end, with nothing of ours beside it. Raises PeerError if it fails.

    threads: for libraries that ask OMP_NUM_THREADS. paths: for the modules of a Python program.
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
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()
        raise PeerError(f"{' '.join(command[:3])} failed ({done.returncode}): {' / '.join(said[-3:])}")
    return done


def content_key(model: str, converter: Sequence[str]) -> str:
    """Return a name for the conversion of a model: of its weights, configuration and tokenizer, and of the converter.

    converter: what determines the result beside the model, such as the versions of packages.
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
