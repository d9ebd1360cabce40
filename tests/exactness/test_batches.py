"""Requests in one batch: each has its own distribution, tokens and cache, whatever its neighbours are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from speculant.config import Limits
from speculant.drafting import Drafter, DrafterNeeds
from speculant.lab.exactness import (
    EXACT,
    FULL_SUPPORT,
    Branches,
    EnumeratingChances,
    History,
    Joint,
    Pair,
    TableModel,
    completed,
    deviation,
    enumerate_outcomes,
    joint_distribution,
)
from speculant.params import SamplingParams
from speculant.types import DraftTree, Request
from tests.exactness.distributions import transformed
from tests.exactness.selection import slow_but
from tests.examples import examples
from tests.fakes import (
    MakeCache,
    Rig,
    ScriptedDrafter,
    both_caches,
    build_rig,
    model_drafter,
)

V = 3
NOTHING: frozenset[int] = frozenset()
LIMITS = Limits(max_model_len=24, max_num_seqs=4, max_num_batched_tokens=64)


def distribution_of(pair: Pair, params: SamplingParams, num_prompt: int) -> Callable[[History], list[float]]:
    return lambda history: transformed(pair.target(history), params, history, num_prompt, NOTHING)


def two_outputs(rig: Rig, chances: EnumeratingChances, settings: list[SamplingParams]) -> Callable[[Branches], tuple]:
    """Return a run of one step of two requests that share their branches."""

    def run(branches: Branches) -> tuple[tuple[int, ...], tuple[int, ...]]:
        chances.branches = {"0": branches, "1": branches}
        requests = [rig.add((index,), params, str(index))[0] for index, params in enumerate(settings)]
        rig.step()
        for request in requests:
            rig.abort(request.request_id)
        return tuple(requests[0].output), tuple(requests[1].output)

    return run


def product_deviation(pair: Pair, settings: list[SamplingParams], outcomes: dict[tuple, float], depth: int) -> float:
    """Return how far the completed joint distribution of two outputs is from the product of the target's."""
    distributions = [distribution_of(pair, params, 1) for params in settings]
    alone = [
        joint_distribution(distribution, (index,), depth, lambda _: False)
        for index, distribution in enumerate(distributions)
    ]
    product = {(*a, *b): p * q for a, p in alone[0].items() for b, q in alone[1].items()}
    joint: Joint = {}
    for (first, second), probability in outcomes.items():
        left = completed({first: probability}, distributions[0], (0,), depth, lambda _: False)
        right = completed({second: 1.0}, distributions[1], (1,), depth, lambda _: False)
        for a, p in left.items():
            for b, q in right.items():
                joint[(*a, *b)] = joint.get((*a, *b), 0.0) + p * q
    return deviation(joint, product)


MIXTURES: dict[str, list[dict[str, Any]]] = {
    "equal": [{}, {}],
    "plain, greedy": [{}, {"temperature": 0}],
    "greedy, cold": [{"temperature": 0}, {"temperature": 0.7}],
    "filtered, plain": [{"top_k": 2}, {}],
    "filtered, greedy": [{"top_k": 2}, {"temperature": 0}],
    "top_p, min_p": [{"top_p": 0.7431}, {"min_p": 0.3137, "temperature": 1.4}],
    "penalty, bias": [{"repetition_penalty": 1.5}, {"logit_bias": {0: 1.0}}],
    "drafting, not": [{}, {"speculation": False}],
    "match, rejection": [{"speculation": {"verification": "match"}}, {"frequency_penalty": 0.8}],
}


QUICK = ["equal", "filtered, greedy", "penalty, bias", "drafting, not", "match, rejection"]


@pytest.mark.parametrize("name", slow_but(QUICK, MIXTURES))
def test_two_requests_are_independent(name: str) -> None:
    """Different settings, prompts and rules in one batch: the joint distribution is the product."""
    settings = [SamplingParams(max_tokens=None, **values) for values in MIXTURES[name]]
    for seed in range(examples(2, least=1)):
        pair, chances = Pair(seed, V, FULL_SUPPORT), EnumeratingChances()
        drafter = model_drafter(TableModel(pair.draft, V), V, chances, LIMITS)
        rig = build_rig(
            TableModel(pair.target, V), drafter, length=1, chances=chances, limits=LIMITS, verification="rejection"
        )
        outcomes = enumerate_outcomes(two_outputs(rig, chances, settings))
        assert sum(outcomes.values()) == pytest.approx(1, abs=EXACT)
        assert product_deviation(pair, settings, outcomes, 2) <= EXACT


# --- whole texts

W = 8
STEPS = (1, 2, 3, 5)  # request i counts on by STEPS[i]


def stepping(history: History) -> list[float]:
    """Continue by the difference of the first two tokens, so that another request's history gives another text."""
    step = (history[1] - history[0]) % W if len(history) > 1 else 0
    return [0.0 if token == (history[-1] + step) % W else -math.inf for token in range(W)]


def expected(request: Request, count: int) -> list[int]:
    step = (request.prompt[1] - request.prompt[0]) % W
    return [(request.prompt[-1] + step * place) % W for place in range(1, count + 1)]


def fan(request: Request) -> DraftTree:
    """Propose two wrong tokens and the right chain as a tree; the right one is the last child of its parent."""
    right = expected(request, request.num_output + 2)[-2:]
    tokens = [(right[0] + 1) % W, right[0], (right[1] + 3) % W, right[1], 0]
    parents = [-1, -1, 1, 1, 0]
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


DRAFTERS: dict[str, Callable[[MakeCache], Drafter | None]] = {
    "none": lambda cache: None,
    "model": lambda cache: model_drafter(TableModel(stepping, W), W, limits=LIMITS, cache=cache),
    "script": lambda cache: ScriptedDrafter(lambda r: expected(r, r.num_output + 1 + r.seq_id % 3)[r.num_output :]),
    "tree": lambda cache: ScriptedDrafter(fan, DrafterNeeds(emits_tree=True)),
}


def stepping_rig(drafter: str, length: int, cache: MakeCache, limits: Limits = LIMITS) -> Rig:
    return build_rig(TableModel(stepping, W), DRAFTERS[drafter](cache), length=length, limits=limits, cache=cache)


@both_caches
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("distribution", ["greedy", "sampled", "seeded"])
def test_each_request_gets_its_own_tokens(drafter: str, distribution: str, cache: MakeCache) -> None:
    """Prompts of different lengths, more requests than slots, different ends."""
    params = {"greedy": {"temperature": 0}, "sampled": {}, "seeded": {"seed": 5}}[distribution]
    rig = stepping_rig(drafter, 5, cache)
    requests = []
    for index in range(7):
        step = STEPS[index % len(STEPS)]
        prompt = [(index + step * place) % W for place in range(2 + index % 3)]
        requests += rig.add(prompt, SamplingParams(max_tokens=3 + index, **params), str(index))
    told = rig.finish()
    for index, request in enumerate(requests):
        assert request.output == expected(request, 3 + index)
        assert [output.token for output in told if output.request_id == str(index)] == request.output


@both_caches
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_samples_share_a_prompt_and_nothing_else(drafter: str, cache: MakeCache) -> None:
    rig = stepping_rig(drafter, 5, cache, Limits(24, 4, 5))
    samples = rig.add([2, 5, 0], SamplingParams(n=3, max_tokens=9), "samples")
    (other,) = rig.add([1, 2, 3], SamplingParams(max_tokens=6), "other")
    rig.finish()
    assert [sample.output for sample in samples] == [expected(samples[0], 9)] * 3
    assert other.output == expected(other, 6)


@both_caches
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_abort_leaves_the_others_alone(drafter: str, cache: MakeCache) -> None:
    rig = stepping_rig(drafter, 3, cache)
    requests = [
        rig.add([index, (index + step) % W], SamplingParams(max_tokens=12), str(index))[0]
        for index, step in enumerate(STEPS)
    ]
    rig.step()
    rig.step()
    rig.abort("1")
    (late,) = rig.add([3, 4], SamplingParams(max_tokens=12), "late")
    rig.finish()
    assert requests[1].ending.reason == "abort"
    for request in (requests[0], *requests[2:], late):
        assert request.output == expected(request, 12)
