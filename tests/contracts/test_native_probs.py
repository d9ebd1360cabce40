"""Native probs and draws on every instruction set here equal the reference's, with the same bits in any batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from speculant.kernels import NO_TOKEN, NativeSampler, ReferenceSampler, RowDraw
from speculant.params import SamplingParams
from speculant.sampling import KeyedNoise, Node, Purpose, Stream, distribution, mix, mix_in
from tests.examples import examples
from tests.models import make_request
from tests.native import SETS, needs_kernels, on

pytestmark = needs_kernels
TINY = 1e-300  # below it a share may as well be none
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 4095, 4096, 4097, 9000]))
STEPS = st.sampled_from([0.0, 0.5])
DISTRIBUTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 50, 100_000]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.5, 0.95]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-30, 0.05, 1.0]),
    }
)


@pytest.fixture(params=[(isa, threads) for isa in SETS for threads in (1, 2)], ids=lambda key: f"{key[0]}-{key[1]}")
def kernels(request: pytest.FixtureRequest) -> NativeSampler:
    return NativeSampler(on(*request.param))


def nodes_of(*distributions: dict[str, float]) -> list[Node]:
    return [Node(make_request([1], params=SamplingParams(**distribution))) for distribution in distributions]  # type: ignore[arg-type]


def random_logits(rows: int, vocab_size: int, seed: int, step: float = 0.0, scale: float = 3.0) -> Tensor:
    """Return random logits; with a step many of them are equal."""
    logits = scale * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    return (logits / step).round() * step if step else logits


@settings(max_examples=examples(150))
@given(distributions=st.lists(DISTRIBUTIONS, min_size=1, max_size=4), size=SIZES, seed=st.integers(0, 999), step=STEPS)
@pytest.mark.parametrize("isa", SETS)
def test_distributions_are_the_reference(
    isa: str, distributions: list[dict[str, float]], size: int, seed: int, step: float
) -> None:
    logits, nodes = random_logits(len(distributions), size, seed, step), nodes_of(*distributions)
    expected, found = distribution(logits, nodes), distribution(logits, nodes, NativeSampler(on(isa)))
    assert torch.equal(found > TINY, expected > TINY)
    assert torch.allclose(found, expected, rtol=1e-12, atol=TINY)


MIXED = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.5, "min_p": 0.1},
]  # fmt: skip


def test_a_distribution_never_sees_its_neighbours(kernels: NativeSampler) -> None:
    logits, nodes = random_logits(60, 5000, seed=1), nodes_of(*MIXED * 10)
    together = distribution(logits, nodes, kernels)
    for first, rows in ((0, 1), (1, 1), (2, 1), (3, 2), (7, 5), (20, 17), (1, 59)):
        alone = distribution(logits[first : first + rows], nodes[first : first + rows], kernels)
        assert torch.equal(alone, together[first : first + rows])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_stays_in_its_row(kernels: NativeSampler, bad: float) -> None:
    logits, nodes = random_logits(6, 5000, seed=1), nodes_of(*MIXED)
    clean = distribution(logits, nodes, kernels)
    for row in range(6):
        dirty = logits.clone()
        dirty[row, 17] = bad
        found = distribution(dirty, nodes, kernels)
        others = [other for other in range(6) if other != row]
        assert torch.equal(found[others], clean[others])
        assert 0 <= kernels.draw(found[row], True, 5) < 5000
        assert 0 <= kernels.draw(found[row], False, 5 << 60) < 5000


@pytest.mark.parametrize("size", [7, 64, 4097, 9000])
def test_rows_without_a_distribution_are_the_reference(kernels: NativeSampler, size: int) -> None:
    """No possible token: zeros. A score that is no number, wherever it is: NaN."""
    logits, nodes = random_logits(24, size, seed=3), nodes_of(*MIXED * 4)
    logits[:6] = -math.inf
    logits[torch.arange(6, 12), torch.tensor([0, 5, size - 1, size // 2, 3, 1])] = math.nan
    logits[torch.arange(12, 18), torch.tensor([1, 0, size // 2, size - 1, 3, 5])] = math.inf
    expected, found = distribution(logits, nodes), distribution(logits, nodes, kernels)
    assert torch.equal(expected.sum(-1).isnan(), torch.arange(24).ge(6) & torch.arange(24).lt(18))
    assert torch.equal(found.isnan(), expected.isnan())
    assert bool(found[6:18].isnan().all())
    assert not bool(found[:6].any())
    assert torch.allclose(found[18:], expected[18:], rtol=1e-12, atol=TINY)


def test_forbidden_tokens_have_no_share(kernels: NativeSampler) -> None:
    logits, nodes = random_logits(6, 5000, seed=2), nodes_of(*MIXED)
    logits[:, ::3] = -math.inf
    distributions = distribution(logits, nodes, kernels)
    assert not bool((distributions[:, ::3] > 0).any())
    assert torch.allclose(distributions.sum(-1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(max_examples=examples(150))
@given(size=SIZES, seed=st.integers(0, 9999), zeros=st.sampled_from([0.0, 0.5, 0.99]))
@pytest.mark.parametrize("isa", SETS)
def test_draws_are_the_reference(isa: str, size: int, seed: int, zeros: float) -> None:
    """The same hash, the same noise, the same order: the same token, alone or many ahead."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(size, generator=generator, dtype=torch.float64) ** 8
    weights[torch.rand(size, generator=generator) < zeros] = 0.0
    weights[seed % size] = 0.5
    native = NativeSampler(on(isa, 1))
    noise, streams = KeyedNoise(seed, 3), Stream(seed, (Purpose.ACCEPT, Purpose.DRAW), 1)
    expected = [source.draw(weights) for source in (noise, noise, streams, streams)]
    noise, streams = KeyedNoise(seed, 3, native), Stream(seed, (Purpose.ACCEPT, Purpose.DRAW), 1, native)
    assert [source.draw(weights) for source in (noise, noise, streams, streams)] == expected
    ahead = [KeyedNoise(seed, 3).take_keys(2), Stream(seed, (Purpose.ACCEPT, Purpose.DRAW), 1).take_keys(2)]
    keys = [mix_in(key, count + draw) for key, count in ahead for draw in range(2)]
    shared_noise = [True, True, False, False]
    assert [native.draw(weights, *draw) for draw in zip(shared_noise, keys, strict=True)] == expected


@pytest.mark.parametrize("size", [1, 5, 4097, 30000])
def test_draws_from_many_rows_are_single_ones(kernels: NativeSampler, size: int) -> None:
    """The token of each alone, in any order of rows; none from a row that is not a distribution."""
    weights = torch.rand(9, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) ** 4
    weights[2], weights[5] = 0.0, torch.nan
    draws = [RowDraw(row, shared, mix(row, size)) for row in (8, 2, 0, 5, 3, 3, 7) for shared in (True, False)]
    alone = [kernels.draw(weights[row], shared, key) for row, shared, key in draws]
    expected = [NO_TOKEN if draw.row in (2, 5) else token for draw, token in zip(draws, alone, strict=True)]
    assert kernels.draw_rows(weights, draws) == expected
    assert ReferenceSampler().draw_rows(weights, draws) == expected


@pytest.mark.parametrize("size", [1, 5, 4096, 9001])
def test_normalised_weights_are_the_reference(kernels: NativeSampler, size: int) -> None:
    weights = torch.rand(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    expected = weights.clone() / weights.sum()
    torch.testing.assert_close(kernels.normalise(weights), expected, rtol=1e-13, atol=0)
    assert not bool(kernels.normalise(torch.zeros(size, dtype=torch.float64)).sum() > 0), "no token is possible"


@pytest.mark.parametrize("size", [1, 5, 4097])
def test_the_last_draw_is_a_token_with_weight(kernels: NativeSampler, size: int) -> None:
    weights = torch.zeros(size + 4, dtype=torch.float64)
    weights[:size] = 0.1
    assert kernels.draw(weights, False, (1 << 64) - 1) == size - 1
    assert kernels.draw(weights, False, 0) == 0
    weights[0] = 0.0
    assert kernels.draw(weights, False, 0) == (1 if size > 1 else 0)


def test_equal_weights_race_by_the_noise_alone(kernels: NativeSampler) -> None:
    """Two distributions over the same tokens take the same token unless the weights say otherwise."""
    weights = torch.full((9000,), 1 / 9000, dtype=torch.float64)
    drawn = [kernels.draw(weights * scale, True, key) for key in range(20) for scale in (1.0, 1e-3)]
    assert drawn[::2] == drawn[1::2]
    assert len(set(drawn)) > 15
