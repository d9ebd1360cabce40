"""Models that are made for measurements: decoded GGUF files, kept folders; and the oracles' time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculant import LLM, SamplingParams
from speculant.cache import slotted_cache
from speculant.errors import ModelError
from speculant.lab.bench import LengthCosts, calibrated, oracle_seconds
from speculant.lab.inflation import decoded_model, inflated_model, rescaled_model, shape_of, write_rescaled
from speculant.models import SequenceInput, build_batch, load_model
from speculant.types import DraftTree
from tests.gguf_models import convert
from tests.models import Checkpoints, Shape, write_checkpoint

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


def logits(folder: Path) -> Tensor:
    model = load_model(str(folder), "float64").model
    cache = slotted_cache(model.cache_shape, 1, 40)
    batch = build_batch([SequenceInput(1, [*range(40, 80)], DraftTree.empty())], cache, torch.device("cpu"))
    with torch.inference_mode():
        return model.logits(model.forward(batch, cache.storage).last).clone()


@pytest.mark.parametrize("tied", [False, True])
def test_a_rescaled_model_computes_the_same_function(tmp_path: Path, tied: bool) -> None:
    source, made = Path(write_checkpoint(tmp_path / "source", Shape(tied=tied))), tmp_path / "made"
    made.mkdir()
    write_rescaled(source, made, torch.float64)
    torch.testing.assert_close(logits(made), logits(source), rtol=0, atol=1e-10)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, made))
    for name, tensor in after.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor))
        elif name in before and "embed" not in name:
            columns = (tensor / before[name])[0]
            assert columns.std() > 0.05 * columns.mean(), name


def test_a_rescaled_model_is_kept_in_bfloat16(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = Path(checkpoints.target)
    made = rescaled_model(source)
    assert made == rescaled_model(source)
    assert load_model(str(made)).dtype == torch.bfloat16
    assert float((logits(made) - logits(source)).abs().max()) < 0.1 * float(logits(source).std())


def test_only_llama_models_are_rescaled(tmp_path: Path) -> None:
    source = Path(write_checkpoint(tmp_path / "source", Shape("gemma2")))
    with pytest.raises(ModelError, match="no Llama model"):
        write_rescaled(source, tmp_path)


def test_the_oracle_drafts_runs_of_accepted_tokens() -> None:
    accepted = np.array([1.0, 1.0, 0.0, 1.0, 1.0])  # two and the target's own; one and the last
    assert oracle_seconds(accepted, COSTS, 4) == pytest.approx(12 + 11)
    assert oracle_seconds(np.zeros(3), COSTS, 4) == pytest.approx(30)
    assert oracle_seconds(np.zeros(3), COSTS, 4, batch=2) == pytest.approx(15)


def brute_seconds(acceptance: Sequence[float], steps: Sequence[float]) -> float:
    """Return the least expected time over all choices of a length for each place, by all outcomes of all places."""
    end, least = len(acceptance), float("inf")
    for chosen in itertools.product(*(range(min(len(steps), end - place)) for place in range(end))):
        expected = 0.0
        for marks in itertools.product((0, 1), repeat=end):
            place, seconds = 0, 0.0
            while place < end:
                drafted = marks[place : place + chosen[place]]
                seconds += steps[chosen[place]]
                place += 1 + (drafted.index(0) if 0 in drafted else len(drafted))
            expected += seconds * float(np.prod([a if m else 1 - a for a, m in zip(acceptance, marks, strict=True)]))
        least = min(least, expected)
    return least


@pytest.mark.parametrize("seed", range(6))
def test_an_oracle_of_probabilities_chooses_the_best_lengths(seed: int) -> None:
    generator = np.random.default_rng(seed)
    acceptance, costs = generator.random(5), generator.uniform(0, 4, 4).cumsum()  # a longer step is no faster
    drawn = LengthCosts((0, 1, 2, 3), np.zeros(4), 3 + costs)
    assert oracle_seconds(acceptance, drawn, 3) == pytest.approx(brute_seconds(acceptance, 3 + costs))
    outcomes = (acceptance > 0.5).astype(float)
    assert oracle_seconds(outcomes, drawn, 3) == pytest.approx(brute_seconds(outcomes, 3 + costs))


def test_tokens_of_one_confidence_have_their_share() -> None:
    confidence = np.repeat([0.2, 0.9, 1.0], [40, 40, 200])
    accepted = np.concatenate([np.arange(40) < 10, np.arange(40) < 30, np.arange(200) < 190]).astype(float)
    shares = calibrated(confidence, accepted)
    assert sorted({*shares[80:]}) == [0.95]
    assert shares[:80].mean() == pytest.approx(0.5)
    assert shares[0] < shares[79]
    assert calibrated(confidence[:5], accepted[:5]) == pytest.approx(1)  # too few for two bins
