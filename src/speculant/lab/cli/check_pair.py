"""`speculant check-pair`: whether a draft model or a head speeds up a target here, and with which settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from speculant.cli import (
    EngineFlags,
    SamplingFlags,
    accepts_flags,
    examples,
    fetch,
    model_first,
    plain_table,
    print_json,
    progress_of_parts,
    results,
)
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.files import is_steady
from speculant.lab.bench import CODE, WorkloadConfig
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from speculant.lab.bench import Findings, SpeedPrediction

EXAMPLES = examples(
    "speculant check-pair demo demo",
    "speculant check-pair demo demo --method medusa",
    "speculant check-pair ./llama ./llama-small --prompts prompts.txt --tokens 128",
    "speculant check-pair ./llama ./llama-small --temperature 0.8 --top-p 0.95 --dtype bfloat16",
    "speculant check-pair demo demo --json > pair.json",
    "speculant plan --verify-curve pair.json",
)
FEWEST_TOKENS = 8
SHOWN = (1, 2, 3, 5, 9, 17)  # tokens of a pass whose cost is printed
VERDICTS = {True: "bold green", False: "bold red", None: "bold yellow"}  # styles
BEST = "bold green"


COMPUTED = ("dtype", "device", "kernels", "quantization")  # flags that say how the models are computed


class PairFlags(EngineFlags):
    """The models and the flags for computing both; the result names the others."""

    left_out = frozenset(EngineFlags.names()) - {"model", *COMPUTED}


class PairSampling(SamplingFlags):
    """The flags that determine distributions; greedy by default."""

    left_out = frozenset(SamplingFlags.names()) - {"temperature", "top_k", "top_p", "min_p"}
    defaults: ClassVar[Mapping[str, object]] = {"temperature": 0}


Target = Annotated[str | None, typer.Argument(metavar="TARGET", help="As --model: the target.")]
Draft = Annotated[
    str | None, typer.Argument(metavar="DRAFT", help="The draft model or head: a folder or file, an id, or demo.")
]
NamedDraft = Annotated[str | None, typer.Option("--draft-model", help="The draft, in place of the argument.")]
Method = Annotated[
    str | None, typer.Option(help="How it drafts, such as medusa, eagle or early_exit [default: as a draft model].")
]
Prompts = Annotated[str, typer.Option(help="code (built in), random (token ids), or a file with one prompt per line.")]
Tokens = Annotated[int, typer.Option(help="Tokens that the target generates for each prompt.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything that was measured as JSON.")]


@accepts_flags
def check_pair(
    target: Target = None,
    draft: Draft = None,
    named_draft: NamedDraft = None,
    method: Method = None,
    prompts: Prompts = CODE,
    tokens: Tokens = 64,
    as_json: AsJson = False,
    *,
    sampling: PairSampling,
    engine: PairFlags,
) -> None:
    """Measure whether a draft model or a head speeds up a target, and recommend flags.

    The command compares sizes, and tokenizers, which may differ. On texts that the target writes, it measures
    how often draft tokens are accepted and how long steps with drafts of several lengths take, for each type
    of draft weights that the kernels support. From this it predicts the speed of each draft length, and
    measures the best one against plain decoding. With --method it measures several draft lengths directly; for
    early_exit it compares exit layers in place of types. The embedded pair takes about 20 seconds.
    """
    if tokens < FEWEST_TOKENS:
        raise ConfigError(f"tokens={tokens} is too few to measure", f"use --tokens {FEWEST_TOKENS} or more.")
    target, draft = model_first(engine.given["model"] if "model" in engine.typed else None, target, draft)
    engine.name_model(target)
    values, (draft,) = engine.values(), model_first(named_draft, draft)
    if draft is None and method is None:
        raise ConfigError("no draft is named", "give a draft model after the target, or --method with a head.")
    speculative = None if method is None else {"method": method}
    config = EngineConfig.from_arguments(**values, draft_model=draft, speculative_config=speculative)
    params = replace(sampling.params(SamplingParams(temperature=0.0)), max_tokens=tokens)
    workload = WorkloadConfig(prompts)
    fetch(config)
    with progress_of_parts() as parts:
        from speculant.lab.bench import check_drafts, check_pair as check_model

        measure = check_drafts if config.speculative_config else check_model
        findings = measure(config, workload, params, parts.begin)
    value = document(config, findings)
    if as_json:
        print_json(value)
    else:
        _show(results(), value)


def document(config: EngineConfig, findings: Findings) -> dict[str, Any]:
    """Return the findings as `--json` prints them; `speculant plan` reads `verify_curve`."""
    usual, chosen = findings.usual.costs, findings.predictions[findings.chosen]
    costs = [time / usual.other_s[0] for time in usual.other_s]
    tokens = [length + 1 for length in usual.lengths]
    overhead = chosen.costs.overhead
    flags = _flags(config, findings)
    return {
        "target": asdict(findings.target),
        "draft": asdict(findings.draft),
        "draft_lacks_tokens": findings.lacks,
        "vocabulary": asdict(findings.shared) | {"verdict": findings.shared.verdict} if findings.shared else None,
        "size_ratio": findings.draft.parameters / findings.target.parameters,
        "sampling": {name: getattr(findings.params, name) for name in PairSampling.names()},
        "texts": findings.num_texts,
        "step_ms": 1e3 * usual.plain_s,
        "step_spread": max(each.costs.spread for each in findings.predictions.values()),
        "verification": {"tokens": tokens, "cost": costs},
        "verify_curve": {"tokens": tokens, "cost": [costs[0], *(cost + overhead for cost in costs[1:])]},
        "precisions": {name: _prediction(each) for name, each in findings.predictions.items()},
        "best": {"precision": findings.chosen, "length": findings.length, "options": dict(findings.options)},
        "measured": _measured(findings),
        "pays": findings.pays,
        "verdict": _verdict(config, findings, flags),
        "flags": flags,
    }


def _prediction(each: SpeedPrediction) -> dict[str, Any]:
    costs = each.costs
    return {
        "alpha": asdict(each.alpha),
        "correlation": each.correlation,
        "rates": list(each.rates),
        "cost_ratio": costs.cost_ratio,
        "draft_overhead": costs.overhead,
        "draft_ms": {str(length): 1e3 * time for length, time in zip(costs.lengths, costs.draft_s, strict=True)},
        "lengths": [
            {"length": length, "tokens_per_pass": float(tokens), "speed": float(speed)}
            for length, (tokens, speed) in enumerate(zip(each.tokens, each.speeds, strict=True))
        ],
        "best_length": each.best_length,
        "best_speed": float(each.speeds[each.best_length]),
    }


def _measured(findings: Findings) -> dict[str, Any]:
    from speculant.lab.bench import PLAIN, SPECULATIVE

    case = findings.case
    return {
        "speed": asdict(findings.speed),
        "predicted": findings.predicted,
        "alpha": asdict(findings.accepted) if findings.accepted else None,
        "verification": case.runs[SPECULATIVE][0].verifier,
        "prompts": len(case.workload.prompts),
        "rounds": len(case.runs[PLAIN]),
        "tokens_per_s": {mode: asdict(case.spreads(mode)["request_tokens_per_s"]) for mode in case.runs},
        "outputs": case.num_outputs,
        "identical_outputs": case.num_identical(SPECULATIVE) if case.comparable else None,
    }


def _flags(config: EngineConfig, findings: Findings) -> str:
    """Return the flags for the measured setting."""
    given = {"model": config.model, "draft-model": config.draft_model, "spec-length": findings.length}
    given = {name: value for name, value in given.items() if value is not None}
    usual = EngineConfig(config.model)
    for name in COMPUTED:
        if getattr(config, name) != getattr(usual, name):
            given[name] = getattr(config, name)
    if config.speculative_config:
        keys = {"method": config.speculative_config["method"], **findings.options}
        given["speculative-config"] = ",".join(f"{key}={value}" for key, value in keys.items())
    if not config.speculative_config or (len(findings.predictions) > 1 and not findings.options):
        given["draft-quantization"] = findings.chosen
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in given.items())


def _verdict(config: EngineConfig, findings: Findings, flags: str) -> str:
    from speculant.lab.bench import cell

    speed = findings.speed
    if findings.pays:
        return f"it pays: {speed.median:.2f} times the speed of plain decoding with {flags}"
    if findings.pays is None:
        return f"it makes no clear difference: {cell(asdict(speed))} times the speed of plain decoding with {flags}"
    return (
        f"it does not pay: {speed.median:.2f} times the speed of plain decoding at the best length, {findings.length}; "
        f"use --model {shlex.quote(config.model)} without this draft"
    )


def _show(console: Console, value: Mapping[str, Any]) -> None:
    from speculant.lab.bench import cell, interval

    for role in ("target", "draft"):
        model = value[role]
        size = f"{model['parameters'] / 1e6:.4g} million parameters"
        console.print(f"{role}: {model['name']}, {size}, {model['dtype']}, kernels: {model['kernels']}")
    console.print(f"the draft fits the target, and has {value['size_ratio']:.3g} of its parameters")
    if value["vocabulary"]:
        console.print(value["vocabulary"]["verdict"])
    elif value["draft_lacks_tokens"]:
        console.print(f"the draft lacks {value['draft_lacks_tokens']} of the target's tokens and never drafts them")
    _show_acceptance(console, value)
    _show_lengths(console, value)
    measured = value["measured"]
    console.print(
        f"\nmeasured: {cell(measured['speed'])} times the speed of plain decoding, "
        f"{measured['rounds']} rounds of {measured['prompts']} prompts; predicted: {measured['predicted']:.2f}"
    )
    if measured["alpha"] is not None:
        console.print(
            f"accepted / tested tokens: {interval(measured['alpha'])}, verified by {measured['verification']}"
        )
    if measured["identical_outputs"] is not None:
        console.print(f"outputs identical to plain: {measured['identical_outputs']} of {measured['outputs']}")
    console.print(value["verdict"], style=VERDICTS[value["pays"]])


def _show_acceptance(console: Console, value: Mapping[str, Any]) -> None:
    """Print alpha and the costs of drafting for each setting, and the costs of verification."""
    from speculant.lab.bench import interval

    usual = next(iter(value["precisions"].values()))
    first = usual["alpha"]
    greedy = value["sampling"]["temperature"] == 0
    kind = "greedy" if greedy else f"at temperature {value['sampling']['temperature']:g}"
    console.print(f"\n{value['texts']} texts of the target, {kind}, {first['tokens']} tokens", style="bold")
    rows = [
        (
            value["draft"]["dtype"] if name == "none" else name,
            interval(each["alpha"]),
            f"{each['cost_ratio']:.3f}",
            f"{each['draft_overhead']:.3f}",
            str(each["best_length"]),
            f"{each['best_speed']:.2f}",
        )
        for name, each in value["precisions"].items()
    ]
    first_column = "setting" if value["best"]["options"] else "draft weights"
    header = (first_column, "alpha (95%)", "per token", "per draft", "best", "predicted")
    console.print(plain_table(header, rows))
    if usual["correlation"] is not None:
        console.print(f"correlation of acceptance between neighbouring tokens: {usual['correlation']:.2f}")
    by_tokens = dict(zip(value["verification"]["tokens"], value["verification"]["cost"], strict=True))
    shown = ", ".join(f"{tokens}: {by_tokens[tokens]:.2f}" for tokens in SHOWN if tokens in by_tokens)
    console.print(
        f"costs are relative to a step of plain decoding, {value['step_ms']:.2f} ms; steps by tokens per pass: {shown}"
    )
    if not is_steady(value["step_spread"]):
        console.print(
            f"other programs were busy: half of the steps took {value['step_spread']:.1f} times the least or more, so "
            "the costs and predictions are uncertain; close these programs and repeat the command",
            style=VERDICTS[None],
        )


def _show_lengths(console: Console, value: Mapping[str, Any]) -> None:
    best = value["best"]
    setting = value["draft"]["dtype"] if best["precision"] == "none" else best["precision"]
    kind = "" if best["options"] else " draft weights"
    console.print(f"\nPredicted with {setting}{kind}", style="bold")
    chosen = value["precisions"][best["precision"]]
    rows, styles = [], []
    for row in chosen["lengths"]:
        is_best = row["length"] == chosen["best_length"]
        figures = (f"{row['tokens_per_pass']:.2f}", f"{row['speed']:.2f}")
        rows.append((str(row["length"]), *figures, "best" if is_best else ""))
        styles.append(BEST if is_best else None)
    console.print(plain_table(("length", "tokens/pass", "speed", ""), rows, styles=styles))
