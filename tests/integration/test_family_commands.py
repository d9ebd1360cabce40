"""The commands that look at a checkpoint work on one of any family, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculant.errors import ModelError
from speculant.lab.bench import pair
from speculant.models import Experts, read_description, read_model_config
from tests.commands import json_of as run
from tests.models import Shape, write_checkpoint
from tests.unit.models.families import VARIANTS, cases_with

pytestmark = pytest.mark.usefixtures("one_thread")
COMMANDS = {
    "doctor": ["doctor", "{target}"],
    "check-lossless": [
        "check-lossless", "--model", "{target}", "--draft-model", "{draft}", "--dtype", "float64", "--cases", "4",
        "--texts", "8", "--max-tokens", "8", "--ignore-eos", "--prompt", "abc",
    ],
    "check-pair": ["check-pair", "{target}", "{draft}", "--tokens", "16", "--prompts", "{prompts}"],
    "bench": [
        "bench", "throughput", "--model", "{target}", "--draft-model", "{draft}", "--num-prompts", "2",
        "--prompt-length", "8", "--max-tokens", "8", "--prompts", "random",
    ],
    "inflate": [
        "inflate", "{target}", "{out}", "--hidden-size", "128", "--intermediate-size", "160", "--layers", "8",
    ],
    "plan": ["plan", "--verify-curve", "{pair}"],
}  # fmt: skip
# a factor follows from the width
FOLLOWS_SIZES = {"gemma4_text"}


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_COST_SECONDS", 0.01)
    monkeypatch.setattr(pair, "SPEED_SECONDS", 0.01)


def can_grow(folder: Path) -> bool:
    """Whether a model can be inflated: no experts or encoder, and no arithmetic that follows from sizes."""
    config = read_model_config(folder)
    decoder = read_description(config)
    kept = config["model_type"] in FOLLOWS_SIZES or any(isinstance(layer.mlp, Experts) for layer in decoder.layers)
    return decoder.encoder is None and not kept


def fewer(cases: list[Any]) -> list[Any]:
    """Mark quick cases slow: all but the first of the commands that generate; the plan's case runs check-pair, too."""
    found, seen = list[Any](), {"check-pair", "check-lossless"}
    for case in cases:
        (_, _, name), quick = case.values[0], not case.marks
        left_out = quick and name in seen and name not in ("doctor", "inflate")
        found.append(pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] if left_out else case.marks))
        if quick:
            seen.add(name)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", fewer(cases_with([*COMMANDS], with_encoders=True)))
def test_a_command_works_on_any_family(case: tuple[str, str, str], tmp_path: Path) -> None:
    family, variant, name = case
    settings = tuple(VARIANTS.get(family, {}).get(variant, {}).items())
    places = {
        role: write_checkpoint(tmp_path / role, Shape(family=family, layers=3, noise=noise, settings=settings))
        for role, noise in (("target", 0.0), ("draft", 0.05))
    }
    places |= {name: str(tmp_path / name) for name in ("out", "pair", "prompts")}
    Path(places["prompts"]).write_text("abc\n", encoding="utf-8")
    if name == "plan":
        measured = run(*(word.format(**places) for word in COMMANDS["check-pair"]))
        Path(places["pair"]).write_text(json.dumps(measured), encoding="utf-8")
    if name == "inflate" and not can_grow(Path(places["target"])):
        with pytest.raises(ModelError, match="can't be inflated|its function would change"):
            run(*(word.format(**places) for word in COMMANDS[name]))
        return
    found = run(*(word.format(**places) for word in COMMANDS[name]))
    match name:
        case "doctor":
            assert found["model"]["architecture"] == family
        case "check-lossless":
            assert found["lossless"]
        case "inflate":
            assert found["bytes"] > Path(places["target"], "model.safetensors").stat().st_size
        case _:
            assert found
