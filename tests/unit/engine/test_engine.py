"""The engine with a small real model: refused requests, released memory, and the verifier of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from speculant.cache import KVCache, KVStorage, paged_cache
from speculant.config import Limits
from speculant.drafting import Drafter, Drafters, DraftModelRunner, ModelDrafter, NgramDrafter, NgramOptions
from speculant.engine import Engine, EngineOptions, load_verifiers
from speculant.errors import ConfigError, RequestError
from speculant.lengths import Fixed
from speculant.models import Batch, CausalLM, Hidden, load_model
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from tests.models import END, VOCAB_SIZE, Checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = list(range(40, 60))
LIMITS = Limits(max_model_len=64, max_num_seqs=3, max_num_batched_tokens=32)
NUM_BLOCKS = 3 * 8


class Fallible:
    """A model whose passes can be interrupted."""

    def __init__(self, model: CausalLM) -> None:
        self.model, self.fails = model, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        hidden = self.model.forward(batch, storage, taps)
        if self.fails:
            raise KeyboardInterrupt
        return hidden


@pytest.fixture(scope="module")
def target(checkpoints: Checkpoints) -> CausalLM:
    return load_model(checkpoints.target, "float64", "cpu").model


@pytest.fixture(scope="module")
def draft(checkpoints: Checkpoints) -> CausalLM:
    return load_model(checkpoints.near, "float64", "cpu").model


def cache_of(model: CausalLM) -> KVCache:
    return paged_cache(model.cache_shape, NUM_BLOCKS, 8)


def engine_of(target: Any, drafter: Drafter | None = None, verification: str = "auto") -> Engine:
    options = EngineOptions(LIMITS, seed=0, end_token_ids=frozenset({END}), verification=verification)
    return Engine(options, target, cache_of(target), KeyedChances(), load_verifiers(), Fixed(3), Drafters.of(drafter))


def model_drafter(draft: CausalLM) -> ModelDrafter:
    runner = DraftModelRunner(draft, cache_of(draft), KeyedChances(), LIMITS.max_num_batched_tokens)
    return ModelDrafter(runner, VOCAB_SIZE)


def run(engine: Engine) -> dict[str, list[int | None]]:
    """Step to the end, checking every step; return each request's tokens."""
    said: dict[str, list[int | None]] = {}
    for _ in range(500):
        for output in engine.step():
            said.setdefault(output.request_id, []).append(output.token)
        engine.check()
        if not engine.has_unfinished():
            return said
    raise AssertionError("the engine does not come to an end")


def test_an_idle_step_does_nothing(target: CausalLM) -> None:
    engine = engine_of(target)
    assert engine.step() == []
    assert not engine.has_unfinished()
    assert engine.metrics.steps == 0


def test_a_prompt_is_answered_and_forgotten(target: CausalLM) -> None:
    engine = engine_of(target)
    (request,) = engine.add_request(PROMPT, GREEDY, "a")
    assert engine.has_unfinished()
    said = run(engine)
    assert said == {"a": request.output}
    assert engine._context.cache.free_tokens() == 3 * 64
    assert engine.metrics.tokens == 12


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], GREEDY, "no tokens"),
        ([1] * 64, GREEDY, "64"),
        ([1] * 200, GREEDY, "200"),
        ([1, -1], GREEDY, "-1"),
        ([1, VOCAB_SIZE], GREEDY, str(VOCAB_SIZE)),
        ([1, 2.0], GREEDY, "2.0"),
        ([1, "2"], GREEDY, "'2'"),
        (PROMPT, SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        (PROMPT, SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (PROMPT, SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
    ],
)
def test_an_unservable_request_is_refused_and_affects_no_other(
    target: CausalLM, prompt: list[Any], params: SamplingParams, named: str
) -> None:
    engine = engine_of(target)
    engine.add_request(PROMPT, GREEDY, "good")
    engine.step()
    with pytest.raises(RequestError) as caught:
        engine.add_request(prompt, params, "bad")
    assert named in caught.value.problem
    assert caught.value.fix
    alone = engine_of(target)
    alone.add_request(PROMPT, GREEDY, "good")
    assert ([], run(engine)["good"]) == ([], run(alone)["good"][1:])


def test_the_longest_prompt_that_fits_gets_one_token(target: CausalLM) -> None:
    engine = engine_of(target)
    (request,) = engine.add_request([1] * 63, SamplingParams(temperature=0, max_tokens=None), "a")
    run(engine)
    assert (request.num_output, request.ending.reason) == (1, "length")


def test_an_unknown_verifier_is_refused_at_once(target: CausalLM) -> None:
    with pytest.raises(ConfigError, match=r"'rejektion'(?s:.*)did you mean 'rejection'"):
        engine_of(target, verification="rejektion")
    params = SamplingParams(speculation={"verification": "mach"})
    for drafter in (None, NgramDrafter(NgramOptions())):
        engine = engine_of(target, drafter)
        with pytest.raises(ConfigError, match="did you mean 'match'"):
            engine.add_request(PROMPT, params, "a")
        assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("values", "configured", "verifier"),
    [
        ({}, "auto", "block"),
        ({"temperature": 0}, "auto", "match"),
        ({"seed": 1}, "auto", "match"),
        ({}, "match", "match"),
        ({"temperature": 0}, "rejection", "rejection"),
        ({"seed": 1}, "rejection", "match"),  # else the seed's text would depend on speculation
        ({"speculation": {"verification": "match"}}, "rejection", "match"),
        ({"speculation": {"verification": "rejection"}}, "match", "rejection"),
        ({"speculation": {"num_speculative_tokens": 1}}, "auto", "block"),
        ({"speculation": True}, "auto", "block"),
        ({"speculation": False}, "auto", None),
    ],
)
def test_a_request_gets_the_rule_that_fits_it(
    target: CausalLM, draft: CausalLM, values: dict[str, Any], configured: str, verifier: str | None
) -> None:
    engine = engine_of(target, model_drafter(draft), configured)
    (request,) = engine.add_request(PROMPT, SamplingParams(**values), "a")
    assert request.metrics.verification == verifier
    assert request.drafts.verifier == (verifier or "match")
    assert request.drafts.shared_noise == (request.drafts.verifier == "match")


def test_deterministic_drafts_are_matched(target: CausalLM) -> None:
    engine = engine_of(target, NgramDrafter(NgramOptions()))
    (request,) = engine.add_request(PROMPT, SamplingParams(), "a")
    assert (request.drafts.verifier, request.metrics.verification) == ("match", "match")


def test_without_a_drafter_no_rule_is_reported(target: CausalLM) -> None:
    engine = engine_of(target)
    (request,) = engine.add_request(PROMPT, SamplingParams(), "a")
    assert request.metrics.verification is None


def test_end_tokens_are_the_request_s_and_the_model_s(target: CausalLM) -> None:
    for params, expected in (
        (SamplingParams(), {END}),
        (SamplingParams(stop_token_ids=[5]), {END, 5}),
        (SamplingParams(stop_token_ids=[5], ignore_eos=True), {5}),
        (SamplingParams(ignore_eos=True), set()),
    ):
        (request,) = engine_of(target).add_request(PROMPT, params, "a")
        assert request.stops.end_token_ids == expected


def test_samples_differ_in_seeds_and_a_given_seed_fixes_them(target: CausalLM) -> None:
    engine = engine_of(target)
    seeds = [
        [request.seed for request in engine.add_request(PROMPT, SamplingParams(n=3, seed=seed), name)]
        for name, seed in (("a", 4), ("b", 4), ("c", 5))
    ]
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 3
    unseeded = [engine.add_request(PROMPT, SamplingParams(), name)[0].seed for name in "def"]
    assert len(set(unseeded)) == 3


def test_an_id_can_be_used_again_after_its_request(target: CausalLM) -> None:
    """Sequences of one id share their prompt's keys and values, so two prompts must not share an id."""
    engine = engine_of(target)
    (first,) = engine.add_request(PROMPT, GREEDY, "a")
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request(PROMPT[::-1], GREEDY, "a")
    run(engine)
    (again,) = engine.add_request(PROMPT[::-1], GREEDY, "a")
    run(engine)
    assert first.output != again.output


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_aborted_request_frees_everything_at_once(target: CausalLM, draft: CausalLM, steps: int) -> None:
    drafter = model_drafter(draft)
    engine = engine_of(target, drafter)
    aborted = engine.add_request(PROMPT, SamplingParams(n=2, max_tokens=30), "a")
    engine.add_request(PROMPT[::-1], GREEDY, "b")
    engine.add_request(PROMPT[1:], GREEDY, "waits")
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    engine.check()
    assert all(request.ending.reason == "abort" for request in aborted)
    for cache in (engine._context.cache, drafter.caches[0]):
        assert all(cache.length(request.seq_id) == 0 for request in aborted)
    said = run(engine)
    assert "a" not in said
    assert engine._context.cache.free_tokens() == drafter.caches[0].free_tokens() == 3 * 64


def test_a_second_abort_and_an_unknown_id_are_ignored(target: CausalLM) -> None:
    engine = engine_of(target)
    engine.add_request(PROMPT, GREEDY, "a")
    engine.abort("b")
    assert engine.has_unfinished()
    engine.abort("a")
    engine.abort("a")
    assert not engine.has_unfinished()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_others_continue_after_an_interrupted_pass(target: CausalLM, draft: CausalLM, steps: int) -> None:
    """The caller that interrupted it aborts its own request; another stream is not affected."""
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0)
    calm = engine_of(target, model_drafter(draft))
    calm.add_request(PROMPT * 2, params, "stays")
    expected = run(calm)["stays"]
    fallible = Fallible(target)
    engine = engine_of(fallible, model_drafter(draft))
    (request,) = engine.add_request(PROMPT * 2, params, "stays")
    engine.add_request(PROMPT[::-1], GREEDY, "goes")
    for _ in range(steps):
        engine.step()
    fallible.fails = True
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.check()
    fallible.fails = False
    engine.abort("goes")
    run(engine)
    assert request.output == expected
    assert len(request.prompt_logprobs) == len(PROMPT) * 2 - 1


def test_time_and_passes_are_counted(target: CausalLM, draft: CausalLM) -> None:
    engine = engine_of(target, model_drafter(draft))
    (request,) = engine.add_request(PROMPT, GREEDY, "a")
    run(engine)
    timing = request.metrics.timing
    assert timing.target_passes == engine.metrics.steps < 12
    assert timing.num_tokens == 12 == len(timing.gaps) + 1
    assert timing.draft_s == pytest.approx(engine.metrics.draft_s)
    assert timing.verify_s == pytest.approx(engine.metrics.verify_s)
    assert timing.ttft_s is not None
    assert timing.ttft_s > 0
    assert 0 < timing.pass_s < timing.verify_s
    assert timing.queue_s is not None
    assert timing.prompt_s is not None
    assert timing.queue_s + timing.prompt_s == pytest.approx(timing.ttft_s)
    assert request.metrics.speculative_decoding.num_accepted_draft_tokens > 0


def test_computed_tokens_are_prompts_and_outputs(target: CausalLM) -> None:
    """A prompt of 40 tokens takes two steps of 32 rows; the second request finds all but 8 of them in the cache."""
    engine = engine_of(target)
    engine.add_request(PROMPT * 2, GREEDY, "a")
    run(engine)
    assert engine.metrics.computed_tokens == 40 + 12
    engine.add_request(PROMPT * 2, GREEDY, "b")
    run(engine)
    cached = engine.metrics.prefix_hit_tokens
    assert 0 < cached < 40
    assert engine.metrics.computed_tokens == 2 * (40 + 12) - cached
    assert sum(engine.metrics.step_tokens) == engine.metrics.steps
    assert engine.metrics.step_tokens[:1] == (engine.metrics.steps - 3,), "steps with one token"
