"""Files rewritten with few changed lines: what lookups, a prediction and a draft model gain on a coder model.

Files are made up from a seed, with 1%, 5% and 20% of their lines changed: a name, a number or the whole line is
replaced, a line is put in, or left out. The prompt has the file, and the answer is the edited one in a block of code.
The target computes its passes, and its logits are then raised at the answer's tokens: a small model does not follow
every instruction, and all ways get the same text. With --follow the model answers by itself, to rename a variable.

In each round every way runs once, on the round's own file, every other round backwards; plain decoding runs for
--plain tokens of it. `speed` is tokens per second after the first token over plain decoding's. V is the time of a step
by its rows over that of a plain one, without drafting. `of_bound` is the speed over tokens a pass / V(mean rows).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # for the script's neighbours, however it is started

from benchmarks.real_text import STORED, load, place_of, tell

from speculant.lab.bench import (
    DRAFT,
    TARGET,
    WITHOUT_DRAFTS,
    Bench,
    Benchmark,
    BenchRun,
    LoadedPair,
    Mode,
    Workload,
    markdown,
    measure_steps,
    quartiles,
    ratio,
    shown,
    tokens_per_pass,
)
from speculant.models import Batch, Hidden
from speculant.params import SamplingParams
from speculant.text import Tokenizer

NAMES = "order item price total count index name value limit buffer cursor offset weight label score batch owner"
ACTIONS = "load parse merge apply check split store reset count find build trim"
WORDS, VERBS = map(str.split, (NAMES, ACTIONS))
STATEMENTS = (
    "{a} = {b}.get({c!r}, {n})",
    "if {a} > {n} and {b} is not None:\n        {c} = {a} - {n}",
    "{a}_{b} = [{c} for {c} in {b} if {c} != {n}]",
    "self.{a} = {b} + self.{c} * {n}",
    "for {a} in range({n}):\n        {b}.append(self.{v}_{c}({a}))",
    'logger.info("{v} {a} of %s", {b}[{n}:])',
    "{a}, {b} = {b}, self.{v}_{c}({a}, {n})",
    'assert len({a}) == {n}, f"{{{b}}} has no {c}"',
)
FENCE, RAISED = "```", 1e4
LENGTHS, BEFORE = (0, 1, 2, 4, 8, 16, 24, 32), 512  # drafts whose steps are timed, and the tokens before them
ASKED = "Rewrite this file with the changes that we agreed on. Answer with the whole file.\n"
RENAME = "Rename the method {old} to {new} everywhere in this file. Answer with the whole file, changed nowhere else.\n"
WAYS = {
    "suffix": {"method": "suffix"},
    "prompt_lookup": {"method": "prompt_lookup"},
    "prediction": {"method": "prediction"},
}
DEFAULT, WITH_DRAFT, PLAIN = "default", "default with a draft model", "plain"


def make_file(generator: random.Random, lines: int) -> list[str]:
    """Return the lines of a made-up module."""
    made = ["import logging", "", f"logger = logging.getLogger({generator.choice(WORDS)!r})", "", "", "class Store:"]
    while len(made) < lines:
        name, given = f"{generator.choice(VERBS)}_{generator.choice(WORDS)}", generator.sample(WORDS, 2)
        made.append(f"    def {name}(self, {', '.join(given)}):")
        for _ in range(generator.randint(3, 8)):
            made += statement(generator)
        made += [f"        return {generator.choice(given)}", ""]
    return made


def statement(generator: random.Random) -> list[str]:
    """Return the lines of a made-up statement."""
    a, b, c = generator.sample(WORDS, 3)
    form = generator.choice(STATEMENTS).replace("\n    ", "\n        ")
    return f"        {form.format(a=a, b=b, c=c, v=generator.choice(VERBS), n=generator.randint(2, 99))}".split("\n")


def edited(generator: random.Random, lines: Sequence[str], share: float) -> list[str]:
    """Return the lines of a file of which a share is changed."""
    places = [place for place, line in enumerate(lines) if line.startswith("        ")]
    changed, made = set(generator.sample(places, max(1, round(share * len(lines))))), list[str]()
    for place, line in enumerate(lines):
        kind = generator.randrange(5) if place in changed else -1
        if kind in (0, 1):
            words = [word for word in WORDS if word in line] or ["return"]
            made.append(line.replace(words[0], generator.choice(WORDS) + "_" + generator.choice(VERBS), 1))
        elif kind == 2:
            made += statement(generator)
        elif kind == 3:
            made += [line, *statement(generator)]
        elif kind < 0:
            made.append(line)
    return made


class ForcedTarget:
    """A target whose greedy text is given: `text` has the tokens of prompt and answer; empty = its own text.

    Passes are those of one sequence, so that a row's position is the place of its token in the text.
    """

    def __init__(self, model: Any) -> None:
        self._forward, self._logits = model.forward, model.logits
        self._positions = torch.zeros(0, dtype=torch.int64)
        self.text: Sequence[int] = ()
        model.forward, model.logits = self.forward, self.logits

    def forward(self, batch: Batch, *arguments: Any) -> Hidden:
        """Compute a pass, and note its positions."""
        self._positions = batch.positions
        found: Hidden = self._forward(batch, *arguments)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the model's logits, raised at the tokens of the text."""
        made: Tensor = self._logits(hidden)
        for row, position in enumerate(self._positions[-len(made) :].tolist() if self.text else ()):
            if position + 1 < len(self.text):
                made[row, self.text[position + 1]] += RAISED
        return made


def engines(pair: LoadedPair, context: int) -> dict[str, Bench]:
    """Make the engines."""
    made = {PLAIN: pair.engine(1, **WITHOUT_DRAFTS, max_model_len=context)}
    made |= {name: pair.engine(1, config, max_model_len=context) for name, config in WAYS.items()}
    made[DEFAULT] = pair.engine(1, find_drafts=False, max_model_len=context)
    if DRAFT in pair.folders:
        made[WITH_DRAFT] = pair.engine(1, draft_model=pair.folders[DRAFT], max_model_len=context)
    return {name: Bench(runtime) for name, runtime in made.items()}


def job(tokenizer: Tokenizer, share: float, seed: int, arguments: argparse.Namespace) -> tuple[str, list[int], str]:
    """Return a file, the prompt's tokens and the answer."""
    generator = random.Random(f"{seed} {share}")
    lines = make_file(generator, arguments.lines)
    asked, file = ASKED, "\n".join(lines)
    if arguments.follow:
        old = next(line for line in lines if line.startswith("    def")).split("(")[0].split()[-1]
        asked = RENAME.format(old=old, new="fetch_entry")
    block = f"{FENCE}python\n{file}\n{FENCE}"
    text = tokenizer.apply_chat_template([{"role": "user", "content": f"{asked}{block}"}])
    answer = f"{FENCE}python\n" + "\n".join(edited(generator, lines, share)) + f"\n{FENCE}"
    return block, tokenizer.encode(text, add_special_tokens=False), answer


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the shares of changed lines, one after the other."""
    target, names = place_of(arguments.target), arguments.ways or [*WAYS, DEFAULT, WITH_DRAFT]
    folders = {TARGET: str(target)} | ({DRAFT: str(place_of(arguments.draft))} if WITH_DRAFT in names else {})
    checkpoint, tokenizer = load(target, STORED), Tokenizer.load(target)
    cells = json.loads(arguments.json.read_text())["seen"]["cells"] if arguments.add else dict[str, Any]()
    forced, pair = ForcedTarget(checkpoint.model), LoadedPair(checkpoint, folders)
    costs, benches = step_costs(pair, arguments.context), engines(pair, arguments.context)
    benches = {name: each for name, each in benches.items() if name in (PLAIN, *names)}
    for share in [0.0] if arguments.follow else arguments.shares:
        runs: dict[str, list[BenchRun]] = {name: [] for name in benches}
        for number in range(arguments.rounds):
            block, prompt, answer = job(tokenizer, share, number, arguments)
            output = tokenizer.encode(answer, add_special_tokens=False)
            for name in list(benches)[:: -1 if number % 2 else 1]:
                forced.text = () if arguments.follow else [*prompt, *output]
                params = SamplingParams(temperature=0, max_tokens=arguments.most if arguments.follow else len(output))
                if name == PLAIN:
                    params = replace(params, max_tokens=arguments.plain)
                if name == "prediction":
                    params = replace(params, speculation={"prediction": tokenizer.encode(block, False)})
                bench, work = benches[name], Workload("edits", [prompt])
                if not number:
                    bench.warm_up(work, Mode(params))
                runs[name].append(bench.run(work, Mode(params)))
                tell(
                    f"{share:.0%} {name} {len(output)} tokens, {runs[name][-1].figures()['tokens_per_pass']:.2f} a pass"
                )
        changed = "followed" if arguments.follow else f"{share:.0%}"
        cells[f"{changed}, {arguments.lines} lines"] = figures(runs, costs)
        forced.text = ()
        yield {"V": costs, "cells": cells}


def step_costs(pair: LoadedPair, context: int) -> dict[int, float]:
    """Return the time of a step by its rows, over that of a step of one row."""
    config = {"method": "random", "num_speculative_tokens": 8, "draft_length": "fixed"}
    runtime, params = pair.engine(1, config, max_model_len=context), SamplingParams(temperature=0)
    prompt = [token % 1000 + 100 for token in range(BEFORE)]
    found = measure_steps({"draft": list(LENGTHS)}, {"draft": runtime}, prompt, params, 1.0, 1)["draft"]
    return {1 + length: float(own / found.other_s[0]) for length, own in zip(found.lengths, found.other_s, strict=True)}


def figures(runs: Mapping[str, Sequence[BenchRun]], costs: Mapping[int, float]) -> dict[str, Any]:
    """Return the figures of all ways. costs: see `step_costs`."""
    times = {name: [run.figures()["itl_mean_s"] for run in own] for name, own in runs.items()}
    found: dict[str, Any] = {"plain_tokens_per_s": quartiles([1 / each for each in times[PLAIN]])}
    for name, own in runs.items():
        if name != PLAIN:
            drafted = sum(run.speculation.num_draft_tokens for run in own)
            accepted = sum(run.speculation.num_accepted_draft_tokens for run in own)
            speed, tokens = ratio(times, PLAIN, name), tokens_per_pass(own)
            rows = 1 + drafted / sum(timing.sampled_passes for run in own for timing in run.timings)
            found[name] = {
                "speed": speed, "tokens_per_pass": tokens, "rows": rows, "accepted": accepted / max(1, drafted),
                "of_bound": speed["median"] * float(np.interp(rows, [*costs], [*costs.values()])) / tokens,
            }  # fmt: skip
    return found


def show(found: Mapping[str, Any]) -> str:
    """Return the table."""
    rows = list[list[str]]()
    for share, cell in found["cells"].items():
        for name, own in cell.items():
            if "speed" in own:
                rows.append([
                    share, name, shown(own["speed"]),
                    *(f"{own[each]:.2f}" for each in ("tokens_per_pass", "rows", "accepted", "of_bound")),
                ])  # fmt: skip
    header = ["changed", "way", "speed over plain", "tokens a pass", "rows", "accepted", "of bound"]
    costs = ", ".join(f"V({size}) {cost:.2f}" for size, cost in found["V"].items())
    return f"{markdown(header, rows)}\n\n{costs}"


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="At 1% changed lines the default is 4.5 times as fast as plain decoding, and 0.9 of tokens a pass over "
    "the time of a pass. No way is 10% faster than the default.",
    measure=measure, rounds=3, show=show,
    options={
        "target": "qwen_1.5b", "draft": "qwen_0.5b", "shares": [0.01, 0.05, 0.2], "lines": 100,
        "ways": {"nargs": "+", "default": [], "help": "those to run beside plain decoding; all without it"},
        "plain": 64, "most": 1024, "context": 4096,
        "add": {"action": "store_true", "help": "keep the cells of the file that --json names"},
        "follow": {"action": "store_true", "help": "the model answers by itself"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
