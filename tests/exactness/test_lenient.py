"""Lenient verification keeps its own bound, not the target's distribution, and every report says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculant import LLM, SamplingParams
from speculant.engine.verify import verifier_for
from speculant.errors import ConfigError
from speculant.lab.exactness.tables import EXACT, FULL_SUPPORT, Pair, softmax
from speculant.params import SamplingParams as Params
from speculant.types import DraftTree
from speculant.verification.base import Verifier
from speculant.verification.lenient import build
from tests.exactness.selection import slow_but
from tests.exactness.verdicts import (
    chain_of,
    deterministic,
    distance,
    distribution_after_verdict,
    sampled,
    target_distributions,
)
from tests.examples import examples

LENIENCES = [0.1, 0.3, 0.5, 1.0]
PAIRS = [Pair(seed, size) for size in (2, 3, 4) for seed in range(examples(15, least=5))]
PROMPT = "def read(path):"


def greedy_rule(lenience: float) -> Verifier:
    return verifier_for(build(lenience), Params(temperature=0))


@pytest.mark.covering(1)
@pytest.mark.parametrize("lenience", LENIENCES)
@pytest.mark.parametrize("length", [1, 2])
def test_no_token_becomes_likelier_than_its_share(lenience: float, length: int) -> None:
    """The bound p / l of every token at every context, worked out over all ways that lead there."""
    for pair in PAIRS:
        for make in (sampled(pair, chain_of(length)), deterministic(pair, chain_of(length))):
            outcomes = distribution_after_verdict(build(lenience), pair, make)
            for depth in range(length):
                reached: dict[tuple[int, ...], float] = {}
                for tokens, probability in outcomes.items():
                    if len(tokens) > depth:
                        reached[tokens[: depth + 1]] = reached.get(tokens[: depth + 1], 0.0) + probability
                for context in {tokens[:-1] for tokens in reached}:
                    into = sum(value for tokens, value in reached.items() if tokens[:-1] == context)
                    for token, p in enumerate(softmax(pair.target(context))):
                        assert reached.get((*context, token), 0.0) <= into * p / lenience + EXACT


def test_the_rule_is_lossless_only_without_lenience() -> None:
    assert not build().lossless
    assert max(distance(build(0.5), pair, sampled(pair, chain_of(2))) for pair in PAIRS) > 0.05
    assert max(distance(build(1), pair, sampled(pair, chain_of(2))) for pair in PAIRS) <= EXACT


@pytest.mark.parametrize("lenience", LENIENCES)
def test_acceptance_is_what_theory_says(lenience: float) -> None:
    """E accepted at one node = sum min(p / l, q) (arXiv 2211.17192, A.5)."""
    for pair in PAIRS:
        outcomes = distribution_after_verdict(build(lenience), pair, sampled(pair, chain_of(1)))
        p, q = softmax(pair.target(())), softmax(pair.draft(()))
        due = sum(min(mine / lenience, theirs) for mine, theirs in zip(p, q, strict=True))
        assert sum(each for tokens, each in outcomes.items() if len(tokens) == 2) == pytest.approx(due, abs=EXACT)


@pytest.mark.parametrize("lenience", LENIENCES)
def test_greedy_takes_the_likeliest_admissible_child(lenience: float) -> None:
    verifier, taken = greedy_rule(lenience), 0
    for seed in range(200):
        pair = Pair(seed, 4, FULL_SUPPORT)
        tree = DraftTree(torch.tensor([seed % 4, (seed + 1) % 4, seed // 4 % 4]), torch.tensor([-1, -1, 0]))
        p = target_distributions(pair, tree)
        verdict = verifier.verify(tree, p, chance=None)  # type: ignore[arg-type]  # it draws nothing
        above = -1
        for node in verdict.path:
            distribution, siblings = p[1 + above].tolist(), [tree.token_list[child] for child in tree.children(above)]
            assert (
                distribution[tree.token_list[node]]
                == max(distribution[token] for token in siblings)
                >= lenience * max(distribution)
            )
            above, taken = node, taken + 1
        distribution = p[1 + above].tolist()
        assert verdict.token == distribution.index(max(distribution))
        assert all(
            distribution[tree.token_list[child]] < lenience * max(distribution) for child in tree.children(above)
        )
    assert taken > 50


@pytest.mark.parametrize("given", [0, -1, 1.5, "0.5", True, None])
def test_a_lenience_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="lenience="):
        build(given)


def lenient(**config: Any) -> LLM:
    return LLM("demo", "demo", max_model_len=128, speculative_config=config)


@pytest.mark.parametrize("temperature", slow_but([1.0], [0.0, 1.0]))
def test_every_output_and_metric_says_that_it_is_lenient(temperature: float) -> None:
    llm = lenient(verification="lenient", lenience=0.01, draft_length="fixed")
    params = SamplingParams(temperature=temperature, max_tokens=48, ignore_eos=True)
    (out,) = llm.generate([PROMPT], params)
    assert out.metrics.verification == "lenient"
    assert not out.lossless
    assert out.metrics.to_dict()["speculative_decoding"]["lossless"] is False
    assert (llm.engine.metrics.lossy, llm.engine.metrics.to_dict()["lossy"]) == (1, 1)
    assert "NOT LOSSLESS" in llm.speculation
    strict = LLM("demo", "demo", max_model_len=128, speculative_config={"draft_length": "fixed"})
    (exact,) = strict.generate([PROMPT], params)
    assert exact.lossless
    assert exact.metrics.to_dict()["speculative_decoding"]["lossless"] is True
    assert strict.engine.metrics.lossy == 0
    assert "LOSSLESS" not in strict.speculation
    spec = out.metrics.speculative_decoding
    assert spec.mean_acceptance_length > exact.metrics.speculative_decoding.mean_acceptance_length


def test_a_seed_keeps_its_promise() -> None:
    params = SamplingParams(seed=3, max_tokens=24)
    (out,) = lenient(verification="lenient").generate([PROMPT], params)
    (plain,) = LLM("demo", max_model_len=128).generate([PROMPT], params)
    assert out.lossless
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids


def test_lenience_is_off_unless_requested() -> None:
    with pytest.raises(ConfigError, match="'lenience'"):
        lenient(lenience=0.5)
    with pytest.raises(ConfigError, match="lenience=2"):
        lenient(verification="lenient", lenience=2)
    with pytest.raises(ConfigError, match="understands chains"):
        lenient(verification="lenient", tree=[2, 1])
    (out,) = lenient().generate([PROMPT], SamplingParams(max_tokens=8, speculation={"verification": "lenient"}))
    assert not out.lossless
