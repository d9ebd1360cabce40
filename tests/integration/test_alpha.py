"""Alpha of the embedded pair: by the models' distributions, by acceptance, and by the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from speculant.config import EngineConfig
from speculant.lab.bench import (
    Alpha,
    Candidate,
    Estimate,
    WorkloadConfig,
    estimate,
    load_pair,
    make_workload,
    measure_alpha,
    pooled,
    write_texts,
)
from speculant.lab.theory import correlated_tokens
from speculant.metrics import SpeculationMetrics
from speculant.models import Checkpoint
from speculant.params import SamplingParams
from tests.models import Checkpoints

pytestmark = pytest.mark.slow

PROMPTS, TOKENS, LENGTH = 24, 64, 5
WIDER = 3.29 / 1.96  # two-sided normal quantiles


@pytest.fixture(scope="module")
def pair() -> tuple[Checkpoint, Candidate]:
    """The embedded pair, whose draft has its own type."""
    target, [draft, *_] = load_pair(EngineConfig("demo", "demo"))
    return target, draft


@pytest.fixture(scope="module", params=[0.0, 0.5, 1.0])
def measured(request: pytest.FixtureRequest, pair: tuple[Checkpoint, Candidate]) -> tuple[float, Alpha]:
    """A temperature, and the figures measured at it."""
    target, draft = pair
    workload = make_workload(WorkloadConfig(num_prompts=PROMPTS), draft.runtime, PROMPTS)
    params = SamplingParams(temperature=request.param, max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True)
    return request.param, measure_alpha(target, draft, workload, params, LENGTH)


def test_both_estimates_of_alpha_agree(measured: tuple[float, Alpha]) -> None:
    """The mean of sum min(p, q) is what `rejection` accepts of what it tests (arXiv 2211.17192, section 4.2)."""
    _, found = measured
    assert found.accepted is not None
    assert found.overlap.tokens == PROMPTS * (TOKENS - 1)
    assert _agree(found.overlap, found.accepted), found
    assert all(0.5 < each.mean < 0.95 for each in (found.overlap, found.accepted))
    assert found.overlap.high - found.overlap.low < 0.15


def test_tokens_per_pass_are_those_of_the_formula(measured: tuple[float, Alpha]) -> None:
    """Greedy texts are the same, so that passes are exact; sampled ones differ by chance, as both rates do."""
    temperature, found = measured
    assert temperature or found.tokens_per_pass == pytest.approx(found.expected_per_pass, rel=1e-12)
    assert found.accepted is not None
    low, high = (correlated_tokens(rate, found.correlation, LENGTH)[LENGTH] for rate in _ends(found))
    assert 0.95 * low <= found.tokens_per_pass <= 1.05 * high


def _agree(one: Estimate, other: Estimate) -> bool:
    """Whether two estimates differ by no more than their intervals of 95% allow, widened so that 99.9% do."""
    widths = [(each.high - each.low) / 2 for each in (one, other)]
    return abs(one.mean - other.mean) <= WIDER * math.hypot(*widths)


def _ends(found: Alpha) -> tuple[float, float]:
    assert found.accepted is not None
    return min(found.overlap.low, found.accepted.low), max(found.overlap.high, found.accepted.high)


def test_pair_of_equal_models_accepts_everything(checkpoints: Checkpoints) -> None:
    target, [draft] = load_pair(EngineConfig(checkpoints.target, checkpoints.target, dtype="float64"))
    workload = make_workload(WorkloadConfig(num_prompts=2), draft.runtime, 2)
    found = measure_alpha(target, draft, workload, SamplingParams(temperature=0.8, max_tokens=25, min_tokens=25), 3)
    assert found.overlap.mean == pytest.approx(1.0)
    assert found.accepted is not None
    assert found.accepted.mean == 1.0
    assert found.tokens_per_pass == found.expected_per_pass == 4.0
    assert found.correlation == 0.0


def test_sampling_setting_changes_alpha(checkpoints: Checkpoints) -> None:
    target, [draft] = load_pair(EngineConfig(checkpoints.target, checkpoints.far, dtype="float64"))
    workload = make_workload(WorkloadConfig(num_prompts=4), draft.runtime, 4)
    settings = [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 3.0}]
    means = []
    for own in settings:
        params = SamplingParams(max_tokens=20, **own)
        found = draft.acceptance(target, write_texts(draft.runtime, workload, params), params)
        means.append(np.mean([each.overlap.mean() for each in found]))
    assert len({round(float(mean), 6) for mean in means}) == 3


def test_pooled_rate_counts_what_was_tested() -> None:
    metrics = SpeculationMetrics()
    for drafted, accepted, tested in ((5, 3, 4), (5, 5, 5), (5, 2, 2), (4, 0, 1)):
        metrics.record(drafted, accepted, tested)
    found = pooled([metrics])
    assert found is not None
    assert (found.mean, found.tokens) == (pytest.approx(metrics.acceptance_rate), 12)
    assert found == estimate([np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0.0])])
    assert pooled([SpeculationMetrics()]) is pooled([]) is None
