"""The adaptive length on simulated engines: never slower than plain decoding, and close to the best fixed length."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from speculant.drafting import DrafterNeeds
from speculant.lengths import (
    LONGEST,
    LONGEST_ALONE,
    Adaptive,
    CostCurve,
    DraftLength,
    DraftOutcome,
    Fixed,
    KeyCosts,
    MethodAcceptance,
    ScoredDraft,
    StepCosts,
)
from speculant.metrics import StepTiming
from speculant.params import SamplingParams
from speculant.scheduling import Schedule, Scheduled
from speculant.types import DraftPrice, Request
from tests.models import make_request
from tests.simulation import LONG, World, outcome_of

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128)
DEPTHS, LENGTHS = (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8, 12)
STEPS = 400


def pass_s(rows: int) -> float:
    """Cost a little more for each row, and a lot more from the ninth on."""
    return 1.0 + 0.02 * (rows - 1) + (0.3 if rows > 8 else 0.0)


@dataclass(frozen=True)
class Setting:
    alpha: Callable[[int], float]
    token_s: float
    score: Callable[[float], float] | None = None
    look_ahead_rows: int = 0

    def world(self, seed: int = 0, **own: Any) -> World:
        return World(
            pass_s,
            self.token_s,
            self.alpha,
            self.score,
            noise=0.1,
            seed=seed,
            look_ahead_rows=self.look_ahead_rows,
            **own,
        )

    def adaptive(self, selects: bool = False, price: DraftPrice | None = None) -> Adaptive:
        drafts = {count: CostCurve({depth: depth * self.token_s for depth in DEPTHS}) for count in (1, 8)}
        costs = StepCosts(CostCurve({rows: pass_s(rows) for rows in ROWS}), {"some": drafts})
        return Adaptive(
            16,
            costs,
            lambda method: DrafterNeeds(target_inputs=self.look_ahead_rows, selects=selects, stops=price is not None),
            lambda method: price,
        )


USELESS = {
    "random": Setting(lambda place: 0.0, 0.03),
    "as large as the target": Setting(lambda place: 1.0, 1.0),
    "costs more than it gains": Setting(lambda place: 0.3, 0.3),
    "scores that promise too much": Setting(lambda place: 0.0, 0.0005, lambda alpha: 0.9),
    "rows of its own": Setting(lambda place: 0.1, 0.001, look_ahead_rows=3),
}
GOOD = {
    "good": Setting(lambda place: 0.85, 0.03),
    "fair": Setting(lambda place: 0.6, 0.1),
    "poor": Setting(lambda place: 0.3, 0.1),
}
CHANGING = {
    "good and bad passages": Setting(lambda place: 0.9 if (place // 150) % 2 else 0.1, 0.05),
    "short repetitions": Setting(lambda place: 0.95 if place % 25 > 15 else 0.1, 0.0005, lambda alpha: round(alpha, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", USELESS)
def test_adaptive_is_never_slower_than_plain(name: str, batch: int) -> None:
    plain = USELESS[name].world().run(Fixed(0), batch, STEPS)
    assert USELESS[name].world().run(USELESS[name].adaptive(), batch, STEPS) >= 0.97 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "share"), [(1, 0.97), (4, 0.93)])
@pytest.mark.parametrize("name", GOOD)
def test_adaptive_reaches_the_best_fixed_length(name: str, batch: int, share: float) -> None:
    """Over several runs: a few unlucky drafts at the beginning cost one run a tenth of its time."""
    setting, seeds = GOOD[name], range(12)

    def speed(make: Callable[[], DraftLength]) -> float:
        return sum(setting.world(seed).run(make(), batch, STEPS) for seed in seeds)

    assert speed(setting.adaptive) >= share * max(speed(partial(Fixed, length)) for length in LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGING)
def test_adaptive_follows_a_changing_text(name: str) -> None:
    """Over several runs: in one, a trial that comes late costs as much as all lengths differ."""
    setting, ratios = CHANGING[name], list[float]()
    for seed in range(12):
        best = max(setting.world(seed).run(Fixed(length), 1, STEPS) for length in LENGTHS)
        ratios.append(setting.world(seed).run(setting.adaptive(), 1, STEPS) / best)
    assert sum(ratios) / len(ratios) >= 0.97


def test_adaptive_returns_when_drafts_become_good() -> None:
    setting = Setting(lambda place: 0.0 if place < 300 else 0.9, 0.03)
    late = setting.world().run(setting.adaptive(), 1, 700)
    assert late >= 1.5 * setting.world().run(Fixed(0), 1, 700)


@pytest.mark.parametrize("batch", [1, 4])
def test_adaptive_finds_the_length_of_look_ahead_rows(batch: int) -> None:
    """Each step without drafts costs one more, in which the rows are computed that the next draft comes from."""
    setting = Setting(lambda place: 0.8, 0.001, look_ahead_rows=3)
    best = max(setting.world().run(Fixed(length), batch, STEPS) for length in (1, 2, 3))
    assert setting.world().run(setting.adaptive(), batch, STEPS) >= 0.93 * best


def test_adaptive_returns_to_drafts_from_look_ahead_rows() -> None:
    """A trial takes two steps: one computes the rows that the other drafts from."""
    setting = Setting(lambda place: 0.0 if place < 300 else 0.95, 0.001, look_ahead_rows=3)
    assert setting.world().run(setting.adaptive(), 1, 900) >= 1.2 * setting.world().run(Fixed(0), 1, 900)


def test_adaptive_learns_from_costs_that_were_wrong() -> None:
    setting = Setting(lambda place: 0.5, 0.1)
    drafts = {1: CostCurve({depth: 0.001 * depth for depth in DEPTHS})}
    wrong = Adaptive(16, StepCosts(CostCurve({1: 1.0, 64: 1.0}), {"some": drafts}))
    best = max(setting.world().run(Fixed(length), 1, STEPS) for length in LENGTHS)
    assert setting.world().run(wrong, 1, STEPS) >= 0.85 * best


@pytest.mark.slow
def test_adaptive_recovers_from_costs_of_a_busy_machine() -> None:
    """Passes of some rows looked six times as slow as they are, and longer ones fourteen times."""
    setting = Setting(lambda place: 0.85, 0.05)
    drafts = {1: CostCurve({depth: 0.05 * depth for depth in DEPTHS})}
    busy = CostCurve({rows: 1.0 if rows < 3 else 6.0 if rows < 9 else 14.0 for rows in ROWS})
    best = max(setting.world().run(Fixed(length), 1, 3000) for length in LENGTHS)
    assert setting.world().run(Adaptive(16, StepCosts(busy, {"some": drafts})), 1, 3000) >= 0.75 * best


@pytest.mark.parametrize("score", [None, lambda alpha: round(alpha, 1)])
def test_adaptive_counts_the_cost_of_rows_after_a_long_text(score: Callable[[float], float] | None) -> None:
    """A further row takes 0.02 of a pass after a short text, and 0.27 after this one: from the first steps on."""
    world = partial(World, pass_s, 0.001, lambda place: 0.5, score, noise=0.1, prompt=2500, key_s=lambda m: 1e-4 * m)
    plain = world().run(Fixed(0), 1, 40)
    best = max(world().run(Fixed(length), 1, 40) for length in LENGTHS)
    drafts = {1: CostCurve({depth: 0.001 * depth for depth in DEPTHS})}
    costs = StepCosts(CostCurve({rows: pass_s(rows) for rows in ROWS}), {"some": drafts}, keys=KeyCosts(1e-4, 1e-4))
    assert world().run(Adaptive(16, costs), 1, 40) >= max(0.97 * plain, 0.9 * best)


def test_adaptive_bounds_drafts_that_lose_their_scores() -> None:
    """A method may give scores to some drafts alone, as one that combines others does."""
    useless = Setting(lambda place: 0.0, 0.03, lambda alpha: 0.5)
    world = useless.world()
    world.first_scored = 5
    plain = useless.world().run(Fixed(0), 1, STEPS)
    assert world.run(useless.adaptive(), 1, STEPS) >= 0.95 * plain


@pytest.mark.slow
@pytest.mark.parametrize("lingers", [0.0, 0.5])
def test_adaptive_finds_that_steps_without_drafts_are_faster(lingers: float) -> None:
    """Weights that fit a processor's cache are still there if no draft model ran since the last passes.

    A pass reads all of them, so that most of the difference is gone after one or two passes.
    """
    setting, ratios = Setting(lambda place: 0.6, 0.2), list[float]()
    for seed in range(12):
        worlds, policy = [setting.world(seed) for _ in range(3)], setting.adaptive()
        for world in worlds:
            world.undrafted, world.lingers = 0.5, lingers
        worlds[0].run(policy, 1, STEPS)
        ratios.append(worlds[1].run(policy, 1, STEPS) / worlds[2].run(Fixed(0), 1, STEPS))
    assert sum(ratios) / len(ratios) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "as large as the target"])
def test_adaptive_is_not_misled_by_other_programs(name: str) -> None:
    """Their addition to a pass must not make passes without drafts look slow."""
    ratios = list[float]()
    for seed in range(12):
        world, plain = USELESS[name].world(seed), USELESS[name].world(seed)
        world.bursts = plain.bursts = 0.3
        ratios.append(world.run(USELESS[name].adaptive(), 1, 2000) / plain.run(Fixed(0), 1, 2000))
    assert min(ratios) >= 0.97, ratios


@pytest.mark.parametrize(("ask_s", "share"), [(0.2, 0.95), (0.005, 0.99)])
def test_adaptive_seldom_calls_a_drafter_that_drafts_nothing(ask_s: float, share: float) -> None:
    useless = Setting(lambda place: 0.9, 0.0005, lambda alpha: 0.9)
    world = useless.world()
    world.returned, world.ask_s = lambda place, asked: asked if place < 20 else 0, ask_s
    assert world.run(useless.adaptive(), 1, 1000) >= share * useless.world().run(Fixed(0), 1, 1000)


def test_adaptive_calls_it_again_when_there_are_drafts() -> None:
    setting = Setting(lambda place: 0.9, 0.0005, lambda alpha: 0.9)
    world = setting.world()
    world.returned, world.ask_s = lambda place, asked: 0 if 20 <= place <= 300 else asked, 0.2
    assert world.run(setting.adaptive(), 1, 700) >= 1.5 * setting.world().run(Fixed(0), 1, 700)


@pytest.mark.parametrize("wished", [0, 7, 40])
def test_adaptive_drafts_a_request_s_own_length(wished: int) -> None:
    params = SamplingParams(temperature=0, speculation={"num_speculative_tokens": wished})
    request = make_request([1], [], params, method="some")
    schedule = Schedule([Scheduled(request, 0, 1)], None, 10**6, [], [])  # type: ignore[arg-type]
    policy = USELESS["random"].adaptive()
    assert policy.choose(schedule) == [wished]
    assert policy.trim([ScoredDraft(request, [0.0] * 5, range(-1, 4))]) == [5]


def selector_of(alpha: float) -> tuple[Adaptive, Request]:
    """Return a policy that has seen a model's drafts of this acceptance rate and looked-up drafts."""
    setting, request = Setting(lambda place: alpha, 0.1), make_request([1], [], LONG, seq_id=1, method="some")
    policy = setting.adaptive(selects=True)
    for step in range(80):
        (wished,) = policy.choose(Schedule([Scheduled(request, 0, 1)], None, 10**6, [], []))  # type: ignore[arg-type]
        drafted = min(wished, policy.longest_unscored(request) or 0)
        if step >= 40 and (drafted or alpha < 0.5):
            break
        if drafted:
            accepted = next((place for place in range(drafted) if alpha < 0.5), drafted)
            policy.observe(
                [outcome_of(request, drafted, accepted)],
                StepTiming(0.0, 0.1 * drafted, 1.0 + 0.12 * drafted),
            )
    return policy, request


def test_adaptive_prefers_the_better_arm() -> None:
    """A long copy beats a draft model, a doubtful one does not unless the model is poor."""
    good, request = selector_of(0.9)
    assert (good.longest_unscored(request) or 0) > 2
    assert good.prefers(request, [0.95] * 12, range(-1, 11))
    assert not good.prefers(request, [0.3], [-1])
    poor, request = selector_of(0.1)
    assert poor.longest_unscored(request) == 0
    assert poor.prefers(request, [0.5], [-1])


def test_adaptive_gives_each_candidate_drafter_its_own_length() -> None:
    """Looked-up drafts are cut by their scores, so the model's length does not bound them."""
    policy, request = selector_of(0.9)
    assert policy._plan.lengths == [16]
    assert 0 < (policy.longest_unscored(request) or 0) <= 16


@pytest.mark.parametrize(("sequences", "given", "own", "expected"), [
    (1, None, None, LONGEST_ALONE), (2, None, None, LONGEST), (1, LONGEST, None, LONGEST), (1, None, LONGEST, LONGEST),
])  # fmt: skip
def test_lookups_draft_more_where_no_other_sequence_waits(
    sequences: int, given: int | None, own: int | None, expected: int
) -> None:
    policy = Adaptive(given)
    policy._methods["some"].has_scores = True
    requests = [make_request([1, 2, 3], seq_id=number, method="some") for number in range(sequences)]
    for request in requests:
        request.drafts = replace(request.drafts, num_tokens=own)
    items = [Scheduled(request, 2, 1) for request in requests]
    assert policy.choose(Schedule(items, None, 10**6, [], [])) == [expected] * sequences  # type: ignore[arg-type]


def test_a_method_with_trees_is_tried_with_whole_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The acceptance of smaller trees shows less, and would be counted for whole ones."""
    useless, chosen = Setting(lambda place: 0.0, 0.03), set[int]()
    drafts = {1: CostCurve({depth: depth * useless.token_s for depth in DEPTHS})}
    costs = StepCosts(CostCurve({rows: pass_s(rows) for rows in ROWS}), {"some": drafts})
    policy = Adaptive(None, costs, lambda method: DrafterNeeds(usual_nodes=6, tree_depth=2))
    choose = policy.choose
    monkeypatch.setattr(policy, "choose", lambda schedule: [chosen.add(n) or n for n in choose(schedule)])  # type: ignore[func-returns-value]
    plain = useless.world().run(Fixed(0), 1, STEPS)
    assert useless.world().run(policy, 1, STEPS) >= 0.95 * plain
    assert chosen == {0, 6}


def test_two_rejections_at_a_depth_do_not_end_it() -> None:
    """A depth that is no longer drafted is not tested either; until it is known it follows the depth above."""
    acceptance, request = MethodAcceptance(), make_request([1, 2, 3])
    for _ in range(2):
        acceptance.observe(DraftOutcome(request, [1] * 3, [1] * 3, [1, 1, 0], (0, 1)), None)
    for _ in range(40):
        acceptance.observe(DraftOutcome(request, [1] * 2, [1] * 2, [1, 1], (0, 1)), None)
    first, second, third = acceptance.survivals(request, 3)
    assert first >= second > 0.8
    assert third > 0.6 * second
    for _ in range(40):
        acceptance.observe(DraftOutcome(request, [1] * 3, [1] * 3, [1, 1, 0], (0, 1)), None)
    assert acceptance.survivals(request, 3)[2] < 0.3


def speed_of(policy: Adaptive, token_s: float, price: DraftPrice) -> float:
    """Return the tokens per second of a text whose tokens are accepted as often as their scores say."""
    request, generator = make_request([1], [], LONG, seq_id=1, method="some"), random.Random(0)
    seconds, tokens = 0.0, 0
    for _ in range(1000):
        (limit,) = policy.choose(Schedule([Scheduled(request, 0, 1)], None, 10**6, [], []))  # type: ignore[arg-type]
        path, drafted, accepted = 1.0, 0, 0
        while drafted < limit and path >= price.least:
            score = generator.choice([0.2, 0.95, 0.95])
            path, accepted = path * score, accepted + (accepted == drafted and generator.random() < score)
            drafted += 1
        timing = StepTiming(0.0, token_s * drafted, token_s * drafted + pass_s(1 + drafted))
        outcome = outcome_of(request, drafted, accepted)._replace(missing=limit - drafted)
        policy.observe([outcome] if limit else [], timing)
        seconds, tokens = seconds + timing.verified, tokens + 1 + accepted
    return tokens / seconds


def test_chains_that_end_at_the_price_of_a_token_are_faster() -> None:
    setting, price = Setting(lambda place: 0.0, 0.2), DraftPrice()
    whole = speed_of(setting.adaptive(), 0.2, DraftPrice())
    assert speed_of(setting.adaptive(price=price), 0.2, price) >= 1.05 * whole > 1.05
