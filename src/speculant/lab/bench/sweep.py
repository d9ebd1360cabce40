"""Speed by draft length and batch size: the measured curve beside the predicted one.

The prediction follows from the acceptance of the draft model's tokens along texts that the target writes, and from the
cost of a step with drafts of each length at each batch size. None of the measured runs are part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from speculant.config import EngineConfig
from speculant.drafting import WITH_MODEL
from speculant.engine import AUTO, Runtime, build_around, load_target, rounded
from speculant.errors import ConfigError
from speculant.lab.bench.costs import measure_steps
from speculant.lab.bench.measuring import PLAIN, Bench, BenchCase, Mode, Notify, Tell, Way, measure, ways_of
from speculant.lab.bench.pair import FEWEST_TOKENS, SpeedPrediction, load_draft, predict, write_texts
from speculant.lab.bench.report import SWEPT, document
from speculant.lab.bench.workloads import Workload, WorkloadConfig, make_workload, require_room
from speculant.params import MAX_SPECULATIVE_TOKENS, SamplingParams

LENGTHS, BATCHES = (1, 2, 3, 4, 6, 8), (1,)  # defaults
LARGEST_BATCH = 1024
_COST_SECONDS = 4.0  # for measuring steps, at each batch size


@dataclass(frozen=True)
class SweepPlan:
    """The lengths and batch sizes to measure, both ascending. batches: numbers of sequences that run at a time.

    Raises ConfigError for values that can't be measured.
    """

    prompts: WorkloadConfig
    usual_number: int
    lengths: Sequence[int] = LENGTHS
    batches: Sequence[int] = BATCHES
    rounds: int = 3

    def __post_init__(self) -> None:
        _check_ascending("length", self.lengths, MAX_SPECULATIVE_TOKENS)
        _check_ascending("batch", self.batches, LARGEST_BATCH)
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} is not above 0", "use --rounds 3, or 1 for a quick look.")

    @property
    def num_runs(self) -> int:
        """How many runs there are."""
        return self.rounds * len(self.batches) * (1 + len(self.lengths))

    def num_prompts(self, batch: int) -> int:
        """Return how many prompts a run has: a multiple of the batch, so that it is full."""
        wanted = self.prompts.num_prompts or self.usual_number
        return -(-wanted // batch) * batch


def _check_ascending(name: str, values: Sequence[int], most: int) -> None:
    if not values or not all(0 < value <= most for value in values):
        raise ConfigError(f"{name}={list(values)} is not from 1 to {most}", f"give each --{name} in that range.")
    if list(values) != sorted(set(values)):
        raise ConfigError(f"{name}={list(values)} does not ascend", f"give each --{name} once, the smallest first.")


@dataclass(frozen=True)
class Predicted:
    """The prediction at one batch size, with its engine and prompts."""

    batch: int
    runtime: Runtime
    workload: Workload
    prediction: SpeedPrediction


@dataclass(frozen=True)
class Swept:
    """The result at one batch size: the runs, the ways that ran them, and the prediction for these prompts."""

    batch: int
    ways: Mapping[str, Way]
    case: BenchCase
    prediction: SpeedPrediction


def chains_of(config: EngineConfig) -> EngineConfig:
    """Return the config of a sweep's engine: a draft model drafts chains, and each request sets their length.

    The draft model keeps its type unless another is named. Raises ConfigError for another way to draft.
    """
    spec = config.speculative()
    if spec is None or spec.model is None:
        raise ConfigError("no draft model is named: a sweep predicts its speed", "add --draft-model.")
    if spec.num_speculative_tokens is not None:
        raise ConfigError("a sweep sets the draft's length itself", "give lengths as --length, and no --spec-length.")
    named = spec.method is None or spec.method == WITH_MODEL
    if not named or spec.options:
        raise ConfigError(
            "a sweep predicts chains of a draft model, and another way to draft is named",
            "leave it out, or use: speculant bench compare --method NAME --length N",
        )
    quantization = None if config.draft_quantization == AUTO else rounded(config.draft_quantization)
    chosen = {"draft_length": "fixed", "verification": spec.verification}
    return replace(
        config,
        draft_model=spec.model,
        use_speculative_decoding=True,
        speculative_config=chosen,
        draft_quantization=quantization,
    )


def predict_sweep(config: EngineConfig, plan: SweepPlan, params: SamplingParams, notify: Notify) -> list[Predicted]:
    """Load a pair and predict its speeds at each batch size. config: from `chains_of`.

    Raises PairError if the vocabularies differ, and ModelError, ConfigError or RequestError if a part can't be loaded
    or run.
    """
    notify("Loading the models")
    target = load_target(config)
    runtimes = [build_around(replace(config, max_num_seqs=batch), target) for batch in plan.batches]
    most = max(map(plan.num_prompts, plan.batches))
    workload = make_workload(replace(plan.prompts, num_prompts=None), runtimes[0], most).first(most)
    require_room(workload, params.max_tokens or 1, runtimes[0].limits)
    notify("Generating texts with the target")
    texts = write_texts(runtimes[0], workload, replace(params, speculation=False))
    acceptance = load_draft(config, target, runtimes[0]).acceptance(target, texts, params)
    found = list[Predicted]()
    for batch, runtime in zip(plan.batches, runtimes, strict=True):
        notify(f"Measuring the cost of steps, {batch} at a time")
        places = [place % len(acceptance) for place in range(plan.num_prompts(batch))]
        lengths, own = {PLAIN: (0, *plan.lengths)}, {PLAIN: runtime}
        costs = measure_steps(lengths, own, workload.prompts[0], params, _COST_SECONDS, batch)[PLAIN]
        prediction = predict([acceptance[place] for place in places], costs, costs, plan.lengths[-1])
        part = replace(workload, prompts=[workload.prompts[place] for place in places], categories=())
        found.append(Predicted(batch, runtime, part, prediction))
    return found


def measure_sweep(
    predicted: Sequence[Predicted], plan: SweepPlan, params: SamplingParams, notify: Notify, tell: Tell
) -> list[Swept]:
    """Measure plain decoding and every length in turn, at each batch size. notify, tell: see `measure`."""
    found = list[Swept]()
    for each in predicted:
        alone = each.batch == 1
        modes = {
            way_of(length): Mode(
                replace(params, speculation={"num_speculative_tokens": length} if length else False), sequential=alone
            )
            for length in (0, *plan.lengths)
        }
        ways = ways_of(Bench(each.runtime), modes)
        case = measure(ways, each.workload, plan.rounds, notify, tell)
        found.append(Swept(each.batch, ways, case, each.prediction))
    return found


def sweep_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a sweep's requests: at least two tokens, as the first is never drafted."""
    return replace(params, min_tokens=max(params.min_tokens, FEWEST_TOKENS), speculation=None)


def way_of(length: int) -> str:
    """Return the name of a length's runs."""
    return f"length {length}" if length else PLAIN


def swept(config: EngineConfig, plan: SweepPlan, found: Sequence[Swept]) -> dict[str, Any]:
    """Return all measurements, as `--json` prints them: those of `report.document`, and by length both speeds."""
    runtime = found[0].ways[PLAIN].bench.runtime
    value = document("sweep", config, runtime, [each.case for each in found])
    for case, each in zip(value["cases"], found, strict=True):
        rows = [_row(case, each.prediction, length) for length in plan.lengths]
        best = {
            "found": _best([(row["length"], row["measured_speed"]["median"]) for row in rows]),
            "predicted": _best([(row["length"], row["predicted_speed"]) for row in rows]),
        }
        case.update({"batch": each.batch, SWEPT: rows, "best": best, "alpha": asdict(each.prediction.alpha)})
        case["conclusions"] = [_conclusion(best)]
    method, lengths = runtime.speculation.partition(",")[0], ", ".join(map(str, plan.lengths))
    return {**value, "speculation": {"on": True, "detail": f"{method} with drafts of {lengths} tokens"}}


def _row(case: Mapping[str, Any], prediction: SpeedPrediction, length: int) -> dict[str, Any]:
    way = way_of(length)
    return {
        "length": length,
        "measured_speed": case["gains"][way]["measured_speed"],
        "predicted_speed": float(prediction.speeds[length]),
        "tokens_per_pass": case["runs"][way].get("tokens_per_pass"),
        "expected_tokens": float(prediction.tokens[length]),
    }


def _best(speeds: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return the length with the highest speed; 0 if none is faster than plain decoding."""
    length, speed = max([(0, 1.0), *speeds], key=lambda pair: pair[1])
    return {"length": length, "speed": speed}


def _conclusion(best: Mapping[str, Mapping[str, float]]) -> str:
    parts = [f"{name} {each['length']} ({each['speed']:.2f} times plain)" for name, each in best.items()]
    return f"best length: {', '.join(parts)}"
