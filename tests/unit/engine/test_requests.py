"""`check_request` raises the errors of `add_request` before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.config import Limits
from speculant.drafting import DrafterNeeds, DrafterReads, Drafters
from speculant.engine import CheckedRequest, Engine, EngineOptions, RequestFactory
from speculant.errors import CapacityError, RequestError, SpeculantError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.lengths import Fixed
from speculant.sampling import KeyedChances
from speculant.types import Sender
from tests.fakes import ScriptedDrafter, known_verifiers, paged
from tests.models import Checkpoints

V = 6
LIMITS = Limits(max_model_len=8, max_num_seqs=2, max_num_batched_tokens=16, max_waiting=1)
TREES = ScriptedDrafter(lambda request: [1], DrafterNeeds(emits_tree=True))
CHAINS = ScriptedDrafter(lambda request: [1], DrafterNeeds())


def engine_of(drafter: ScriptedDrafter | None) -> Engine:
    target = TableModel(Pair(1, V, FULL_SUPPORT).target, V)
    options = EngineOptions(LIMITS, seed=0, end_token_ids=frozenset({0}))
    cache = paged(target.cache_shape, LIMITS)
    drafters = Drafters(make=_unknown) if drafter is None else Drafters({"d": drafter}, "d", _unknown)
    return Engine(options, target, cache, KeyedChances(), known_verifiers(), Fixed(2), drafters)


def _unknown(method: str) -> ScriptedDrafter:
    raise RequestError(f"nothing is named {method!r}", "use another name.")


BAD: Mapping[str, tuple[ScriptedDrafter | None, list[Any], dict[str, Any], dict[str, Any]]] = {
    "no tokens": (None, [], {}, {}),
    "too long": (None, [1] * 8, {}, {}),
    "unknown token": (None, [V], {}, {}),
    "no token": (None, ["1"], {}, {}),
    "bias of an unknown token": (None, [1], {"logit_bias": {V: 1.0}}, {}),
    "unknown stop token": (None, [1], {"stop_token_ids": [V]}, {}),
    "more samples than places": (None, [1], {"n": 4}, {}),
    "priority as text": (None, [1], {}, {"priority": "high"}),
    "salt as a number": (None, [1], {}, {"cache_salt": 7}),
    "salt with a zero": (None, [1], {}, {"cache_salt": "s\0long"}),
    "client as text": (None, [1], {}, {"client": "somebody"}),
    "constrained search": (None, [1], {"beam_width": 2}, {"constraint": object}),
    "unknown verifier": (CHAINS, [1], {"speculation": {"verification": "macht"}}, {}),
    "unknown verifier and no drafter": (None, [1], {"speculation": {"verification": "macht"}}, {}),
    "verifier of chains for trees": (TREES, [1], {"speculation": {"verification": "rejection"}}, {}),
    "unknown drafter": (CHAINS, [1], {"speculation": {"method": "magic"}}, {}),
    "no token but a truth value": (None, [True], {}, {}),
    "priority as a truth value": (None, [1], {}, {"priority": True}),
    "drafts without a drafter": (None, [1], {"speculation": True}, {}),
    "drafts for a search": (CHAINS, [1], {"speculation": True, "beam_width": 2}, {}),
    "prediction without a drafter": (None, [1], {"speculation": {"prediction": [1]}}, {}),
    "prediction that is not read": (CHAINS, [1], {"speculation": {"prediction": [1]}}, {}),
}


def error_of(call: Any) -> SpeculantError:
    with pytest.raises(SpeculantError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("name", BAD)
def test_check_raises_the_errors_of_adding(name: str) -> None:
    drafter, prompt, values, named = BAD[name]
    engine, params = engine_of(drafter), SamplingParams(**values)
    constraint, sender = named.get("constraint"), Sender(**{key: named[key] for key in named if key != "constraint"})
    found = error_of(lambda: engine.check_request(prompt, params, sender, constraint))
    expected = error_of(lambda: engine.add_request(prompt, params, "a", **named))
    assert (type(found), str(found)) == (type(expected), str(expected))
    assert not engine.has_unfinished()


READER = ScriptedDrafter(lambda request: request.drafts.prediction, DrafterNeeds(reads=DrafterReads(prediction=True)))


@pytest.mark.parametrize("prediction", ["text", [V], ["x"], [True], [1.0]])
def test_check_raises_the_errors_of_adding_a_prediction(prediction: Any) -> None:
    engine, params = engine_of(READER), SamplingParams(speculation={"prediction": prediction})
    found = error_of(lambda: engine.check_request([1], params))
    expected = error_of(lambda: engine.add_request([1], params, "a"))
    assert (type(found), str(found)) == (type(expected), str(expected))


@pytest.mark.parametrize("values", [{"seed": 3}, {"temperature": 0}], ids=str)
@pytest.mark.parametrize("drafter", [TREES, CHAINS], ids=["trees", "chains"])
@pytest.mark.parametrize("rule", [*known_verifiers(), "auto"])
def test_only_the_rule_that_is_used_has_to_fit(rule: str, drafter: ScriptedDrafter, values: dict[str, Any]) -> None:
    """A seeded request is verified by `match`, and a ratio rule hands greedy ones to another rule."""
    engine, params = engine_of(drafter), SamplingParams(speculation={"verification": rule}, max_tokens=3, **values)
    used = known_verifiers().get("match" if rule == "auto" or "seed" in values else rule)
    assert used is not None
    fits = (used.needs.greedy or used).needs.branches if params.greedy else used.needs.branches
    if fits or drafter is CHAINS:
        (request,) = engine.add_request([1], params, "a")
        while engine.has_unfinished():
            engine.step()
        assert request.ending.reason in ("length", "stop"), request.ending.error
    else:
        assert "understands chains" in str(error_of(lambda: engine.check_request([1], params)))


def test_a_request_keeps_its_settings() -> None:
    """A caller may change its own settings while the request runs, also after values were computed from them."""
    engine, params = engine_of(CHAINS), SamplingParams(temperature=0.5, max_tokens=3, logit_bias={1: 2.0})
    assert params.softened is params
    (request,) = engine.add_request([1, 2], params, "a")
    params.temperature, params.logit_bias = 0.0, {2: 1.0}
    assert (request.params.softened.temperature, dict(request.params.logit_bias)) == (0.5, {1: 2.0})
    assert list(request.params.biased) == [1]


def test_a_full_queue_does_not_fail_the_check() -> None:
    """It finds a place later, unlike one that asks for more samples than there are places."""
    engine = engine_of(None)
    for name in "abc":
        engine.add_request([1], SamplingParams(), name)
    engine.check_request([1], SamplingParams(n=3))
    with pytest.raises(CapacityError, match="2 sequences run|3 wait"):
        engine.add_request([1], SamplingParams(), "d")


def test_a_request_is_checked_once(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompts, check = LLM(checkpoints.target, dtype="float64"), list[Any](), RequestFactory.check

    def noted(factory: RequestFactory, prompt: Any, *others: Any) -> CheckedRequest:
        prompts.append(prompt)
        return check(factory, prompt, *others)

    monkeypatch.setattr(RequestFactory, "check", noted)
    llm.generate([[40], [50, 60]], SamplingParams(max_tokens=2))
    list(llm.stream([70], SamplingParams(max_tokens=2)))
    assert prompts == [[40], [50, 60], [70]]


def test_drafts_without_a_drafter_are_refused_with_the_reason(checkpoints: Checkpoints) -> None:
    llm = LLM(checkpoints.target, dtype="float64", use_speculative_decoding=False)
    with pytest.raises(RequestError, match=r"(?s)speculation=True.*use_speculative_decoding is False.*Fix: leave"):
        llm.generate("def f(", SamplingParams(speculation=True))
    assert llm.generate("def f(", SamplingParams(max_tokens=2))[0].finished


@pytest.mark.parametrize(
    "bad",
    [
        {"speculation": {"method": "ngram", "prediction": [1]}},
        {"speculation": {"method": "magic"}},
        {"speculation": True},
        {"n": 21},
    ],
)
def test_list_with_a_bad_request_fails_before_any_runs(checkpoints: Checkpoints, bad: dict[str, Any]) -> None:
    """More prompts come before it than there are places, so some would have to finish first."""
    drafts = "method" in str(bad)
    llm = LLM(checkpoints.target, dtype="float64", use_speculative_decoding=drafts, max_num_seqs=2, max_waiting=2)
    params = [SamplingParams(max_tokens=2)] * 20 + [SamplingParams(max_tokens=2, **bad)]
    with pytest.raises(SpeculantError):
        llm.generate(["def f("] * 21, params)
    assert llm.engine.metrics.steps == 0


def test_prompts_of_a_request_share_an_automaton() -> None:
    """A request may have 256 prompts and 1,024 words."""
    engine = engine_of(None)
    factory, params = engine._factory, SamplingParams(bad_words=[[1, 2, 3]])
    checked = [engine.check_request([number], params) for number in (1, 2, 3)]
    constraints = [factory.make(each, str(number), None)[0].constraint for number, each in enumerate(checked)]
    assert len({id(constraint._vocabulary) for constraint in constraints}) == 1  # type: ignore[union-attr]
    assert len(set(map(id, constraints))) == 3
