"""The production streams: independent, keyed, strict, and the same in every release."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from speculant.kernels import gumbel, reference
from speculant.lab.exactness import Branches, EnumeratingChance, enumerate_outcomes
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.params import SamplingParams
from speculant.sampling import Chance, KeyedChances, KeyedNoise, Purpose, Stream, choice, mix
from speculant.types import DraftTree, Request
from speculant.verification import Rejection
from tests.exactness.selection import slow_but

SIGMAS = 5
FINE = torch.ones(1 << 12)  # drawing from these tells the uniform to 12 bits
CHANCES = KeyedChances()


def request(seed: int, rounds: int = 0, shared_noise: bool = False, prompt: tuple[int, ...] = (0,)) -> Request:
    """Make a request with the fields that random streams read."""
    return Request(
        seq_id=1,
        request_id="r",
        index=0,
        prompt=prompt,
        params=SamplingParams(),
        seed=seed,
        end_token_ids=frozenset(),
        metrics=RequestMetrics(TimingMetrics(0.0)),
        shared_noise=shared_noise,
        tokens=list(prompt),
        rounds=rounds,
    )


def accept_bucket(make: Callable[[], Chance]) -> int:
    """Find the uniform number of a fresh chance's first `accept`, to 12 bits."""
    low, high = 0, len(FINE)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if make().accept(middle / len(FINE)) else (middle, high)
    return low


def assert_close(counts: Counter, distribution: dict, total: int) -> None:
    """Each observed frequency lies within five standard deviations of its probability."""
    assert set(counts) <= {key for key, probability in distribution.items() if probability > 0}
    for key, probability in distribution.items():
        sigma = math.sqrt(total * probability * (1 - probability))
        assert abs(counts[key] - total * probability) <= SIGMAS * sigma + 1e-9, (key, counts[key], total * probability)


def assert_unrelated(first: Iterable[int], second: Iterable[int]) -> None:
    """Two rows of uniforms are neither equal nor correlated."""
    a, b = torch.tensor(list(first)).double(), torch.tensor(list(second)).double()
    assert int((a == b).sum()) <= 2
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) <= SIGMAS / math.sqrt(len(a))


# --- keys


def test_every_key_is_its_own() -> None:
    keys = [mix(*key) for key in itertools.product(range(-20, 20), Purpose, range(40))]
    assert len(set(keys)) == len(keys)
    uniforms = [mix(key, count) for key in keys[:500] for count in range(1, 21)]
    assert len({*uniforms, *keys}) == len(uniforms) + len(keys)


def test_no_two_streams_draw_the_same_numbers() -> None:
    rows = {}
    for seed, rounds in itertools.product(range(12), range(6)):
        for name in ("draft", "verify"):
            stream = getattr(CHANCES, name)(request(seed, rounds))
            rows[seed, rounds, name] = tuple(stream.draw(FINE) for _ in range(4))
    assert len(set(rows.values())) == len(rows)
    uniforms = [value for row in rows.values() for value in row]
    assert_close(Counter(u // 512 for u in uniforms), dict.fromkeys(range(8), 1 / 8), len(uniforms))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_draft_acceptance_and_residual_are_unrelated(place: int) -> None:
    """The n-th number of each purpose, over many requests."""
    requests = [request(seed, place) for seed in range(250)]

    def later(chance: Chance) -> Chance:
        for _ in range(place):
            chance.accept(0.5)
        return chance

    drafts = [[chance.draw(FINE) for _ in range(place + 2)] for chance in map(CHANCES.draft, requests)]
    accepts = [accept_bucket(lambda r=r: later(CHANCES.verify(r))) for r in requests]
    residuals = []
    for each in requests:
        chance = later(CHANCES.verify(each))
        chance.accept(0.5)
        residuals.append(chance.draw(FINE))
    assert_unrelated(accepts, residuals)
    for count in range(place + 2):
        assert_unrelated(accepts, [row[count] for row in drafts])
        assert_unrelated(residuals, [row[count] for row in drafts])


def test_rounds_and_counts_are_unrelated() -> None:
    first, second = ([CHANCES.draft(request(seed, r)).draw(FINE) for seed in range(300)] for r in (0, 1))
    assert_unrelated(first, second)
    pairs = [(chance.draw(FINE), chance.draw(FINE)) for chance in (CHANCES.verify(request(s)) for s in range(300))]
    assert_unrelated(*zip(*pairs, strict=True))


# --- accept and draw


def test_accept_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(7, (Purpose.ACCEPT, Purpose.DRAW), 0)
    assert not any(stream.accept(0.0) for _ in range(200))
    assert all(stream.accept(1.0) for _ in range(200))
    monkeypatch.setattr(choice, "mix_in", lambda *values: 0)  # u = 0
    assert not stream.accept(0.0)
    assert stream.accept(1e-300)
    monkeypatch.setattr(choice, "mix_in", lambda *values: 2**64 - 1)  # the largest u
    assert stream.accept(1.0)
    assert not stream.accept(1 - 1e-15)


@pytest.mark.parametrize("bits", [0, 1 << 11, 1 << 63, 2**64 - 1])
def test_no_draw_without_weight(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    stream = Stream(0, (Purpose.ACCEPT, Purpose.DRAW), 0)
    monkeypatch.setattr(choice, "mix_in", lambda *values: bits)
    for weights in ([0, 0.3, 0, 0.1, 0], [0, 0, 1e-300], [1e-300, 0], [0, 0.1, 0.2, 0.3, 0], [0, 0, 3, 0]):
        assert weights[stream.draw(torch.tensor(weights, dtype=torch.float64))] > 0


@pytest.mark.parametrize("weights", slow_but([[0, 3, 0, 1]], [[0.1, 0.2, 0.7], [0, 3, 0, 1], [1e-3, 1, 1]]))
def test_draws_follow_their_weights(weights: list[float]) -> None:
    distribution = {token: weight / sum(weights) for token, weight in enumerate(weights)}
    chances = [CHANCES.verify(request(seed)) for seed in range(2000)]
    for _ in range(2):
        assert_close(Counter(chance.draw(torch.tensor(weights)) for chance in chances), distribution, len(chances))


@pytest.mark.parametrize("probability", slow_but([0.01, 0.5], [0.01, 0.5, 0.9]))
def test_accept_follows_its_probability(probability: float) -> None:
    chances = [CHANCES.verify(request(seed)) for seed in range(5000)]
    for _ in range(2):
        counts = Counter(chance.accept(probability) for chance in chances)
        assert_close(counts, {True: probability, False: 1 - probability}, len(chances))


# --- the real rule on the real streams

P = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.3, 0.5], [0.7, 0.2, 0.1]], dtype=torch.float64)


def speculate(draft: Chance, verify: Chance, length: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Draft from Q and verify against P; return drafts, accepted nodes and the token after them."""
    tokens = [draft.draw(q) for q in Q[:length]]
    verdict = Rejection().verify(DraftTree.chain(tokens, Q[:length]), P[: length + 1], verify)
    return tuple(tokens), verdict.path, verdict.token


@pytest.mark.parametrize(("length", "total"), [(1, 4_000), pytest.param(2, 8_000, marks=pytest.mark.slow)])
def test_rejection_on_keyed_streams(length: int, total: int) -> None:
    """Drafts, acceptance and residual draws are jointly as probable as enumeration says."""

    def run(branches: Branches) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        chance = EnumeratingChance(branches)
        return speculate(chance, chance, length)

    distribution = enumerate_outcomes(run)
    requests = [request(mix(seed), rounds=seed % 3) for seed in range(total)]
    counts = Counter(speculate(CHANCES.draft(r), CHANCES.verify(r), length) for r in requests)
    assert_close(counts, distribution, total)
    first = Counter(dict.fromkeys(range(3), 0))
    for (drafts, path, token), count in counts.items():
        first[drafts[0] if path else token] += count
    assert_close(first, dict(enumerate(P[0].tolist())), total)


# --- keyed noise


def test_noise_belongs_to_a_position() -> None:
    weights = torch.tensor([0.2, 0.5, 0.3, 0.0])
    walk = KeyedNoise(5, 10)
    assert [walk.draw(weights) for _ in range(20)] == [KeyedNoise(5, 10 + i).draw(weights) for i in range(20)]


def test_a_request_draws_by_its_length_whatever_the_round() -> None:
    weights = torch.ones(64)
    by_round = {CHANCES.verify(request(3, r, shared_noise=True)).draw(weights) for r in range(5)}
    assert len(by_round) == 1
    assert CHANCES.draft(request(3, shared_noise=True)).draw(weights) in by_round  # on shared noise: the same noise
    by_length = {CHANCES.verify(request(3, shared_noise=True, prompt=(0,) * n)).draw(weights) for n in range(1, 9)}
    assert len(by_length) > 4


def test_noise_belongs_to_a_token() -> None:
    everything = gumbel(mix(1, 2), torch.arange(1000))
    some = torch.tensor([3, 999, 0, 512])
    assert torch.equal(gumbel(mix(1, 2), some), everything[some])
    assert len(everything.unique()) == 1000


def test_noise_is_gumbel() -> None:
    noise = torch.cat([gumbel(mix(9, position), torch.arange(500)) for position in range(40)])
    uniforms = (-(-noise).exp()).exp()
    counts = Counter((uniforms * 20).long().tolist())
    assert_close(counts, dict.fromkeys(range(20), 1 / 20), len(noise))
    assert abs(float(noise.mean()) - 0.5772156649) < SIGMAS * math.pi / math.sqrt(6 * len(noise))


def test_noise_of_neighbours_is_unrelated() -> None:
    def row(seed: int, position: int) -> Tensor:
        return gumbel(mix(seed, Purpose.NOISE, position), torch.arange(4000))

    rows = torch.stack([row(0, 0), row(0, 1), row(1, 0), row(1, 1), row(0, 0).roll(1)])
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(correlation.abs().max()) <= SIGMAS / math.sqrt(rows.shape[1])


@pytest.mark.parametrize("weights", slow_but([[0, 3, 0, 1]], [[0.1, 0.2, 0.7], [0, 3, 0, 1]]))
def test_noise_draws_follow_their_weights(weights: list[float]) -> None:
    distribution = {token: weight / sum(weights) for token, weight in enumerate(weights)}
    noise, total = KeyedNoise(11, 0), 3000
    assert_close(Counter(noise.draw(torch.tensor(weights)) for _ in range(total)), distribution, total)


ZEROS = ([0.5, 0.5, 0], [0, 0.5, 0.5])


@pytest.mark.parametrize(("p", "q"), slow_but([ZEROS], [*zip(P.tolist(), Q.tolist(), strict=False), ZEROS]))
def test_coupled_draws_agree_often(p: list[float], q: list[float]) -> None:
    total = 2000
    target, draft = KeyedNoise(4, 0), KeyedNoise(4, 0)
    same = sum(target.draw(torch.tensor(p)) == draft.draw(torch.tensor(q)) for _ in range(total))
    distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    bound = (1 - distance) / (1 + distance)
    assert same / total >= bound - SIGMAS * math.sqrt(bound * (1 - bound) / total)


def test_equal_distributions_always_agree() -> None:
    distribution = torch.tensor([0.2, 0.5, 0.3])
    target, draft = KeyedNoise(4, 0), KeyedNoise(4, 0)
    assert [target.draw(distribution) for _ in range(50)] == [draft.draw(distribution.float()) for _ in range(50)]


def test_a_tie_goes_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "gumbel", lambda key, tokens: torch.zeros(len(tokens), dtype=torch.float64))
    assert KeyedNoise(0, 0).draw(torch.tensor([0, 0.25, 0.5, 0, 0.5])) == 2


def test_noise_refuses_a_ratio_test() -> None:
    with pytest.raises(TypeError, match="ratio test"):
        KeyedNoise(0, 0).accept(0.5)


# --- a seed's text never changes: these values are part of the contract


def test_known_hashes() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF  # splitmix64's first output from state 0
    assert mix(1, 2, 3) == 0xD0734750FDE362B3
    assert mix(-1) == mix(2**64 - 1) == 0xE4D971771B652C20


def test_known_draws() -> None:
    weights = torch.tensor([0.1, 0.4, 0.2, 0.3])
    draft, verify = CHANCES.draft(request(42)), CHANCES.verify(request(42))
    shared_noise = CHANCES.verify(request(42, shared_noise=True))
    assert [draft.draw(weights) for _ in range(12)] == [3, 1, 2, 3, 2, 1, 3, 3, 1, 3, 1, 3]
    assert [verify.accept(0.5) for _ in range(6)] == [False, False, False, False, True, False]
    assert [verify.draw(weights) for _ in range(12)] == [2, 0, 1, 1, 3, 0, 1, 3, 1, 1, 0, 1]
    assert [shared_noise.draw(weights) for _ in range(12)] == [3, 1, 3, 2, 0, 1, 3, 1, 1, 0, 2, 3]


def test_known_noise() -> None:
    known = [1.021890215932467, -0.06688648963940354, -0.8928874315271732]
    assert gumbel(mix(42), torch.tensor([0, 1, 128_000])).tolist() == pytest.approx(known, rel=1e-14)
