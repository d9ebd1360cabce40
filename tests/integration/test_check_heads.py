"""`speculant check-pair --method`, as it is typed: heads and other methods whose drafts are measured by drafting."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from speculant.config import EngineConfig
from speculant.drafting.model import early_exit
from speculant.errors import ConfigError, PairError, SpeculantError
from speculant.lab.bench import Estimate, LengthCosts, Workload, drafting, measuring, pair
from speculant.lab.theory import expected_tokens, survival
from speculant.models import CausalLM
from speculant.params import SamplingParams
from tests.commands import error_of, invoke, json_of
from tests.heads import WRITERS, write_blockwise, write_medusa
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, Shape, write_checkpoint
from tests.native import SETS

SMALL = ("--tokens", "12", "--kernels", "reference")
ALPHA = Estimate(0.5, 0.4, 0.6, 100)


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "STEPS", 1)
    monkeypatch.setattr(drafting, "_COST_SECONDS", 0.01)
    monkeypatch.setattr(drafting, "RUN_SECONDS", 0.01)
    monkeypatch.setattr(pair, "SPEED_SECONDS", 0.01)


_json = partial(json_of, "check-pair")
QUICK = ("pass",)  # other tests here have medusa and blockwise


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in sorted(WRITERS)]
)
def test_every_head_is_measured(method: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    head = WRITERS[method](tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE)
    value = _json(checkpoints.target, head, "--method", method, *SMALL)
    own = value["precisions"]["none"]
    assert value["draft"]["name"] == f"{method}, {head}"
    assert value["draft"]["parameters"] >= 3 * HIDDEN_SIZE
    assert own["lengths"][0] == {"length": 0, "tokens_per_pass": 1.0, "speed": 1.0}
    assert [row["length"] for row in own["lengths"]] == list(range(len(own["lengths"])))
    assert own["correlation"] is None
    per_pass = [row["tokens_per_pass"] for row in own["lengths"]]
    assert expected_tokens(survival(own["rates"], len(per_pass) - 1)) == pytest.approx(per_pass)
    assert value["measured"]["outputs"] == value["measured"]["identical_outputs"]
    assert f"--speculative-config method={method}" in value["flags"]
    invoke("generate", "hello", "--max-tokens", "4", *shlex.split(value["flags"]))


def test_a_method_without_a_model_is_measured(tmp_path: Path) -> None:
    """The exit layer with the highest predicted speed is recommended."""
    target = write_checkpoint(tmp_path / "target", Shape(layers=4))
    value = _json(target, "--method", "early_exit", "--tokens", "12")
    assert value["draft"]["name"] == "early_exit"
    assert value["draft"]["parameters"] == 0
    assert "--draft-model" not in value["flags"]
    assert "--draft-quantization" not in value["flags"]
    speeds = {name: max(row["speed"] for row in each["lengths"][1:]) for name, each in value["precisions"].items()}
    assert list(speeds) == ["layers 1", "layers 2"]
    best = value["best"]["options"]["layers"]
    assert speeds[f"layers {best}"] == max(speeds.values())
    assert f"method=early_exit,layers={best}" in value["flags"]
    invoke("generate", "hello", "--max-tokens", "4", *shlex.split(value["flags"]))


@pytest.mark.parametrize(
    ("num_layers", "compared"),
    [(2, [1]), (4, [1, 2]), (6, [1, 2, 3]), (28, [1, 2, 4, 7, 8, 14]), (32, [1, 2, 4, 8, 16])],
)
def test_exit_layers_lie_in_the_first_half(num_layers: int, compared: list[int]) -> None:
    assert early_exit.alternatives(cast(CausalLM, SimpleNamespace(num_layers=num_layers))) == [
        {"layers": layers} for layers in compared
    ]


@pytest.mark.skipif(not SETS, reason="the native kernels are not built")
def test_types_of_a_head_are_compared(checkpoints: Checkpoints, tmp_path: Path) -> None:
    head = write_medusa(tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE)
    value = _json(checkpoints.target, head, "--method", "medusa", "--tokens", "12", "--kernels", "native")
    assert set(value["precisions"]) == {"none", "int8", "int4"}
    best = value["best"]["precision"]
    assert value["precisions"][best]["best_speed"] >= 1
    assert f"--draft-quantization {best}" in value["flags"]
    invoke("generate", "hello", "--max-tokens", "4", *shlex.split(value["flags"]))


def test_text_of_a_head_ends_with_a_verdict(checkpoints: Checkpoints, tmp_path: Path) -> None:
    head = write_blockwise(tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE)
    shown = invoke("check-pair", checkpoints.target, head, "--method", "blockwise", *SMALL).stdout
    assert "correlation" not in shown
    assert shown.splitlines()[-1].startswith(("it pays: ", "it does not pay: ", "it makes no clear difference: "))


def test_plan_reads_a_heads_report(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Without --alpha and --cost-ratio, the plan is for the head that was measured."""
    head = write_medusa(tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE)
    value = _json(checkpoints.target, head, "--method", "medusa", *SMALL)
    path = tmp_path / "head.json"
    path.write_text(json.dumps(value))
    arguments = ["plan", "--verify-curve", str(path), "--max-length", "3"]
    plan = json_of(*arguments)
    own = value["precisions"]["none"]
    expected = [row["tokens_per_pass"] for row in own["lengths"][:4]]
    assert [row["tokens_per_pass"] for row in plan["lengths"]] == pytest.approx(expected)
    assert plan["settings"]["cost_ratio"] == own["cost_ratio"]
    given = json_of(*arguments, "--alpha", "0.5")
    assert given["settings"]["alpha"] == [0.5]
    assert given["settings"]["cost_ratio"] == own["cost_ratio"]


def test_tokens_per_pass_are_those_of_the_engine(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A head of three tokens is run with 1, 2 and 3; the rates are those of its drafts."""
    head = write_blockwise(tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE, heads=3)
    config = EngineConfig(checkpoints.target, head, speculative_config={"method": "blockwise"}, dtype="float64")
    candidate = drafting.load_drafter(config, drafting.load_target(config), drafting.Variant())
    workload = Workload("test", [[65, 66, 67], [80, 81]])
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    sizes, tokens, alpha = drafting.measure_drafts(candidate, workload, params)
    assert sizes == [1, 2, 3]
    assert alpha.tokens > 0
    for size, found in zip(sizes, tokens, strict=True):
        engine = candidate.runtime.engine
        wanted = replace(params, speculation={"num_speculative_tokens": size})
        steps = 0
        for place, prompt in enumerate(workload.prompts):
            engine.add_request(prompt, wanted, f"{size}-{place}")
            while engine.has_unfinished():
                engine.step()
                steps += 1
        assert found == pytest.approx(2 * 29 / (steps - 2))


def test_prediction_is_tokens_over_costs() -> None:
    costs = LengthCosts((0, 1, 2, 4), [0.0, 0.1, 0.1, 0.1], [1.0, 1.1, 1.2, 1.4])
    found = drafting.predict_drafts([1, 2, 4], np.array([1.5, 1.8, 2.0]), ALPHA, costs)
    assert found.tokens == pytest.approx([1, 1.5, 1.8, 1.9, 2.0])
    assert found.speeds == pytest.approx([1, 1.5 / 1.2, 1.8 / 1.3, 1.9 / 1.4, 2.0 / 1.5])
    assert found.rates == pytest.approx([0.5, 0.6, 1 / 3, 1.0, 0.0])
    assert found.best_length == 2


def test_more_nodes_never_bring_more_than_fewer() -> None:
    """A gain that grows with the number of nodes is chance, and so is a loss."""
    costs = LengthCosts((0, 1, 2, 3), [0.0] * 4, [1.0] * 4)
    found = drafting.predict_drafts([1, 2, 3], np.array([1.2, 1.6, 1.5]), ALPHA, costs)
    assert found.tokens == pytest.approx([1, 1.2, 1.4, 1.4])


@pytest.mark.parametrize(
    ("arguments", "kind", "problem"),
    [
        ([], ConfigError, "no draft is named"),
        (["--method", "medusa"], ConfigError, "none is named"),
        (["--method", "medusas"], ConfigError, "medusas"),
    ],
)
def test_mistakes_with_methods_are_explained(
    checkpoints: Checkpoints, arguments: list[str], kind: type[SpeculantError], problem: str
) -> None:
    error = error_of("check-pair", checkpoints.target, *arguments, *SMALL)
    assert isinstance(error, kind)
    assert problem in str(error)


def test_a_head_of_another_target_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    head = write_blockwise(tmp_path / "head", 2 * HIDDEN_SIZE, VOCAB_SIZE)
    error = error_of("check-pair", checkpoints.target, head, "--method", "blockwise")
    assert isinstance(error, PairError)


def test_drafts_of_changing_size_are_refused(checkpoints: Checkpoints) -> None:
    error = error_of("check-pair", checkpoints.target, "--method", "suffix", *SMALL)
    assert isinstance(error, ConfigError)
    assert "speculant bench" in error.fix
