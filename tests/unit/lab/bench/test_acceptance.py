"""Acceptance along a text, and the interval of its mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculant.kernels import REFERENCE
from speculant.lab.bench import BLOCK, Text, TextReader, compare_probs, estimate, measure_acceptance
from speculant.models import load_model
from speculant.params import SamplingParams
from tests.models import Checkpoints

TEXT = Text([65, 66, 67, 68], [70, 80, 90, 100, 72])
SAMPLED = SamplingParams(temperature=0.7, top_k=20)


def make_reader(folder: str) -> TextReader:
    model = load_model(folder, "float64").model
    return TextReader(model, REFERENCE, model.vocab_size)


def test_overlap_and_ratio_at_the_output_token() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8], [0.0, 1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4], [0.0, 0.0, 1.0]], dtype=torch.float64)
    found = compare_probs(p, q, [0, 2, 1])
    assert found.overlap == pytest.approx([0.6, 0.6, 0.0])
    assert found.given == pytest.approx([0.2, 0.5, 0.0])


def test_greedy_acceptance_is_the_match_rate() -> None:
    p = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 3]]
    q = torch.eye(4, dtype=torch.float64)[[0, 1, 3, 3]]
    found = compare_probs(p, q, [0, 1, 2, 3])
    assert found.overlap.tolist() == found.given.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_near_tie_counts_by_the_output() -> None:
    p, q = torch.eye(3, dtype=torch.float64)[[0, 0]], torch.eye(3, dtype=torch.float64)[[1, 2]]
    assert compare_probs(p, q, [1, 1]).given.tolist() == [1.0, 0.0]


def test_model_accepts_its_own_text(checkpoints: Checkpoints) -> None:
    reader = make_reader(checkpoints.target)
    [found] = measure_acceptance(reader, reader, [TEXT], SamplingParams(temperature=0.7))
    assert found.given == pytest.approx(np.ones(4)), "the first token is never drafted"
    assert found.overlap == pytest.approx(np.ones(4))


def test_text_is_the_same_in_parts(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row t is the distribution after all earlier tokens, in one pass or in several."""
    reader = make_reader(checkpoints.target)
    whole = reader.distributions(TEXT, SAMPLED)
    for end in range(1, 6):
        alone = reader.distributions(Text([*TEXT.prompt, *TEXT.output[: end - 1]], [7]), SAMPLED)
        assert torch.allclose(whole[end - 1], alone[0], atol=1e-12)
    monkeypatch.setattr("speculant.lab.bench.pair.CHUNK", 3)
    assert torch.allclose(reader.distributions(TEXT, SAMPLED), whole, atol=1e-12)


def test_other_model_accepts_less(checkpoints: Checkpoints) -> None:
    target = make_reader(checkpoints.target)
    means = [
        measure_acceptance(target, make_reader(folder), [TEXT], SAMPLED)[0].overlap.mean()
        for folder in (checkpoints.near, checkpoints.far)
    ]
    assert 1 > means[0] > means[1] > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("rate", [0.7, 0.95])
def test_interval_covers_the_rate(rate: float, correlated: bool) -> None:
    """About 95% of 400 intervals cover the rate; tokens in equal pairs carry half of the information."""
    rng = np.random.default_rng(1)
    covered, widths = 0, []
    for _ in range(400):
        tokens = (rng.random(256 if correlated else 512) < rate).astype(float)
        found = estimate(np.split(np.repeat(tokens, 2) if correlated else tokens, 8))
        covered += found.low <= rate <= found.high
        widths.append(found.high - found.low)
    assert 0.91 <= covered / 400 <= 0.985
    independent = 2 * 1.96 * np.sqrt(rate * (1 - rate) / 512)
    assert np.median(widths) == pytest.approx(independent * (np.sqrt(2) if correlated else 1), rel=0.2)


def test_interval_of_a_certain_rate_is_not_a_point() -> None:
    sure = estimate([np.ones(4 * BLOCK)])
    assert (sure.mean, sure.high, sure.tokens) == (1.0, pytest.approx(1.0), 64)
    assert 0.3 < sure.low < 0.9
    short = estimate([np.array([1.0, 0.0, 1.0])])
    assert short.low < 0.3 < 0.9 < short.high


@pytest.mark.slow
def test_many_texts_are_compared_as_a_whole() -> None:
    """If texts differ from one another, their blocks are not independent observations."""
    rng = np.random.default_rng(2)
    covered, by_blocks = 0, 0
    for _ in range(300):
        rates = rng.choice([0.5, 0.9], 24)
        texts = [(rng.random(64) < rate).astype(float) for rate in rates]
        found = estimate(texts)
        covered += found.low <= 0.7 <= found.high
        joined = estimate([np.concatenate(texts)])
        by_blocks += joined.low <= 0.7 <= joined.high
    assert 0.91 <= covered / 300 <= 0.985
    assert by_blocks / 300 < 0.85


def test_rounding_is_not_variance() -> None:
    nearly = estimate([np.ones(40) - 1e-16, np.ones(40)])
    assert (nearly.mean, nearly.high) == (pytest.approx(1.0), pytest.approx(1.0))
    assert nearly.low < 0.9
