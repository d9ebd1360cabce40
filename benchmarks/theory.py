"""Recomputes benchmarks/results/theory.md: published figures beside ours, and the embedded pair's own.

Tables are written into this page, between `<!-- table: name -->` and `<!-- end -->`. --figures also draws
docs/figures/*.svg, with matplotlib. --measure first estimates alpha of the embedded pair, at temperatures 0, 0.5 and 1,
along as many tokens as in section 4.2 of arXiv 2211.17192; without it, the figures are those of the last measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import speculant
from speculant.config import EngineConfig
from speculant.drafting import BigramTables
from speculant.lab.bench import (
    Benchmark,
    Candidate,
    Text,
    TextReader,
    WorkloadConfig,
    estimate,
    load_pair,
    make_workload,
    markdown,
    measure_alpha,
    write_texts,
)
from speculant.lab.theory import (
    FLAT,
    VerificationCurve,
    acceptance,
    best_length,
    correlated_tokens,
    divergence,
    expected_tokens,
    greedy_acceptance,
    operations,
    oracle_speedup,
    rejection_sampling_acceptance,
    speedups,
    step_costs,
    survival,
)
from speculant.lab.training import count_bigrams
from speculant.models import CausalLM, Checkpoint
from speculant.params import SamplingParams
from speculant.sampling import sampling_settings
from speculant.text import read_sequences

Array = NDArray[np.float64]
Source = Callable[[Text, SamplingParams], Array]

# Tokens per step by acceptance rate and draft length (docs/references.md, metrics).
METRICS_LENGTHS = (3, 5, 7, 10)
METRICS = {
    0.5: (1.88, 1.97, 1.99, 2.00),
    0.7: (2.53, 2.94, 3.14, 3.27),
    0.8: (2.95, 3.69, 4.16, 4.57),
    0.9: (3.44, 4.69, 5.70, 6.86),
    0.95: (3.71, 5.30, 6.73, 8.62),
}
# Of the same article: accepted / drafted for a rate of 0.8, and a larger draft that loses against a smaller one.
UTILISATION = (0.8, 5, 0.54)
LARGE_DRAFT, SMALL_DRAFT = (0.9, 0.5), (0.75, 0.02)  # acceptance rate and cost ratio

# arXiv 2211.17192, table 1: alpha, length, operations, speed.
TABLE_1 = (
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)
BIGRAM = (0.2, 3, 1.25)  # section 3.6: alpha, length, speed


@dataclass(frozen=True)
class Experiment:
    """A row of table 4 of arXiv 2211.17192."""

    task: str
    draft: str
    temperature: int
    length: int
    alpha: float
    cost_ratio: float
    expected: float
    measured: float


# Its table 4.
TABLE_4 = (
    Experiment("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    Experiment("EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    Experiment("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    Experiment("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    Experiment("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    Experiment("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    Experiment("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    Experiment("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    Experiment("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    Experiment("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    Experiment("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    Experiment("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)
ROUNDING = 0.005  # of an alpha and of a cost ratio with two decimals

# Its appendix A.5: alpha by lenience (table 5), and the speeds given in its text.
LENIENCES = (1.0, 0.5, 0.3, 0.1)
TABLE_5 = {
    "unigram": (0.07, 0.10, 0.11, 0.16),
    "bigram": (0.19, 0.23, 0.25, 0.32),
    "T5-small": (0.62, 0.71, 0.76, 0.84),
    "T5-base": (0.68, 0.80, 0.83, 0.90),
}
LENIENT_COST_RATIO = 0.015
LENIENT_SPEEDS = (2.5, 3.1, 3.6, 5.0)  # of T5-small; no length is given
LENIENT_GREEDY = (0.75, 0.75, 0.80, 0.87)
LENIENT_GREEDY_LENGTH, LENIENT_GREEDY_SPEEDS = 8, (3.3, 3.3, 3.9, 4.9)

# The engine akunu (docs/references.md, n-gram tables): alpha, accepted of 4 drafted, speed,
# and speed where the pass costs 1.3.
AKUNU = ((0.5, 0.94, 1.94, 1.5), (0.7, 2.05, 3.05, 2.3), (0.9, 3.28, 4.28, 3.3))
AKUNU_LENGTH, AKUNU_COST = 4, 1.3

LONGEST = 200  # as long as any draft that is considered


RESULTS = Path(__file__).parent / "results" / "theory.json"
PAGE = RESULTS.with_suffix(".md")
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
TEMPERATURES, LENGTH = (0.0, 0.5, 1.0), 5
DRAFTS = ("unigram", "bigram", "draft model")
LENGTHS = (1, 3, 5, 7, 10)  # of figures 2 and 4
COST_RATIOS = (0.01, 0.02, 0.05, 0.1)  # of figure 3


def tokens_per_step(alpha: float, length: int) -> float:
    """Return equation 1 of arXiv 2211.17192."""
    return float(expected_tokens(survival(alpha, length))[length])


def speed(alpha: float, length: int, cost_ratio: float = 0.0) -> float:
    """Return theorem 3.8."""
    return float(speedups(survival(alpha, length), step_costs(cost_ratio, FLAT, length))[length])


def more_operations(alpha: float, length: int, ratio: float = 0.0) -> float:
    """Return theorem 3.11."""
    return float(operations(survival(alpha, length), ratio)[length])


def best(alpha: float, cost_ratio: float) -> tuple[int, float]:
    """Return the best length and its speed (section 3.5)."""
    speeds = speedups(survival(alpha, LONGEST), step_costs(cost_ratio, FLAT, LONGEST))
    length = best_length(speeds)
    return length, float(speeds[length])


def oracle_gain(alpha: float, cost_ratio: float) -> float:
    """Return how much faster an oracle for the length is than the best fixed length (section 3.5)."""
    return oracle_speedup(survival(alpha, 4 * LONGEST), cost_ratio, FLAT) / best(alpha, cost_ratio)[1]


def speed_range(row: Experiment) -> tuple[float, float]:
    """Return the lowest and highest expected speed of inputs that are rounded to those of a row of table 4."""
    speeds = [
        speed(row.alpha + a * ROUNDING, row.length, row.cost_ratio + c * ROUNDING)
        for a, c in itertools.product((-1, 1), repeat=2)
    ]
    return min(speeds), max(speeds)


def akunu(alpha: float) -> tuple[float, float, float]:
    """Return expected accepted tokens of 4, tokens per step, and speed where a pass over 5 rows costs 1.3."""
    tokens = tokens_per_step(alpha, AKUNU_LENGTH)
    curve = VerificationCurve((1, AKUNU_LENGTH + 1), (1.0, AKUNU_COST))
    reached = survival(alpha, AKUNU_LENGTH)
    return tokens - 1, tokens, float(speedups(reached, step_costs(0.0, curve, AKUNU_LENGTH))[AKUNU_LENGTH])


def printed(value: float, digits: int) -> str:
    """Round half up, as the tables were."""
    return f"{math.floor(value * 10**digits + 0.5) / 10**digits:.{digits}f}"


def beside(ours: float, published: float, digits: int) -> list[str]:
    """Return the published figure and ours, in bold if they differ."""
    own, given = printed(ours, digits), f"{published:.{digits}f}"
    return [given, own if own == given else f"**{own}**"]


def metrics_table() -> str:
    """Tokens per step by acceptance rate and length."""
    header = ["alpha", *itertools.chain(*([f"g = {length}", "ours"] for length in METRICS_LENGTHS))]
    rows = []
    for alpha, figures in METRICS.items():
        pairs = zip(METRICS_LENGTHS, figures, strict=True)
        rows.append([f"{alpha}", *itertools.chain(*(beside(tokens_per_step(alpha, g), k, 2) for g, k in pairs))])
    return markdown(header, rows)


def table_1() -> str:
    """Operations and speed where drafting costs nothing."""
    rows = [
        [
            f"{alpha}",
            str(length),
            *beside(more_operations(alpha, length), more, 2),
            *beside(speed(alpha, length), faster, 2),
        ]
        for alpha, length, more, faster in TABLE_1
    ]
    return markdown(["alpha", "g", "operations", "ours", "speed", "ours"], rows)


def table_4() -> str:
    """Expected and measured speed of T5."""
    rows = []
    for row in TABLE_4:
        low, high = speed_range(row)
        rows.append(
            [
                *(row.task, row.draft, str(row.temperature), str(row.length), f"{row.alpha}", f"{row.cost_ratio}"),
                *beside(speed(row.alpha, row.length, row.cost_ratio), row.expected, 1),
                f"{low:.2f} to {high:.2f}",
                f"{row.measured}",
            ]
        )
    return markdown(["task", "draft", "T", "g", "alpha", "c", "expected", "ours", "range", "measured"], rows)


def lenience_table() -> str:
    """Speeds with lenience."""
    rows = []
    for index, lenience in enumerate(LENIENCES):
        alpha, greedy = TABLE_5["T5-small"][index], LENIENT_GREEDY[index]
        length, faster = best(alpha, LENIENT_COST_RATIO)
        own = speed(greedy, LENIENT_GREEDY_LENGTH, LENIENT_COST_RATIO)
        rows.append(
            [
                f"{lenience}",
                f"{alpha}",
                str(length),
                *beside(faster, LENIENT_SPEEDS[index], 1),
                f"{greedy}",
                *beside(own, LENIENT_GREEDY_SPEEDS[index], 1),
            ]
        )
    return markdown(["l", "alpha, T = 1", "best g", "speed", "ours", "alpha, T = 0", "speed, g = 8", "ours"], rows)


def oracle_table() -> str:
    """How much an oracle for the length gains over the best fixed one."""
    rates = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    rows = [[f"{cost}", *(f"{100 * (oracle_gain(alpha, cost) - 1):.0f}%" for alpha in rates)] for cost in COST_RATIOS]
    return markdown(["c", *(f"alpha = {alpha}" for alpha in rates)], rows)


def akunu_table() -> str:
    """Accepted tokens of 4, and speeds."""
    rows = []
    for alpha, *figures in AKUNU:
        pairs = zip(akunu(alpha), figures, (2, 2, 1), strict=True)
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
    header = ["draft", *(f"l = {lenience}" for lenience in LENIENCES)]
    rows = [[f"T5-XXL, {name}", *(f"{rate:.2f}" for rate in rates)] for name, rates in TABLE_5.items()]
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


def estimate_all(prompts: int, tokens: int) -> dict[str, Any]:
    """Estimate the page's figures of the embedded pair."""
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
    """Return functions that give the distributions [T, V] of the target and of each draft along a text.

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
    return [float(np.concatenate([accepts(p, q, lenience) for p, q in pairs]).mean()) for lenience in LENIENCES]


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
    lengths = {f"c = {cost}": [best(alpha, cost)[0] for alpha in alphas] for cost in COST_RATIOS}
    _plot("theory-3", "best length", alphas, lengths, 42)
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


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Estimate if asked to, and write the page and its figures."""
    if arguments.measure:
        yield (seen := estimate_all(arguments.prompts, arguments.tokens))
    else:
        seen = json.loads(RESULTS.read_text(encoding="utf-8"))["seen"]
    if arguments.quick:
        return
    if arguments.figures:
        draw()
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), seen), encoding="utf-8")


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Both estimates of alpha agree within their intervals; tokens per pass within 10% of equation 1.",
    measure=measure, options={"measure": False, "figures": False, "prompts": 80, "tokens": 128},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
