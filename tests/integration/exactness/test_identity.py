"""Texts are compared token for token, and each difference is classified."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant.config import EngineConfig
from speculant.engine import Runtime, build_engine
from speculant.lab.exactness import (
    ROUNDING,
    WAYS,
    TargetReader,
    TextComparison,
    compare,
    complete,
    explained,
    first_gap,
    reread,
)
from speculant.params import SamplingParams
from speculant.sampling import Chance, KeyedNoise, Node
from speculant.types import DraftTree, Verdict
from speculant.verification import Match
from tests.models import Checkpoints

PROMPTS = [[70, 71, 72], [80] * 9, [90]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, seed=0, ignore_eos=True)


def build(checkpoints: Checkpoints, **values: str) -> Runtime:
    return build_engine(EngineConfig(checkpoints.target, checkpoints.near, spec_length=3, **values))  # type: ignore[arg-type]


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("engine", [{"kernels": "auto"}, {"dtype": "float64"}], ids=str)
def test_texts_agree_in_every_way(checkpoints: Checkpoints, engine: dict[str, str], params: SamplingParams) -> None:
    found = compare(build(checkpoints, **engine), "kind", PROMPTS, params)
    assert [each.way for each in found] == list(WAYS)
    assert all(each.passed and each.agreeing == each.texts == 3 for each in found)
    assert all(each.tokens == 72 for each in found)
    assert all(each.to_dict()["first_difference_gap_nats"] is None for each in found)


def test_every_prompt_has_a_seed_of_its_own(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, seeds = build(checkpoints), set()
    add = runtime.engine.add_request

    def noting(*given: Any, **named: Any) -> Any:
        seeds.add(given[1].seed)
        return add(*given, **named)

    monkeypatch.setattr(runtime.engine, "add_request", noting)
    compare(runtime, "seeded", [PROMPTS[0]] * 3, SEEDED)
    assert seeds == {0, 1, 2}


def believing(self: Match, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
    """Keep every drafted token, whatever the target prefers."""
    return Verdict(tuple(range(tree.size)), chance.draw(p[-1]))


@pytest.mark.parametrize("engine", [{"kernels": "auto"}, {"dtype": "float64"}], ids=str)
def test_a_rule_that_accepts_every_draft_is_found(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, engine: dict[str, str]
) -> None:
    drafting = {"num_speculative_tokens": 3, "draft_length": "fixed"}  # a policy might draft nothing in short texts
    config = EngineConfig(checkpoints.target, checkpoints.far, speculative_config=drafting, **engine)  # type: ignore[arg-type]
    monkeypatch.setattr(Match, "verify", believing)  # an engine asks once whether it may draw in its place
    runtime = build_engine(config)
    together, *speculative = compare(runtime, "greedy", PROMPTS, GREEDY)
    assert together.passed
    for each in speculative:
        assert not each.passed
        assert each.agreeing < 3
        assert each.gap is not None
        assert each.gap > 0.1


# --- gaps


@pytest.mark.parametrize("params", [GREEDY, replace(SEEDED, temperature=0.7, top_k=4)], ids=["greedy", "seeded"])
def test_the_gap_is_how_much_the_target_prefers_its_token(checkpoints: Checkpoints, params: SamplingParams) -> None:
    runtime = build(checkpoints, dtype="float64")
    (text,) = complete(runtime, PROMPTS[:1], [replace(params, speculation=False)])
    assert first_gap(runtime, text, text) is None
    place, mine = 5, text.output[5]
    theirs = (mine + 1) % 250
    other = replace(text, tokens=[*text.tokens])
    other.tokens[len(text.prompt) + place] = theirs
    here = reread(text, place)
    here.params = SamplingParams(temperature=params.temperature or 1.0)
    distribution = TargetReader(runtime, 1, 40).distributions([Node(here)])[0]
    score = distribution.log() + (0 if params.greedy else noise(text.seed, len(here.tokens), len(distribution)))
    assert first_gap(runtime, text, other) == pytest.approx(float(score[mine] - score[theirs]), abs=1e-9)
    assert float(score[mine] - score[theirs]) > 0


def noise(seed: int, position: int, vocab_size: int) -> Tensor:
    from speculant.kernels import gumbel
    from speculant.sampling import mix_in

    key = KeyedNoise(seed, position).take_keys(1)
    return gumbel(mix_in(*key), torch.arange(vocab_size))


def test_a_text_that_ends_early_is_no_near_tie(checkpoints: Checkpoints) -> None:
    runtime = build(checkpoints)
    (text,) = complete(runtime, PROMPTS[:1], [GREEDY])
    assert first_gap(runtime, text, replace(text, tokens=text.tokens[:-1])) == math.inf


def test_an_impossible_token_is_no_near_tie(checkpoints: Checkpoints) -> None:
    runtime = build(checkpoints)
    banned = replace(GREEDY, logit_bias={7: -math.inf})
    (text,) = complete(runtime, PROMPTS[:1], [banned])
    other = replace(text, tokens=[*text.prompt, 7, *text.output[1:]])
    assert first_gap(runtime, text, other) == math.inf


def test_rounding_explains_by_kernels_dtype_and_distribution(checkpoints: Checkpoints) -> None:
    native, reference = build(checkpoints), build(checkpoints, kernels="reference")
    cold = replace(SEEDED, temperature=0.5)
    assert explained(native, GREEDY) is None
    assert explained(reference, GREEDY) == ROUNDING[torch.float32]
    assert explained(reference, cold) == 2 * ROUNDING[torch.float32]
    assert explained(reference, replace(cold, top_p=0.9)) == math.inf
    assert explained(reference, replace(GREEDY, top_p=0.9)) == ROUNDING[torch.float32]


@pytest.mark.parametrize(
    ("gap", "bound", "passed"),
    [
        (None, None, True),
        (1e-9, None, False),
        (1e-9, 1e-6, True),
        (1e-3, 1e-6, False),
        (math.inf, 0.5, False),
        (math.inf, math.inf, True),
    ],
)
def test_a_difference_passes_where_rounding_explains_it(gap: float | None, bound: float | None, passed: bool) -> None:
    found = TextComparison("greedy", "plain, together", 8, 8 - (gap is not None), 100, gap, bound)
    assert found.passed == passed
    assert found.to_dict()["bitwise"] == (bound is None)
