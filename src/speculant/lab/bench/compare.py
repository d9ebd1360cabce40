"""Compares ways to decode with one target: several drafters or settings, or draft lengths and batch sizes of one pair.

Ways to draft have an engine each, and share the weights. A sweep shows the measured speeds beside predicted ones, which
follow from the acceptance of the draft model's tokens along texts that the target writes, and from the cost of a step
with drafts of each length at each batch size. None of the measured runs are part of the prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from speculant.config import EngineConfig
from speculant.drafting import LOOKUPS, WITH_MODEL, installed, takes_model
from speculant.engine import AUTO, Runtime, build_around, load_target, rounded
from speculant.errors import ConfigError
from speculant.lab.bench.measuring import (
    PLAIN,
    Bench,
    BenchCase,
    Mode,
    Notify,
    Tell,
    Way,
    measure,
    measure_steps,
    ways_of,
)
from speculant.lab.bench.pair import FEWEST_TOKENS, SpeedPrediction, load_draft, predict, write_texts
from speculant.lab.bench.report import SWEPT, document, keeps_answers
from speculant.lab.bench.scripts import shown
from speculant.lab.bench.workloads import Workload, WorkloadConfig, make_workload, require_room
from speculant.params import MAX_SPECULATIVE_TOKENS, SamplingParams

DEFAULT = "default"  # the way whose settings are those of the engine
OF_THE_ENGINE = ("draft_quantization",)  # keys of a setting that the speculative config does not have


@dataclass(frozen=True)
class Setting:
    """A way's name, and its keys of the speculative config or OF_THE_ENGINE; see `configured`."""

    name: str
    values: Mapping[str, Any]


def settings(methods: Sequence[str], lengths: Sequence[int], others: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Return every method at every length, then settings with the values of `others`.

    Without methods, the lengths are those of the usual method. Raises ConfigError for a name that occurs twice.
    """
    fixed = [{"num_speculative_tokens": length} for length in lengths]
    named = [{"method": method} for method in methods]
    crossed = itertools.product(named or ([{}] if lengths else []), fixed or [{}])
    every = [*({**method, **length} for method, length in crossed), *others]
    found = [Setting(_name(values), values) for values in every]
    names = [PLAIN, *(each.name for each in found)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"the way {twice[0]!r} is named twice", "name each once.")
    return found


def _name(values: Mapping[str, Any]) -> str:
    rest = dict(values)
    method, length = rest.pop("method", None), rest.pop("num_speculative_tokens", None)
    known = [] if method is None else [str(method)]
    known += [] if length is None else [f"length {length}"]
    return ", ".join([*known, *(f"{key}={value}" for key, value in rest.items())]) or DEFAULT


def usual_settings(config: EngineConfig) -> list[Setting]:
    """Return the settings that are compared by default.

    These are the engine's own setting, each method that looks drafts up in text and, if a model is named, the usual
    method that drafts with a model alone.
    """
    spec = config.speculative()
    models = [WITH_MODEL] if spec is not None and spec.model is not None else []
    return [Setting(DEFAULT, {}), *(Setting(name, {"method": name}) for name in installed(*models, *LOOKUPS))]


def configured(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """Return the config of a way's engine: the values replace the same keys of the config.

    The config's options belong to its own method, so a way that names another method does not take them; it takes the
    draft model if its method uses one. Raises ConfigError for keys and values that an engine can't have.
    """
    spec, method = config.speculative(), values.get("method")
    assert spec is not None, "speculation is on"
    chosen: dict[str, Any] = {
        "model": spec.model if method is None or takes_model(str(method)) else None,
        "num_speculative_tokens": spec.num_speculative_tokens,
        "verification": spec.verification,
        "draft_length": spec.draft_length,
    }
    chosen |= dict(config.speculative_config or {}) if method is None else {}
    chosen |= {key: value for key, value in values.items() if key not in OF_THE_ENGINE}
    own = {key: value for key, value in values.items() if key in OF_THE_ENGINE}
    model, length = chosen.pop("model"), chosen.pop("num_speculative_tokens")
    return replace(config, draft_model=model, spec_length=length, speculative_config=chosen, **own)


def build_ways(
    config: EngineConfig, chosen: Sequence[Setting], params: SamplingParams, *, sequential: bool
) -> dict[str, Way]:
    """Load the target once, and make an engine for plain decoding and one for each setting.

    Raises ConfigError, ModelError or PairError if an engine can't be built, and ConfigError if speculation is off.
    """
    if config.use_speculative_decoding is False or params.speculation is False:
        raise ConfigError("speculation is switched off and ways to speculate are compared", "leave that switch out.")
    drafting = replace(config, use_speculative_decoding=True, find_drafts=False)
    configs = {each.name: configured(drafting, each.values) for each in chosen}
    off = replace(config, use_speculative_decoding=False, draft_model=None, spec_length=None, speculative_config=None)
    configs = {PLAIN: off, **configs}
    target = load_target(config)
    mode = Mode(params, sequential)
    return {name: Way(Bench(build_around(each, target), name), mode) for name, each in configs.items()}


def compared(
    config: EngineConfig, chosen: Sequence[Setting], ways: Mapping[str, Way], cases: Sequence[BenchCase]
) -> dict[str, Any]:
    """Return all measurements, as `--json` prints them: those of `report.document`, and each way's settings."""
    drafting = {name: way.bench.runtime for name, way in ways.items() if name != PLAIN}
    value = document("compare", config, next(iter(drafting.values())), cases)
    described = {
        each.name: {
            "settings": dict(each.values),
            "speculation": drafting[each.name].speculation,
            "verification": cases[0].runs[each.name][0].verifier,
        }
        for each in chosen
    }
    for case in value["cases"]:
        case.update(fastest=fastest_way(case), conclusions=list(compared_conclusions(case)))
    return {
        **value,
        "speculation": {"on": True, "detail": f"plain decoding beside {', '.join(drafting)}"},
        "ways": described,
        "notes": value["notes"]
        + [
            f"{each.name}: earlier requests are kept, so that after the first run it has seen these outputs"
            for each in chosen
            if keeps_answers(configured(config, each.values))
        ],
    }


def _speed(case: Mapping[str, Any], way: str) -> Mapping[str, float]:
    """Return the speed between tokens over plain decoding; for answers of one token, their whole speed."""
    whole: Mapping[str, float] = case["ratios"][f"{way}/{PLAIN}"]["tokens_per_s"]
    found: Mapping[str, float] = case["gains"][way].get("measured_speed", whole)
    return found


def fastest_way(case: Mapping[str, Any]) -> str:
    """Return the way with the highest median speed; plain decoding if none is faster."""
    best = max(case["gains"], key=lambda way: _speed(case, way)["median"])
    return best if _speed(case, best)["median"] > 1 else PLAIN


def compared_conclusions(case: Mapping[str, Any]) -> Iterator[str]:
    """Yield which way is the fastest, and which ones are close to it."""
    best = fastest_way(case)
    if best == PLAIN:
        yield "no way is faster than plain decoding"
        return
    speed = _speed(case, best)
    yield (f"fastest: {best}, {shown(speed)} times the speed of plain decoding between tokens")
    close = [way for way in case["gains"] if way != best and _speed(case, way)["q3"] >= speed["q1"]]
    if close:
        yield f"its quartiles overlap with those of {', '.join(close)}: the order is not certain"


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
