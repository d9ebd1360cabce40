"""Every head beside the draft model, suffix lookup and the default, on the embedded target or on its inflation to 1B.

--heads-folder has a trained head in each of its subfolders blockwise, medusa, eagle, eagle3 and pass; where it has
none, the embedded head is used, and a method without a head is named and skipped. With --shape, target, draft model and
heads are inflated: texts and acceptance stay, costs are those of the shape.

All ways to draft run in one interleaved run: a method's ways and plain decoding in turn, one method after the other,
round by round, on prompts of the round's own; the first round warms up. Texts are those of never_slower.py, by default
"held-out", on which neither models nor heads were trained. `speed` is plain decoding's time after the first token over
the way's, in the same round.

Ways: chains of a fixed length, a tree of a fixed number of nodes, and the adaptive length. `acceptance_by_position` is
accepted over tested in the longest chain. `costs` are measured before the run: c, a drafted token's time over a plain
step's; overhead, that of drafting at all; V, the rest of a step over a plain step's, by drafted tokens. From these and
the acceptance by position follows `predicted` for chains (speculant.lab.theory.speedup). For a tree it is the tokens of
a step over its cost. For adaptive lengths and for lookups, which do not always draft, it is `lab.bench.gains`, by the
costs of the run itself. Results are written after each method of each round.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from speculant.engine import Runtime
from speculant.errors import SpeculantError
from speculant.files import read_json
from speculant.lab.bench import (
    DRAFT,
    HELD_OUT,
    SHAPE,
    TEXTS,
    WITHOUT_DRAFTS,
    Bench,
    Benchmark,
    BenchRun,
    LengthCosts,
    LoadedPair,
    Mode,
    Spread,
    Workload,
    gains,
    markdown,
    measure_steps,
    prompts_of,
    quartiles,
    shown,
)
from speculant.lab.inflation import inflated_head
from speculant.lab.theory import VerificationCurve, speedups, step_costs, survival
from speculant.metrics import SpeculationMetrics
from speculant.models import embedded_heads, resolve_source
from speculant.params import SamplingParams

UNDRAFTED, ADAPTIVE, TREE = "plain", "adaptive", "tree"
LENGTHS = (2, 4)
COST_SECONDS = 2.0
HEAD, DEFAULT = "a head", "default"
STARTED = time.perf_counter()
ARTEFACT = (
    "At a larger shape the layers beyond the small target's are zero, so the first quarter of the layers is a larger "
    "part of the function than in a model of this size: its figures there hold for no real model."
)


class Method(NamedTuple):
    """A way to draft. model: DRAFT, HEAD or None. chain: options of chains. tree: options of a tree, and its nodes."""

    model: str | None = None
    lengths: Sequence[int] = LENGTHS
    chain: Mapping[str, Any] = {}
    tree: tuple[Mapping[str, Any], int] | None = None
    always: bool = True  # it drafts in every step, as many tokens as it may
    note: str = ""


METHODS = {
    "draft_model": Method(DRAFT),
    "suffix": Method(lengths=(4,), always=False),
    "early_exit": Method(note=ARTEFACT),
    "blockwise": Method(HEAD, lengths=(2, 3)),
    "medusa": Method(HEAD, chain={"tree": "chain"}, tree=({}, 8)),
    "eagle": Method(HEAD, tree=({"tree": [2, 1, 1]}, 6)),
    "eagle3": Method(HEAD, tree=({"tree": [2, 1, 1]}, 6)),
    "pass": Method(HEAD, lengths=(2, 3)),
    DEFAULT: Method(DRAFT, lengths=(), always=False),
}


class Setting(NamedTuple):
    """The parts that all methods share. prompt: for measuring costs."""

    pair: LoadedPair
    plain: Runtime
    params: SamplingParams
    prompt: Sequence[int]


class Source(NamedTuple):
    """The folders of a method's weights: the loaded one and the trained one; None = it has none."""

    loaded: Path | None = None
    trained: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights' files."""
        return sum(file.stat().st_size for file in self.loaded.glob("*.safetensors")) if self.loaded else 0

    @property
    def minutes(self) -> float | None:
        """Minutes of training: config.json's, else the first that the card names."""
        if self.trained is None:
            return 0.0
        training = read_json(self.trained / "config.json").get("training")
        if isinstance(training, dict) and "minutes" in training:
            return float(training["minutes"])
        card = self.trained / "README.md"
        hit = re.search(r"([\d.]+) minutes", card.read_text(encoding="utf-8")) if card.exists() else None
        return float(hit[1]) if hit else None


@dataclass
class Group:
    """A method's ways, as engines by label, plain decoding first; its runs, by text and label."""

    name: str
    source: Source
    benches: Mapping[str, Bench]
    costs: Mapping[str, LengthCosts] = field(default_factory=dict)  # by label: of the longest chain, and of a tree
    runs: dict[str, dict[str, list[BenchRun]]] = field(default_factory=dict)

    @cached_property
    def method(self) -> Method:
        """The method's facts."""
        return METHODS[self.name]

    @property
    def longest(self) -> str:
        """The label of the longest chain; "" = none is of a fixed length."""
        return str(max(self.method.lengths)) if self.method.lengths else ""

    def run(self, text: str, prompt: Sequence[int], params: SamplingParams, number: int) -> None:
        """Run all ways on a prompt; every other round runs backwards, and round 0 is forgotten."""
        workload, kept = Workload(text, [prompt]), self.runs.setdefault(text, {})
        for label in list(self.benches)[:: -1 if number % 2 else 1]:
            run = self.benches[label].run(workload, Mode(params, sequential=True))
            if number:
                kept.setdefault(label, []).append(run)

    def figures(self, text: str) -> dict[str, Any]:
        """Return the figures of one kind of text."""
        runs = self.runs[text]
        longest = SpeculationMetrics.total(run.speculation for run in runs.get(self.longest, ()))
        rates = longest.acceptance_by_position
        return {
            "training_minutes": self.source.minutes,
            "bytes": self.source.num_bytes,
            "acceptance_by_position": rates,
            "costs": {label: _costs(costs) for label, costs in self.costs.items()},
            **({"note": self.method.note} if self.method.note else {}),
            "ways": {label: self._way(label, runs, rates) for label in self.benches if label != UNDRAFTED},
        }

    def _way(self, label: str, runs: Mapping[str, Sequence[BenchRun]], rates: Sequence[float]) -> dict[str, Any]:
        plain, own = runs[UNDRAFTED], runs[label]
        pooled = SpeculationMetrics.total(run.speculation for run in own)
        return {
            "drafts_by": self.benches[label].runtime.speculation,
            "tokens_per_pass": sum(_decoded(run) for run in own) / sum(run.steps - 1 for run in own),
            "acceptance_rate": pooled.acceptance_rate if pooled.num_tested_tokens else None,
            "predicted": self._predicted(label, plain, own, rates),
            "speed": quartiles([_decode_s(a) / _decode_s(b) for a, b in zip(plain, own, strict=True)]),
            "identical": sum(a.outputs == b.outputs for a, b in zip(plain, own, strict=True)),
            "of": len(own),
        }

    def _predicted(
        self, label: str, plain: Sequence[BenchRun], own: Sequence[BenchRun], rates: Sequence[float]
    ) -> float | None:
        if label == TREE and label in self.costs:
            costs = self.costs[label]
            steps = [count for run in own for count in run.speculation.per_step_accepted]
            return (1 + sum(steps) / len(steps)) * costs.plain_s / (costs.draft_s[-1] + costs.other_s[-1])
        if label.isdigit() and self.longest in self.costs and rates:
            return predict(rates, self.costs[self.longest], int(label))
        found = [each["predicted_speed"] for each in gains(plain, own)]
        return Spread.of(found).median if found else None


def predict(rates: Sequence[float], costs: LengthCosts, length: int) -> float:
    """Return the speed over plain decoding of chains of a length, by acceptance by position and costs."""
    rows = tuple(drafted + 1 for drafted in costs.lengths)
    times = step_costs(costs.cost_ratio, VerificationCurve(rows, tuple(costs.other_s)), costs.lengths[-1])
    return float(speedups(survival(rates, costs.lengths[-1]), costs.overhead + times)[length])


def _costs(costs: LengthCosts) -> dict[str, Any]:
    rest = {str(length): other / costs.other_s[0] for length, other in zip(costs.lengths, costs.other_s, strict=True)}
    return {"c": costs.cost_ratio, "overhead": costs.overhead, "V": rest, "plain_s": costs.plain_s}


def _decode_s(run: BenchRun) -> float:
    return sum(timing.decode_s for timing in run.timings)


def _decoded(run: BenchRun) -> int:
    return sum(len(output) - 1 for output in run.outputs)


def source_of(name: str, arguments: argparse.Namespace, pair: LoadedPair) -> Source | None:
    """Return a method's weights; None = there is no head for it."""
    model = METHODS[name].model
    if model is None:
        return Source()
    if model == DRAFT:
        return Source(Path(pair.folders[DRAFT]), resolve_source("demo", "draft"))
    own = arguments.heads_folder / name if arguments.heads_folder else None
    if own is None or not (own / "config.json").exists():
        if name not in embedded_heads():
            return None
        own = resolve_source("demo", f"heads/{name}")
    return Source(own if arguments.shape == "demo" else inflated_head(own, arguments.shape), own)


def ways_of(name: str, source: Source) -> dict[str, dict[str, Any]]:
    """Return the configurations of a method's ways by label."""
    method, base = METHODS[name], {"method": name}
    if source.loaded is not None:
        base["model"] = str(source.loaded)
    if name == DEFAULT:
        return {DEFAULT: {"model": base["model"]}}
    found: dict[str, dict[str, Any]] = {}
    for length in method.lengths:
        found[str(length)] = {**base, **method.chain, "num_speculative_tokens": length, "draft_length": "fixed"}
    if method.tree is not None:
        options, nodes = method.tree
        found[TREE] = {**base, **options, "num_speculative_tokens": nodes, "draft_length": "fixed"}
    return {**found, ADAPTIVE: base}


def load_group(name: str, source: Source, run: Setting) -> Group:
    """Make a method's engines, and measure the costs of their steps. Raises SpeculantError if one can't be loaded."""
    runtimes = {
        UNDRAFTED: run.plain,
        **{label: run.pair.engine(1, own) for label, own in ways_of(name, source).items()},
    }
    benches = {label: Bench(runtime, f"{name}-{label}") for label, runtime in runtimes.items()}
    group, method = Group(name, source, benches), METHODS[name]
    asked = {group.longest: (0, *method.lengths)} if method.lengths else {}
    if method.tree is not None:
        asked[TREE] = (0, method.tree[1])
    if method.always:
        group.costs = measure_steps(asked, runtimes, run.prompt, run.params, COST_SECONDS)
    return group


def load_groups(arguments: argparse.Namespace, run: Setting, skipped: dict[str, str]) -> Iterator[Group]:
    """Load all methods; `skipped` gets the reasons of those that can't be measured."""
    for name in arguments.methods:
        try:
            source = source_of(name, arguments, run.pair)
            if source is None:
                skipped[name] = "there is no head for it"
            else:
                yield load_group(name, source, run)
        except SpeculantError as error:
            skipped[name] = str(error)
        say(f"{name}: {skipped.get(name, 'loaded')}")


def say(text: str) -> None:
    """Print progress."""
    print(f"{time.perf_counter() - STARTED:6.0f} s  {text}", file=sys.stderr, flush=True)


def tables(seen: Mapping[str, Any]) -> str:
    """Return the figures of each kind of text as a table, and the skipped methods."""
    skipped = [f"{name} was skipped: {reason}" for name, reason in seen["skipped"].items()]
    return "\n".join([f"\n{text}\n{table(figures)}" for text, figures in seen["texts"].items()] + skipped)


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures of one kind of text as a table."""
    header = ("method", "min", "MiB", "by position", "c", "way", "tokens/pass", "predicted", "speed (quartiles)")
    rows: list[tuple[str, ...]] = []
    for name, each in figures.items():
        minutes, costs = each["training_minutes"], next(iter(each["costs"].values()), None)
        about = (
            name,
            "?" if minutes is None else f"{minutes:.0f}",
            f"{each['bytes'] / 2**20:.1f}",
            " ".join(f"{rate:.2f}" for rate in each["acceptance_by_position"]),
            f"{costs['c']:.3f}" if costs else "",
        )
        for label, way in each["ways"].items():
            speed, predicted = way["speed"], way["predicted"]
            expected = "" if predicted is None else f"{predicted:.2f}"
            rows.append((*about, label, f"{way['tokens_per_pass']:.2f}", expected, shown(speed)))
            about = ("",) * len(about)
    return markdown(header, rows)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all methods in turn."""
    arguments.name = f"heads_{arguments.shape}"
    pair, rounds, size = LoadedPair.load(arguments.shape), arguments.rounds, arguments.prompts
    rounds = rounds or (32 if arguments.shape == "demo" else 3)
    plain = pair.engine(**WITHOUT_DRAFTS)
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    texts = {text: prompts_of(text, plain.tokenizer, (1 + rounds) * size) for text in arguments.texts}
    seen: dict[str, Any] = {"rounds": 0, "skipped": {}, "texts": {text: {} for text in texts}}
    setting = Setting(pair, plain, params, texts[arguments.texts[0]][0])
    groups = list(load_groups(arguments, setting, seen["skipped"]))
    for number in range(1 + rounds):
        for text, own in texts.items():
            for group in groups:
                for prompt in own[number * size : (number + 1) * size]:
                    group.run(text, prompt, params, number)
                if number:
                    seen["texts"][text][group.name] = group.figures(text)
                    yield seen
        say(f"round {number} of {rounds}")
        seen["rounds"] = number
    yield seen


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="At 1B: the draft model 2 to 2.5 with 4 tokens; eagle and eagle3 1.4 to 1.7, best with 2 or a tree; "
    "blockwise and medusa 1.1 to 1.3; pass 1.0 to 1.2; early_exit above 1 where half of the small layers are a "
    "quarter of the cost; suffix 1.0 to 1.2. At the embedded size a head's output head is a third of the target's "
    "cost: eagle 0.9 to 1.1, the others about 1. The adaptive length is at least 0.97 of plain decoding everywhere. "
    "Predictions within 10%.",
    measure=measure, rounds=0, show=tables,
    options={
        "shape": SHAPE,
        "texts": {"nargs": "+", "choices": TEXTS, "default": [HELD_OUT]},
        "methods": {"nargs": "+", "choices": list(METHODS), "default": list(METHODS)},
        "heads_folder": {"type": Path, "metavar": "FOLDER"},
        "prompts": {"type": int, "default": 1, "help": "of each kind of text, in a round"},
        "tokens": 64,
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
