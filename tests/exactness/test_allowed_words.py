"""With banned words and allowed tokens, outputs have the masked target's distribution under every drafter and rule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from speculant.drafting import ParallelChains, StaticTree, TreeTopology
from speculant.lab.exactness import FULL_SUPPORT, History, Pair, TableModel
from speculant.params import SamplingParams
from tests.exactness import speculation
from tests.exactness.distributions import transformed
from tests.exactness.selection import combinations
from tests.exactness.speculation import BRANCHING, LOSSLESS, assert_exact, draft_model, ngram, scripted
from tests.exactness.test_constraints import DRAFTERS
from tests.examples import examples
from tests.fakes import ROOMY, build_rig

RULES: dict[str, dict[str, Any]] = {
    "words": {"bad_words": [[0], [1, 2], [2, 2], [1, 3, 1]]},
    "two that overlap": {"bad_words": [[1, 2, 1], [2, 1, 2], [3, 3]]},
    "tokens": {"allowed_token_ids": [1, 3]},
    "both": {"allowed_token_ids": [0, 1, 2], "bad_words": [[0, 1], [1, 0], [2, 2]]},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "filters": {"temperature": 0.7, "top_k": 2},
    "penalties and bias": {"repetition_penalty": 1.4, "logit_bias": {1: 1.5}},
}


@dataclass(frozen=True)
class Case(speculation.Case):
    """A case whose banned tokens are worked out from the whole output."""

    def transformed(self, logits: Sequence[float], history: History) -> list[float]:
        """See the base."""
        output, params = history[len(self.prompt) :], self.params
        allowed = range(len(logits)) if params.allowed_token_ids is None else params.allowed_token_ids
        masked = [
            float("-inf") if token not in allowed or _completes([*output, token], params.bad_words) else logit
            for token, logit in enumerate(logits)
        ]
        return transformed(masked, params, history, len(self.prompt), self.ends)


def _completes(output: Sequence[int], words: Sequence[Any]) -> bool:
    return any(tuple(output[-len(word) :]) == tuple(word) for word in words)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verifier", LOSSLESS)
def test_chains_of_a_draft_model(verifier: str, rule: str) -> None:
    params = SamplingParams(max_tokens=None, **RULES[rule])
    accepted = sum(
        assert_exact(Case(Pair(seed, 4, FULL_SUPPORT), 3, params, verifier, width=8))
        for seed in range(examples(2, least=1))
    )
    assert accepted > 0.2


TOPOLOGIES: dict[str, TreeTopology] = {"static": StaticTree.of_widths([2, 1]), "parallel": ParallelChains((0, 0), 2)}
QUICK_TREES = {
    ("static", "match", "words"),
    ("static", "traversal", "two that overlap"),
    ("parallel", "multi_draft", "tokens"),
}


@pytest.mark.parametrize(
    ("topology", "verifier", "rule"), combinations(lambda *each: each in QUICK_TREES, TOPOLOGIES, BRANCHING, RULES)
)
def test_trees(topology: str, verifier: str, rule: str) -> None:
    params, make = (
        SamplingParams(max_tokens=None, **RULES[rule]),
        functools.partial(draft_model, topology=TOPOLOGIES[topology]),
    )
    assert_exact(Case(Pair(2, 4, FULL_SUPPORT), 3, params, verifier, width=8, make_drafter=make))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("make", [ngram, scripted(1, 2, 1), scripted(0, 1)], ids=["ngram", "banned later", "at once"])
def test_drafts_that_know_no_rule(make: speculation.MakeDrafter, verifier: str, rule: str) -> None:
    params = SamplingParams(max_tokens=None, **RULES[rule])
    case = Case(Pair(2, 4, FULL_SUPPORT), 3, params, verifier, (0, 1, 2, 0), idle=1, width=8, make_drafter=make)
    assert_exact(case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_rules_come_before_other_settings(verifier: str, settings: str) -> None:
    for rule in RULES.values():
        params = SamplingParams(max_tokens=None, **rule, **SETTINGS[settings])
        assert_exact(Case(Pair(2, 4, FULL_SUPPORT), 2, params, verifier, width=8, make_drafter=draft_model))


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 5}, {"seed": 6, "temperature": 1.5}])
def test_speculation_changes_no_text(drafter: str, rule: str, settings: dict[str, Any]) -> None:
    pair, params = Pair(4, 4, FULL_SUPPORT), SamplingParams(max_tokens=20, **RULES[rule], **settings)
    for prompt in ((0,), (1, 2), (3, 3, 1)):
        plain, drafted = (_output(pair, prompt, params, name) for name in ("none", drafter))
        assert drafted == plain
        assert not any(_completes(plain[: end + 1], params.bad_words) for end in range(len(plain)))


def _output(pair: Pair, prompt: History, params: SamplingParams, drafter: str) -> list[int]:
    rig = build_rig(TableModel(pair.target, 4), DRAFTERS[drafter](pair), length=4, limits=ROOMY)
    (request,) = rig.add(prompt, params)
    rig.finish()
    assert request.ending.error is None
    return request.output
