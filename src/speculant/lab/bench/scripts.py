"""What scripts of benchmarks/ share: a command line, rounds and a file of results; the embedded pair, and prompts."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from speculant.config import EngineConfig
from speculant.engine import Runtime, build_around
from speculant.lab.bench.history import origin
from speculant.lab.bench.measuring import BenchRun, Notify, Spread, Way, interleave
from speculant.lab.bench.workloads import Workload, code_prompt
from speculant.lab.inflation import PAIRS, inflated_pair
from speculant.lab.training import read_corpus, standard_library
from speculant.models import Checkpoint, load_model, resolve_source
from speculant.text import Tokenizer

EDIT, COMPLETION, UNSEEN, HELD_OUT = "edit", "completion", "unseen", "held-out"
TEXTS = (EDIT, COMPLETION, UNSEEN, HELD_OUT)
DRAFT, TARGET = "the draft", "the target"  # stand for the models' folders in configurations
WITHOUT_DRAFTS: dict[str, Any] = {"use_speculative_decoding": False}
SHAPE = {"choices": ["demo", *PAIRS], "default": "demo"}  # the option --shape


class LoadedPair(NamedTuple):
    """A loaded target, which all engines share, and the folders of both models."""

    target: Checkpoint
    folders: dict[str, str]

    @classmethod
    def load(cls, shape: str = "demo") -> LoadedPair:
        """Load the embedded target, or the same target inflated to a larger shape."""
        embedded = resolve_source("demo", "target"), resolve_source("demo", "draft")
        return cls.of(*(embedded if shape == "demo" else inflated_pair(shape)))

    @classmethod
    def of(cls, target: Path, draft: Path, quantization: str | None = None) -> LoadedPair:
        """Load the target of a pair in bfloat16."""
        loaded = load_model(str(target), "bfloat16", kernels="auto", quantization=quantization)
        return cls(loaded, {TARGET: str(target), DRAFT: str(draft)})

    def engine(self, batch: int = 1, config: dict[str, Any] | None = None, **arguments: Any) -> Runtime:
        """Make an engine. config: of speculation, in which DRAFT and TARGET are models; None = by the arguments."""
        if config is not None:
            arguments["speculative_config"] = {key: self.folders.get(str(own), own) for key, own in config.items()}
        settings = {"dtype": "bfloat16", "max_num_seqs": batch, "max_model_len": 1024, **arguments}
        return build_around(EngineConfig.from_arguments(model=self.folders[TARGET], **settings), self.target)


def run_rounds(
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    warm_up: int = 0,
    notify: Notify = lambda name: None,
) -> dict[str, list[BenchRun]]:
    """Run all ways in turn, round by round, each round on an equal share of the prompts; the first ones warm up."""
    size = len(prompts) // (warm_up + rounds)
    workloads = [Workload("round", prompts[first : first + size]) for first in range(0, len(prompts), size)]

    def subject(way: Way) -> Callable[[], BenchRun]:
        own = iter(workloads)
        return lambda: way.bench.run(next(own), way.mode)

    subjects = {name: subject(way) for name, way in ways.items()}
    return {name: runs[warm_up:] for name, runs in interleave(subjects, warm_up + rounds, notify).items()}


def tokens_per_pass(runs: Sequence[BenchRun]) -> float:
    """Return the tokens of all outputs over the passes that sampled them."""
    timings = [timing for run in runs for timing in run.timings]
    return sum(each.num_tokens for each in timings) / sum(each.sampled_passes for each in timings)


def prompts_of(text: str, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return the first prompts of a kind of text.

    EDIT: code, then its first half again. COMPLETION: openings of code. UNSEEN: pseudo-random tokens. HELD_OUT: pieces
    of the files of Python's standard library on which no model or head was trained.
    """
    if text == COMPLETION:
        return [code_prompt(tokenizer, index) for index in range(count)]
    if text == UNSEEN:
        return [[(7919 * (index + 1) * (place + 3)) % 900 + 20 for place in range(64)] for index in range(count)]
    if text == HELD_OUT:
        return _held_out(tokenizer, count)
    pause = tokenizer.encode("\n\n\n", add_special_tokens=False)
    codes = [code_prompt(tokenizer, index, 160) for index in range(count)]
    return [[*code, *pause, *code[: len(code) // 2]] for code in codes]


def _held_out(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return the first 64 tokens of pieces of held-out files; each piece begins at a line drawn by its number."""
    documents, found = read_corpus([standard_library()]).held_out, list[list[int]]()
    for index in range(count):
        lines = documents[index % len(documents)].text.splitlines(keepends=True)
        first = random.Random(f"held-out-{index}").randrange(max(1, len(lines) - 20))
        found.append(tokenizer.encode("".join(lines[first : first + 60]))[:64])
    return found


Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A script of benchmarks/, whose results are kept in results/ beside it.

    script: its `__file__`. about: its docstring. predicted: written before the first run. measure: yields the figures
    so far, each time it has more; each time they are written, so that a later failure loses none. The file has the
    script's name, or the name that `measure` puts into `arguments.name`. rounds: default of --rounds; None = no such
    flag. options: other flags, with a default value or with keyword arguments of `add_argument`; a type makes a
    positional argument. show: returns the figures of a file as text; None = as JSON.
    """

    script: str
    about: str | None
    predicted: str
    measure: Callable[[argparse.Namespace], Iterator[Figures]]
    rounds: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    show: Callable[[Figures], str] | None = None

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Read a command line; None = that of this process."""
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(Path(self.script).name, description=self.about, formatter_class=form)
        if self.rounds is not None:
            parser.add_argument("--rounds", type=int, default=self.rounds)
        for name, option in self.options.items():
            flag = name if isinstance(option, type) else f"--{name.replace('_', '-')}"
            parser.add_argument(flag, **_settings(option))
        parser.add_argument("--json", type=Path, help="the file of the results, instead of one in results/")
        parser.add_argument("--quick", action="store_true", help="one round; nothing is written")
        found = parser.parse_args(words)
        if found.quick and self.rounds is not None:
            found.rounds = 1
        return argparse.Namespace(name=Path(self.script).stem, **vars(found))

    def main(self) -> None:
        """Measure; write and print the figures."""
        arguments, seen = self.parse(), dict[str, Figures]()
        for figures in self.measure(arguments):
            seen[arguments.name] = figures
            self._write(arguments, figures)
        for figures in seen.values():
            print(self.show(figures) if self.show else json.dumps(self._report(figures), indent=2))

    def _write(self, arguments: argparse.Namespace, figures: Figures) -> None:
        if not arguments.quick:
            path = arguments.json or Path(self.script).parent / "results" / f"{arguments.name}.json"
            path.write_text(json.dumps(self._report(figures), indent=2) + "\n", encoding="utf-8")

    def _report(self, figures: Figures) -> dict[str, Any]:
        return {
            **origin(["python", f"benchmarks/{Path(self.script).name}"]),
            "predicted": self.predicted,
            "seen": figures,
        }


def _settings(option: Any) -> Mapping[str, Any]:
    """Return the keyword arguments of `add_argument` for an option."""
    if isinstance(option, Mapping):
        return option
    if isinstance(option, type):
        return {"type": option}
    if isinstance(option, bool):
        return {"action": "store_true"}
    if isinstance(option, list):
        return {"nargs": "+", "type": type(option[0]), "default": option}
    return {"type": type(option), "default": option}


def timed(subjects: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every subject in every round, as `interleave` runs them."""
    return interleave({name: partial(_seconds, subject) for name, subject in subjects.items()}, rounds)


def _seconds(subject: Callable[[], Any]) -> float:
    started = time.perf_counter()
    subject()
    return time.perf_counter() - started


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quartiles of at least one value, for JSON."""
    return asdict(Spread.of(values))


def shown(spread: Mapping[str, float]) -> str:
    """Return a median with its quartiles, for a table."""
    return f"{spread['median']:.2f} ({spread['q1']:.2f}-{spread['q3']:.2f})"


def ratio(times: Mapping[str, Sequence[float]], above: str, below: str) -> dict[str, float]:
    """Return the quartiles of one subject's figures over another's, round by round."""
    return quartiles([a / b for a, b in zip(times[above], times[below], strict=True)])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
