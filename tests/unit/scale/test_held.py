"""A replica tells which texts are surely gone from its memory, and the router forgets these alone."""

from __future__ import annotations

import logging
import random
import time

import pytest

from speculant.lab.exactness import Pair, TableModel
from speculant.params import SamplingParams
from speculant.scale import MARGIN_S, HeldPrefixes
from tests.fakes import build_rig, few_blocks


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def seconds(clock: Clock, told: float) -> float:
    """Return a time that a replica told by the clock of the test."""
    return told - time.time() + clock.now + MARGIN_S


def test_what_came_before_all_that_may_be_held_is_gone() -> None:
    clock = Clock()
    held = HeldPrefixes(clock)
    assert held.gone_before(0.0) == 0.0
    first, second, long = held.used(), held.used(), held.used()
    for request, now in ((first, 1010), (second, 1020), (long, 1030)):
        clock.now = now
        request.__enter__()
    for request, now in ((first, 1040), (second, 1050)):
        clock.now = now
        request.__exit__(None, None, None)
    clock.now = 1060
    assert seconds(clock, held.gone_before(1039.0)) == pytest.approx(1010, abs=1), "the first one may be held"
    assert seconds(clock, held.gone_before(1041.0)) == pytest.approx(1020, abs=1)
    assert seconds(clock, held.gone_before(1055.0)) == pytest.approx(1030, abs=1), "the long one runs"
    clock.now = 1070
    long.__exit__(None, None, None)
    assert seconds(clock, held.gone_before(1080.0)) == pytest.approx(1080, abs=1)
    assert seconds(clock, held.gone_before(1079.0)) == pytest.approx(1080, abs=1), "it never falls"


def test_a_cache_says_what_it_evicted() -> None:
    pair = Pair(3, 4)
    rig = build_rig(TableModel(pair.target, 4), cache=few_blocks(6))
    ended: list[tuple[list[int], float]] = []
    for number in range(6):
        prompt = [number % 4, *([number // 4] * 7)]
        rig.add(prompt, SamplingParams(max_tokens=1, temperature=0), f"r{number}")
        rig.finish()
        ended.append((prompt, time.monotonic()))
    until = rig.cache.whole.evicted_until
    assert rig.engine.metrics.evicted_until == until > 0
    matched = [len(rig.cache.tree.match(prompt, "")) for prompt, _ in ended]
    assert all(not found for found, (_, end) in zip(matched, ended, strict=True) if end < until)
    assert all(found for found, (_, end) in zip(matched[1:], ended, strict=False) if end > until), matched
    assert any(matched)
    assert not all(matched)
    rig.engine.reset_prefix_cache()
    assert ended[-2][1] < rig.cache.whole.evicted_until <= ended[-1][1]


def test_the_router_forgets_what_was_not_sent_since() -> None:
    before = logging.root.handlers[:], logging.root.level
    tree_module = pytest.importorskip("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree")
    assert tree_module
    from speculant.scale import SentTexts

    logging.root.handlers[:], level = before  # the import of Ray's router replaces them
    logging.root.setLevel(level)

    tree, rng = SentTexts(), random.Random(3)
    tree.add_tenants(["a", "b"], 0.0)
    sent = list[tuple[str, str, float]]()
    for number in range(200):
        text = "system " + rng.choice(["x", "y", "z"]) + "".join(rng.choices("01", k=6))
        tenant = rng.choice("ab")
        sent.append((text, tenant, 1.0 + number))
        tree.insert(text, tenant, 1.0 + number)
    before = tree.tenant_to_char_count["a"]
    assert tree.forget_before("a", 0.5) == 0
    forgotten = tree.forget_before("a", 150.0)
    assert tree.tenant_to_char_count["a"] == before - forgotten < before
    newest = {(text, tenant): when for text, tenant, when in sent}
    for (text, tenant), when in newest.items():
        matched, tenants = tree.prefix_match(text, [tenant])
        kept = matched == text and tenants == [tenant]
        assert kept or tenant == "a"
        if tenant == "a" and when >= 150.0:
            assert kept, "it was sent since"
    assert not any(
        tree.prefix_match(text, ["a"])[0] == text
        for (text, tenant), when in newest.items()
        if tenant == "a" and when < 150.0
    )
    assert tree.forget_before("a", 1e9) == before - forgotten
    assert tree.prefix_match("system x", ["a"])[0] == ""
    assert tree.forget_before("nobody", 1e9) == 0
