"""Reported log-probabilities are the model's own, at the token's own place."""

from __future__ import annotations

import math

import pytest

from speculant.config import Limits
from speculant.lab.exactness import FULL_SUPPORT, History, Pair, TableModel, softmax
from speculant.params import SamplingParams
from speculant.types import Logprobs, Request
from tests.fakes import (
    MakeCache,
    Rig,
    ScriptedDrafter,
    both_caches,
    build_rig,
    model_drafter,
    paged,
)

V = 4
PAIR = Pair(8, V, FULL_SUPPORT)
LIMITS = Limits(max_model_len=48, max_num_seqs=3, max_num_batched_tokens=48)


def rig_with(
    drafter: str, limits: Limits = LIMITS, ends: frozenset[int] = frozenset(), cache: MakeCache = paged
) -> Rig:
    made = {
        "none": lambda: None,
        "model": lambda: model_drafter(TableModel(PAIR.draft, V), V, limits=limits, cache=cache),
        "target": lambda: model_drafter(TableModel(PAIR.target, V), V, limits=limits, cache=cache),
        "scripted": lambda: ScriptedDrafter(lambda request: [request.num_output % V, 2, 1]),
    }[drafter]()
    return build_rig(TableModel(PAIR.target, V), made, length=3, limits=limits, ends=ends, cache=cache)


def assert_own(entry: Logprobs, history: History, token: int, top: int) -> None:
    """An entry holds the token and the `top` likeliest, as the plain distribution at `history` has them."""
    distribution = softmax(PAIR.target(history))
    best = sorted(distribution, reverse=True)
    for each, known in entry.items():
        assert known.logprob == pytest.approx(math.log(distribution[each]), abs=1e-12)
        assert (
            known.rank == 1 + sum(p > distribution[each] + 1e-15 for p in distribution)
            or distribution.count(distribution[each]) > 1
        )
    assert token in entry
    assert sorted((math.exp(known.logprob) for known in entry.values()), reverse=True)[:top] == pytest.approx(
        best[:top]
    )
    assert len(entry) in (max(top, 1), top + 1)


def assert_output(request: Request, top: int) -> None:
    assert len(request.logprobs) == request.num_output
    for place, entry in enumerate(request.logprobs, start=len(request.prompt)):
        assert_own(entry, tuple(request.tokens[:place]), request.tokens[place], top)


@pytest.mark.parametrize("top", [0, 2, 4])
@pytest.mark.parametrize("drafter", ["none", "model", "target", "scripted"])
def test_output_tokens(drafter: str, top: int) -> None:
    rig = rig_with(drafter)
    settings = [{}, {"temperature": 0}, {"seed": 3, "temperature": 0.7, "top_k": 2, "presence_penalty": 0.5}]
    requests = [
        request
        for index, distribution in enumerate(settings)
        for request in rig.add((index, 0), SamplingParams(max_tokens=14, logprobs=top, **distribution), str(index))
    ]
    rig.finish()
    for request in requests:
        assert_output(request, top)


@pytest.mark.parametrize("drafter", ["model", "target"])
def test_no_logprobs_follow_an_end(drafter: str) -> None:
    rig = rig_with(drafter, ends=frozenset({3}))
    requests = [
        rig.add((seed % V,), SamplingParams(max_tokens=40, seed=seed, logprobs=1), str(seed))[0] for seed in range(8)
    ]
    rig.finish()
    assert any(request.ending.reason == "stop" for request in requests)
    for request in requests:
        assert_output(request, 1)


@both_caches
@pytest.mark.parametrize("budget", [4, 5, 48])
@pytest.mark.parametrize("drafter", ["none", "model"])
def test_prompt_tokens(drafter: str, budget: int, cache: MakeCache) -> None:
    rig = rig_with(drafter, Limits(48, 2, budget), cache=cache)
    settings = SamplingParams(max_tokens=5, logprobs=0, prompt_logprobs=2)
    requests = [rig.add(prompt, settings, str(prompt))[0] for prompt in ((0, 1, 2, 3, 3, 2, 1), (2, 2), (1,))]
    rig.finish()
    for request in requests:
        assert len(request.prompt_logprobs) == len(request.prompt) - 1
        for place, entry in enumerate(request.prompt_logprobs, start=1):
            assert_own(entry, request.prompt[:place], request.prompt[place], 2)
        assert_output(request, 0)
