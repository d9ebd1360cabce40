"""Compares several ways to decode with one target: each has an engine of its own, and all share the weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculant.config import EngineConfig
from speculant.drafting import LOOKUPS, WITH_MODEL, installed, takes_model
from speculant.engine import build_around, load_target
from speculant.errors import ConfigError
from speculant.lab.bench.measuring import PLAIN, Bench, BenchCase, Mode, Way
from speculant.lab.bench.report import document, keeps_answers
from speculant.params import SamplingParams

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
    drafting = replace(config, use_speculative_decoding=True)
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
    yield (
        f"fastest: {best}, {speed['median']:.2f} ({speed['q1']:.2f}-{speed['q3']:.2f}) "
        "times the speed of plain decoding between tokens"
    )
    close = [way for way in case["gains"] if way != best and _speed(case, way)["q3"] >= speed["q1"]]
    if close:
        yield f"its quartiles overlap with those of {', '.join(close)}: the order is not certain"
