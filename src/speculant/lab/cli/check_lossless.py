"""`speculant check-lossless`: checks that a pair, a drafter and a verifier preserve the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from speculant.cli import (
    EngineFlags,
    Model,
    Parts,
    SamplingFlags,
    accepts_flags,
    examples,
    fetch,
    plain_table,
    print_json,
    progress,
    progress_of_parts,
    results,
)
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.bench import code_prompt

if TYPE_CHECKING:
    from speculant.lab.exactness import Report
    from speculant.params import SamplingParams

EXAMPLES = examples(
    "speculant check-lossless",
    "speculant check-lossless --verification rejection --temperature 0.8 --top-p 0.95 --texts 256",
    "speculant check-lossless ./llama --draft-model ./llama-small --spec-length 4 --json",
    "speculant check-lossless ./llama --method ngram --prompt 'def read(path):' --prompt 'import os'",
    """speculant check-lossless --speculative-config '{"model": "demo", "tree": [2, 1]}'""",
)
EXIT_FAILED = 1
NUM_PROMPTS = 8  # of built-in code
PASSED, FAILED = "green", "bold red"  # styles


class CheckedEngine(EngineFlags):
    """The engine's flags; the default is the embedded pair."""

    def arguments(self, method: str | None, verification: str | None) -> dict[str, Any]:
        """Return the engine's arguments; method and verification are keys of its speculative_config too."""
        values = self.parsed()
        config = dict(values.get("speculative_config", {}))
        if "model" not in values:
            values = _embedded(bool(method or config), **values)
        for key, value in (("method", method), ("verification", verification)):
            if value is not None and config.setdefault(key, value) != value:
                raise ConfigError(
                    f"{key} is given twice, as {value!r} and as {config[key]!r} in --speculative-config", "keep one."
                )
        config.setdefault("draft_length", "fixed")  # so that drafts are made even where they don't pay
        return {**values, "speculative_config": config}


def _embedded(drafting: bool, draft_model: str | None = None, **values: Any) -> dict[str, Any]:
    """Return the engine's arguments with the embedded target, and its draft unless another drafter is given."""
    return dict(values, model="demo", draft_model=draft_model if drafting or draft_model else "demo")


class CheckedSampling(SamplingFlags):
    """The flags that determine distributions and ends; the check sets the seeds."""

    left_out = (
        *("n", "seed", "logprobs", "prompt_logprobs", "speculation"),
        *("skip_special_tokens", "include_stop_str_in_output", "beam_width", "length_penalty"),
        *("detokenize", "truncate_prompt_tokens", "bad_words", "allowed_token_ids"),
    )


Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", help="A prompt; can be repeated. Without it, built-in code.")
]
Method = Annotated[str | None, typer.Option(help="The drafting method [default: the draft model].")]
Verification = Annotated[str | None, typer.Option(help="The verifier of drafts [default: auto].")]
Cases = Annotated[int, typer.Option(help="Random pairs of distributions to enumerate.")]
Texts = Annotated[int, typer.Option(help="Texts to sample and test; four times as many detect half the shift.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@accepts_flags
def check_lossless(
    target: Model = None,
    prompts: Prompts = None,
    method: Method = None,
    verification: Verification = None,
    cases: Cases = 200,
    texts: Texts = 64,
    as_json: AsJson = False,
    *,
    sampling: CheckedSampling,
    engine: CheckedEngine,
) -> None:
    """Check that speculation preserves the target's distribution, for a pair of models and a drafter.

    Proves it on tables, by following every branch of the real engine. Tests on the pair that tokens
    follow the target's distribution, and prints the smallest shift that the test can detect. Compares
    greedy and seeded texts with and without speculation. The exit code is 1 if any of these fails.
    """
    engine.name_model(target)
    params = sampling.params()
    config = EngineConfig.from_arguments(**{"use_speculative_decoding": True} | engine.arguments(method, verification))
    _check_settings(config, params, {"cases": cases, "texts": texts})
    fetch(config)
    with progress("Loading the models"):
        from speculant.engine import build_engine

        runtime = build_engine(config)
    given = [runtime.tokenizer.encode(prompt) for prompt in prompts or ()]
    made = given or [code_prompt(runtime.tokenizer, index) for index in range(NUM_PROMPTS)]
    with progress_of_parts() as parts:
        from speculant.lab.exactness import Subject, run_check

        found = (lambda key, value: None) if as_json else _Shown(parts).show
        report = run_check(Subject(config, runtime, made, params), cases, texts, parts.begin, found)
    if as_json:
        print_json(report.to_dict())
    else:
        _conclude(report)
    if not report.lossless:
        raise typer.Exit(EXIT_FAILED)


def _check_settings(config: EngineConfig, params: SamplingParams, sizes: Mapping[str, int]) -> None:
    """Check the settings before anything is loaded. Raises ConfigError."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}={size} is not above 0", f"use for example --{name} 50.")
    if params.greedy:
        raise ConfigError(
            "temperature=0 samples nothing that could be tested", "leave it out; greedy texts are compared in any case."
        )
    if config.speculative() is None:
        raise ConfigError(
            "speculation is off: use_speculative_decoding is False", "leave out --no-use-speculative-decoding."
        )


class _Shown:
    """Prints each part of the report as soon as it is known, with a heading before the first part of a section."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._console = parts, results()
        self._known: dict[str, Any] = {}  # the results so far, by their keys in the report

    def show(self, key: str, value: Any) -> None:
        """Print a part of the report; see `Found`."""
        self._parts.end()
        first = key not in self._known
        self._known[key] = value
        match key:
            case "settings":
                _show_settings(self._console, value)
            case "proven":
                if first:
                    self._head("Proven, by following every branch of the engine's step, on tables in float64")
                _show_proof(self._console, value)
            case "tested":
                self._head("Tested on this pair")
                _show_tests(self._console, self._known)
            case "identity":
                if first:
                    self._head("Compared with plain decoding of each prompt alone, token for token")
                _show_identity(self._console, value)

    def _head(self, heading: str) -> None:
        self._console.print(f"\n{heading}", style="bold")


def _conclude(report: Report) -> None:
    console = results()
    for note in report.notes():
        console.print(f"note: {note}", style="yellow")
    console.print(f"\n{report.verdict()}", style=PASSED if report.lossless else FAILED)


def _show_settings(console: Console, settings: Mapping[str, Any]) -> None:
    console.print(f"speculation is on: {settings['speculation']}")
    console.print(
        "rules: " + ", ".join(f"{verifier} for {kind} requests" for kind, verifier in settings["rules"].items())
    )
    console.print(f"target: {settings['target']} in {settings['dtype']}, kernels: {settings['kernels']}")


def _show_proof(console: Console, proof: Mapping[str, Any]) -> None:
    announced = "" if proof["announced_lossless"] else " (announces that it is not lossless)"
    console.print(f"  {proof['rule']}{announced}, for {' and '.join(proof['requests'])} requests: ", end="")
    _mark(console, proof["passed"])
    console.print(
        f"    {proof['cases']} random pairs of distributions, vocabularies of {_span(proof['vocabularies'])}, "
        f"{_span(proof['draft_nodes'])} draft tokens by {proof['draft']}"
    )
    found = f"    the output's joint distribution is within {proof['largest_deviation']:.1e} of the target's"
    console.print(f"{found} ({proof['tolerance']:.0e} is rounding); {proof['mean_accepted']:.2f} accepted on average")
    if proof["error"]:
        console.print(f"    stopped early: {proof['error']}")


def _span(values: Sequence[int]) -> str:
    return " to ".join(str(value) for value in dict.fromkeys((*values[:1], *values[-1:])))


def _show_tests(console: Console, value: Mapping[str, Any]) -> None:
    settings, (*scores, impossible) = value["settings"], value["tested"]
    console.print(
        f"  {settings['texts']} texts of {settings['prompts']} prompts, {impossible['tokens']} tokens, "
        f"{value['speculation']['num_accepted_draft_tokens']} of them drafted; "
        f"a correct sampler fails one check in {1 / settings['false_alarm']:.0f}"
    )
    rows = [(f"  {score['test']}", *_figures(score), "ok" if score["passed"] else "FAILED") for score in scores]
    console.print(plain_table(("  test", "expected", "observed", "Z", "p", ""), rows))
    for score in scores:
        console.print(f"  {score['test']}: {_strength(score)}")
    console.print(f"  tokens that the target can't produce: {impossible['observed']} ", end="")
    _mark(console, impossible["passed"])


def _figures(score: Mapping[str, Any]) -> Iterator[str]:
    for name, decimals in (("expected", 4), ("observed", 4), ("z", 2), ("p_value", 3)):
        yield f"{score[name]:.{decimals}f}"


def _strength(score: Mapping[str, Any]) -> str:
    """Return the smallest shift that a test can detect, in words."""
    shift = score["detectable_shift"]
    if shift is None:
        return "these settings leave no choice, so there was nothing to test"
    size = f"{100 * shift:.2g} percentage points" if score["unit"] == "probability" else f"{shift:.2g} {score['unit']}"
    return f"a shift of {size} in {score['what']} would have been seen in {100 * score['power']:.0f} of 100 runs"


def _show_identity(console: Console, each: Mapping[str, Any]) -> None:
    console.print(f"  {each['requests']}, {each['way']}: {each['agreeing']} of {each['texts']} texts agree ", end="")
    _mark(console, each["passed"])
    if each["agreeing"] < each["texts"]:
        console.print(f"    {_difference(each)}")


def _difference(each: Mapping[str, Any]) -> str:
    """Return an explanation of why texts differ."""
    gap = each["first_difference_gap_nats"]
    where = "nowhere near a tie" if gap is None else f"first difference at a gap of at most {gap:.2g} nats"
    if each["bitwise"]:
        return f"{where}; the native kernels allow none"
    return f"exact given the logits; {each['texts'] - each['agreeing']} of {each['texts']} texts differ, {where}"


def _mark(console: Console, passed: bool) -> None:
    console.print("ok" if passed else "FAILED", style=PASSED if passed else FAILED)
