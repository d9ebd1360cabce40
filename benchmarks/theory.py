"""Recomputes the tables and figures of docs/theory.md: published figures beside ours, and the embedded pair's own.

    python benchmarks/theory.py [--measure] [--prompts 80] [--tokens 128] [--figures]

Tables are written into docs/theory.md where it has them, between `<!-- table: name -->` and `<!-- end -->`. --figures
draws docs/figures/*.svg too, which takes matplotlib. --measure estimates alpha of the embedded pair first, at
temperatures 0, 0.5 and 1, along as many tokens as arXiv 2211.17192 takes in section 4.2, and keeps the result in
results/theory.json; otherwise the last result is taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # so that the script finds its neighbours however it is started

from benchmarks import published as paper
from benchmarks.measuring import write

import speculant
from speculant.config import EngineConfig
from speculant.drafting.lookup.tables import BigramTables
from speculant.lab.bench.acceptance import Text, TextReader, estimate
from speculant.lab.bench.alpha import measure_alpha
from speculant.lab.bench.pair import Candidate, load_pair, write_texts
from speculant.lab.bench.workloads import WorkloadConfig, make_workload
from speculant.lab.theory.acceptance import acceptance, divergence, greedy_acceptance, rejection_sampling_acceptance
from speculant.lab.theory.correlation import correlated_tokens
from speculant.lab.theory.curve import FLAT
from speculant.lab.theory.speedup import expected_tokens, operations, speedups, step_costs, survival
from speculant.lab.training.bigrams import count_bigrams, read_sequences
from speculant.models.base import CausalLM
from speculant.models.weights.load import Checkpoint
from speculant.params import SamplingParams
from speculant.sampling.distribution import sampling_settings

Array = NDArray[np.float64]
Cells = Iterable[Sequence[str]]
Source = Callable[[Text, SamplingParams], Array]

PAGE = Path(__file__).parents[1] / "docs" / "theory.md"
FIGURES = PAGE.parent / "figures"
RESULTS = Path(__file__).parent / "results" / "theory.json"
TEMPERATURES, LENGTH = (0.0, 0.5, 1.0), 5
DRAFTS = ("unigram", "bigram", "draft model")
LENGTHS = (1, 3, 5, 7, 10)  # of figures 2 and 4
COST_RATIOS = (0.01, 0.02, 0.05, 0.1)  # of figure 3
PREDICTED = "Both estimates of alpha agree within their intervals; tokens per pass within 10% of equation 1."


def printed(value: float, digits: int) -> str:
    """Round half up, as the tables were."""
    return f"{math.floor(value * 10**digits + 0.5) / 10**digits:.{digits}f}"


def beside(ours: float, published: float, digits: int) -> list[str]:
    """Return the published figure and ours, in bold if they differ."""
    own, given = printed(ours, digits), f"{published:.{digits}f}"
    return [given, own if own == given else f"**{own}**"]


def markdown(header: Sequence[str], rows: Cells) -> str:
    """Lay out a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def metrics_table() -> str:
    """Tokens per step by acceptance rate and length."""
    header = ["alpha", *itertools.chain(*([f"g = {length}", "ours"] for length in paper.METRICS_LENGTHS))]
    rows = []
    for alpha, figures in paper.METRICS.items():
        pairs = zip(paper.METRICS_LENGTHS, figures, strict=True)
        rows.append([f"{alpha}", *itertools.chain(*(beside(paper.tokens_per_step(alpha, g), k, 2) for g, k in pairs))])
    return markdown(header, rows)


def table_1() -> str:
    """Operations and speed where drafting costs nothing."""
    rows = [
        [
            f"{alpha}",
            str(length),
            *beside(paper.more_operations(alpha, length), more, 2),
            *beside(paper.speed(alpha, length), faster, 2),
        ]
        for alpha, length, more, faster in paper.TABLE_1
    ]
    return markdown(["alpha", "g", "operations", "ours", "speed", "ours"], rows)


def table_4() -> str:
    """Expected and measured speed of T5."""
    rows = []
    for row in paper.TABLE_4:
        low, high = paper.speed_range(row)
        rows.append(
            [
                *(row.task, row.draft, str(row.temperature), str(row.length), f"{row.alpha}", f"{row.cost_ratio}"),
                *beside(paper.speed(row.alpha, row.length, row.cost_ratio), row.expected, 1),
                f"{low:.2f} to {high:.2f}",
                f"{row.measured}",
            ]
        )
    return markdown(["task", "draft", "T", "g", "alpha", "c", "expected", "ours", "range", "measured"], rows)


def lenience_table() -> str:
    """Speeds with lenience."""
    rows = []
    for index, lenience in enumerate(paper.LENIENCES):
        alpha, greedy = paper.TABLE_5["T5-small"][index], paper.LENIENT_GREEDY[index]
        length, faster = paper.best(alpha, paper.LENIENT_COST_RATIO)
        own = paper.speed(greedy, paper.LENIENT_GREEDY_LENGTH, paper.LENIENT_COST_RATIO)
        rows.append(
            [
                f"{lenience}",
                f"{alpha}",
                str(length),
                *beside(faster, paper.LENIENT_SPEEDS[index], 1),
                f"{greedy}",
                *beside(own, paper.LENIENT_GREEDY_SPEEDS[index], 1),
            ]
        )
    return markdown(["l", "alpha, T = 1", "best g", "speed", "ours", "alpha, T = 0", "speed, g = 8", "ours"], rows)


def oracle_table() -> str:
    """How much an oracle for the length gains over the best fixed one."""
    rates = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    rows = [
        [f"{cost}", *(f"{100 * (paper.oracle_gain(alpha, cost) - 1):.0f}%" for alpha in rates)] for cost in COST_RATIOS
    ]
    return markdown(["c", *(f"alpha = {alpha}" for alpha in rates)], rows)


def akunu_table() -> str:
    """Accepted tokens of 4, and speeds."""
    rows = []
    for alpha, *figures in paper.AKUNU:
        pairs = zip(paper.akunu(alpha), figures, (2, 2, 1), strict=True)
        rows.append([f"{alpha}", *itertools.chain(*(beside(*pair) for pair in pairs))])
    return markdown(["alpha", "accepted", "ours", "speed", "ours", "speed, V(5) = 1.3", "ours"], rows)


def correlation_table() -> str:
    """Tokens per step where neighbours' acceptance is correlated."""
    lengths, alpha = (1, 3, 5, 7, 10), 0.8
    rows = [
        [f"{each}", *(f"{correlated_tokens(alpha, each, length)[length]:.2f}" for length in lengths)]
        for each in (0.0, 0.2, 0.4, 0.6)
    ]
    return markdown(["R", *(f"g = {length}" for length in lengths)], rows)


def interval(each: Mapping[str, float]) -> str:
    """Return a mean with its interval."""
    return f"{each['mean']:.3f} ({each['low']:.3f} to {each['high']:.3f})"


def alpha_table(seen: Mapping[str, Any]) -> str:
    """Alpha of the embedded pair in both ways, and tokens per pass."""
    rows = []
    for temperature, each in seen["alpha"].items():
        mean = each["overlap"]["mean"]
        formula = (
            correlated_tokens(mean, 0.0, LENGTH)[LENGTH],
            correlated_tokens(mean, each["correlation"], LENGTH)[LENGTH],
        )
        figures = each["tokens_per_pass"], each["expected_per_pass"], *formula
        rows.append(
            [
                temperature,
                interval(each["overlap"]),
                interval(each["accepted"]),
                f"{each['correlation']:.2f}",
                *(f"{figure:.2f}" for figure in figures),
            ]
        )
    header = ["T", "mean of sum min(p, q)", "accepted / tested", "R", "tokens per pass", "along texts", "equation 1"]
    return markdown([*header, "with R"], rows)


def drafts_table(seen: Mapping[str, Any]) -> str:
    """Alpha of several drafts, as table 3 has it, and of plain rejection sampling."""
    rows = [
        [temperature, draft, interval(each["alpha"]), f"{each['divergence']:.3f}", f"{each['rejection_sampling']:.3f}"]
        for temperature, drafts in seen["drafts"].items()
        for draft, each in drafts.items()
    ]
    return markdown(["T", "draft", "alpha", "mean of D_LK", "alpha of rejection sampling"], rows)


def table_5(seen: Mapping[str, Any]) -> str:
    """Alpha by lenience: T5's as published, and the embedded pair's."""
    header = ["draft", *(f"l = {lenience}" for lenience in paper.LENIENCES)]
    rows = [[f"T5-XXL, {name}", *(f"{rate:.2f}" for rate in rates)] for name, rates in paper.TABLE_5.items()]
    rows += [[f"embedded, {name}", *(f"{rate:.2f}" for rate in rates)] for name, rates in seen["lenience"].items()]
    return markdown(header, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "metrics": metrics_table,
    "1": table_1,
    "4": table_4,
    "lenience": lenience_table,
    "oracle": oracle_table,
    "akunu": akunu_table,
    "correlation": correlation_table,
}
MEASURED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"alpha": alpha_table, "3": drafts_table, "5": table_5}


def render(page: str, seen: Mapping[str, Any]) -> str:
    """Return the page with its tables computed anew."""
    tables = {name: make() for name, make in TABLES.items()} | {name: make(seen) for name, make in MEASURED.items()}

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n{tables.pop(match[2])}\n<!-- end -->"

    text = re.sub(r"(<!-- table: (\S+) -->)\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)
    assert not tables, f"the page has no place for {list(tables)}"
    return text


def measure(prompts: int, tokens: int) -> dict[str, Any]:
    """Estimate everything that the page says of the embedded pair."""
    target, [draft, *_] = load_pair(EngineConfig("demo", "demo", kernels="auto"))
    workload, read = make_workload(WorkloadConfig(num_prompts=prompts), draft.runtime, prompts), sources(target, draft)
    found: dict[str, Any] = {"alpha": {}, "drafts": {}, "lenience": {}}
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        found["alpha"][f"{temperature:g}"] = asdict(measure_alpha(target, draft, workload, params, LENGTH))
        texts = write_texts(draft.runtime, workload, params)
        found["drafts"][f"{temperature:g}"] = {name: compare(read, name, texts, params) for name in DRAFTS}
        if temperature in (0.0, 1.0):
            accepts = acceptance if temperature else greedy_acceptance
            found["lenience"] |= {
                f"{name}, T = {temperature:g}": lenient(read, name, texts, accepts) for name in DRAFTS
            }
    return found


def sources(target: Checkpoint, draft: Candidate) -> dict[str, Source]:
    """Return what gives the distributions [T, V] of the target and of each draft along a text.

    The unigram and bigram tables are those of this package's sources.
    """
    sampler, size = target.backend.sampler, target.model.vocab_size
    files = sorted(Path(speculant.__file__).parent.rglob("*.py"))
    counts = count_bigrams(read_sequences(files, draft.runtime.tokenizer), size)
    tables = BigramTables.of_counts(counts.tokens, counts.pairs, counts.counts, 64)

    def by_model(model: CausalLM) -> Source:
        return lambda text, params: TextReader(model, sampler, size).distributions(text, params).cpu().numpy()

    def by_table(rows: Callable[[list[int]], Tensor]) -> Source:
        def read(text: Text, params: SamplingParams) -> Array:
            previous = [text.prompt[-1], *text.output[:-1]]
            settings = [sampling_settings(params)] * len(previous)
            probs: Array = sampler.distribution(rows(previous), settings, [None] * len(previous)).cpu().numpy()
            return probs

        return read

    return {
        "target": by_model(target.model),
        "unigram": by_table(lambda previous: tables.unigram.log().repeat(len(previous), 1)),
        "bigram": by_table(tables.log_probs),
        "draft model": by_model(draft.checkpoint.model),
    }


def compare(read: Mapping[str, Source], name: str, texts: Sequence[Text], params: SamplingParams) -> dict[str, Any]:
    """Return alpha of a draft, the mean divergence, and alpha of plain rejection sampling."""
    pairs = [(read["target"](text, params), read[name](text, params)) for text in texts]
    return {
        "alpha": asdict(estimate([acceptance(p, q) for p, q in pairs])),
        "divergence": float(np.concatenate([divergence(p, q) for p, q in pairs]).mean()),
        "rejection_sampling": float(np.concatenate([rejection_sampling_acceptance(p, q) for p, q in pairs]).mean()),
    }


def lenient(
    read: Mapping[str, Source], name: str, texts: Sequence[Text], accepts: Callable[[Array, Array, float], Array]
) -> list[float]:
    """Return alpha by lenience; greedy texts too are compared by the distributions at temperature 1."""
    at_1 = SamplingParams(temperature=1.0)
    pairs = [(read["target"](text, at_1), read[name](text, at_1)) for text in texts]
    return [float(np.concatenate([accepts(p, q, lenience) for p, q in pairs]).mean()) for lenience in paper.LENIENCES]


def draw() -> None:
    """Draw figures 2 to 4 of arXiv 2211.17192."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "speculant", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    FIGURES.mkdir(exist_ok=True)
    alphas = np.linspace(0, 0.99, 100)
    by_length = {length: [expected_tokens(survival(alpha, length))[-1] for alpha in alphas] for length in LENGTHS}
    unlimited = {"unlimited": 1 / (1 - alphas)}
    _plot("theory-2", "tokens per step", alphas, {f"g = {g}": each for g, each in by_length.items()} | unlimited, 11.5)
    best = {f"c = {cost}": [paper.best(alpha, cost)[0] for alpha in alphas] for cost in COST_RATIOS}
    _plot("theory-3", "best length", alphas, best, 42)
    costs = {length: step_costs(0.0, FLAT, length) for length in LENGTHS}
    faster = {g: [speedups(survival(alpha, g), costs[g])[-1] for alpha in alphas] for g in LENGTHS}
    more = {g: [operations(survival(alpha, g), 0.0)[-1] for alpha in alphas] for g in LENGTHS}
    _plot("theory-4-speed", "speed", alphas, {f"g = {g}": each for g, each in faster.items()}, 11.5)
    _plot("theory-4-operations", "operations", alphas, {f"g = {g}": each for g, each in more.items()}, 11.5)


def _plot(name: str, label: str, x: Array, lines: Mapping[str, Sequence[float] | Array], top: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for text, y in lines.items():
        axes.plot(x, y, label=text, linewidth=1.4)
    axes.set(xlabel="alpha", ylabel=label, xlim=(0, 1), ylim=(0, top))
    axes.legend()
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    """Measure if asked to, and write the page and its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--figures", action="store_true")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    if arguments.measure:
        write("theory", PREDICTED, measure(arguments.prompts, arguments.tokens))
    if arguments.figures:
        draw()
    seen = json.loads(RESULTS.read_text(encoding="utf-8"))["seen"]
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), seen), encoding="utf-8")


if __name__ == "__main__":
    main()
