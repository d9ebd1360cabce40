"""Models that are made for measurements: decoded GGUF files, kept folders; and the oracle's time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speculant import LLM, SamplingParams
from speculant.lab.bench.oracle_costs import oracle_seconds
from speculant.lab.bench.step_costs import LengthCosts
from speculant.lab.inflation.kept import decoded_model, inflated_model
from speculant.lab.inflation.model import shape_of
from tests.gguf_models import convert
from tests.models import Checkpoints

COSTS = LengthCosts((0, 1, 4), (0.0, 1.0, 4.0), (10.0, 10.0, 10.0))


def test_a_decoded_model_writes_the_text_of_its_file(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = convert(checkpoints.target, tmp_path / "model.gguf", "BF16")
    folder = decoded_model(file)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = [LLM(str(each), dtype="bfloat16").generate(["a b c"], greedy)[0] for each in (file, folder)]
    assert texts[0].prompt_token_ids == texts[1].prompt_token_ids
    assert texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids


def test_models_are_made_once(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = Path(checkpoints.target)
    shape, _ = shape_of(source)
    first, changed = inflated_model(source, shape), inflated_model(source, shape, 0.1)
    made = (first / "config.json").stat().st_mtime_ns
    assert inflated_model(source, shape) == first != changed
    assert (first / "config.json").stat().st_mtime_ns == made
    assert shape_of(changed)[0] == shape


def test_the_oracle_drafts_runs_of_accepted_tokens() -> None:
    accepted = np.array([1.0, 1.0, 0.0, 1.0, 1.0])  # two and the target's own; one and the last
    assert oracle_seconds(accepted, COSTS, 4) == pytest.approx(12 + 11)
    assert oracle_seconds(np.zeros(3), COSTS, 4) == pytest.approx(30)
    assert oracle_seconds(np.zeros(3), COSTS, 4, batch=2) == pytest.approx(15)
