"""A constraint over whole models, on every backend: the same text with and without drafts, and all of it allowed."""

from __future__ import annotations

from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.kernels import usable_sets
from tests.automata import Automaton, AutomatonConstraint
from tests.integration.conftest import MakeLLM

LETTERS, DIGITS = range(65, 91), range(48, 58)
TWO_AND_ONE = Automaton(
    {0: dict.fromkeys(LETTERS, 1), 1: dict.fromkeys(LETTERS, 2), 2: dict.fromkeys([*DIGITS, 200, 300], 0)}
)
BACKENDS = ["reference", *(["native"] if usable_sets() else [])]
DRAFTS: list[dict[str, Any]] = [
    {"draft": "near", "spec_length": 4},
    {"draft": "near", "speculative_config": {"tree": [2, 2]}},
    {"speculative_config": {"method": "ngram"}},
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {70: 1.5}},
    {"seed": 3},
    {"seed": 4, "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.4, "min_tokens": 8},
]


def constrained(llm: LLM, settings: dict[str, Any], name: str) -> list[int]:
    """Run a constrained request beside a free one; return its output."""
    params = SamplingParams(max_tokens=30, **settings)
    (request,) = llm.engine.add_request([70, 71, 72], params, name, constraint=TWO_AND_ONE.constrain)
    (other,) = llm.engine.add_request([70, 71, 72], params, name + " free")
    while llm.engine.has_unfinished():
        llm.engine.step()
    assert (request.ending.error, other.ending.error) == (None, None)
    assert isinstance(request.constraint, AutomatonConstraint)
    assert request.constraint.taken == request.output
    assert other.output != request.output
    return request.output


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_change_no_constrained_text(
    llm_of: MakeLLM, backend: str, drafts: dict[str, Any], settings: dict[str, Any]
) -> None:
    arguments = {"dtype": "float64" if backend == "reference" else "float32", "kernels": backend}
    plain = constrained(llm_of(**arguments), settings, f"plain {drafts}")
    assert constrained(llm_of(**arguments, **drafts), settings, "drafted") == plain
    assert len(plain) == 30
    assert all(token in LETTERS for place, token in enumerate(plain) if place % 3 < 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_constrained_draft_is_accepted(llm_of: MakeLLM, backend: str) -> None:
    arguments = {"dtype": "float64" if backend == "reference" else "float32", "kernels": backend}
    llm = llm_of(draft="near", spec_length=4, **arguments)
    params = SamplingParams(temperature=0, max_tokens=30)
    (request,) = llm.engine.add_request([70, 71, 72], params, "r", constraint=TWO_AND_ONE.constrain)
    while llm.engine.has_unfinished():
        llm.engine.step()
    assert request.metrics.speculative_decoding.num_accepted_draft_tokens > 10
