"""A prompt that was read ahead gives the same tokens and log-probabilities, in every kind of model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from speculant.cache import paged_cache
from speculant.config import Limits
from speculant.drafting import Drafters
from speculant.engine import Engine, EngineOptions
from speculant.kernels import NativeSampler
from speculant.lengths import Fixed
from speculant.models import CausalLM, load_model
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import Request, Sender
from tests.exactness.test_native_decoder import make_decoder, packed, tokens_of
from tests.fakes import ScriptedDrafter, known_verifiers
from tests.models import Shape, write_checkpoint
from tests.native import on
from tests.small_models import NATIVE
from tests.unit.models.families import VARIANTS

pytestmark = [pytest.mark.usefixtures("one_thread"), NATIVE]

BLOCK = 4
LIMITS = Limits(max_model_len=64, max_num_seqs=3, max_num_batched_tokens=20)
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full": (None, None),
    "full and 5": (None, 5),
    "12 and 5": (12, 5),
    "7": (7, 7),
}
STATES = ("qwen3_5_text", "lfm2")
TEXT = tokens_of(5)[:40]
PARAMS = (
    SamplingParams(temperature=0, max_tokens=6, logprobs=3),
    SamplingParams(temperature=0.8, seed=4, max_tokens=6, logprobs=0),
)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CausalLM]:
    """Return what makes a model of a kind."""

    def made(kind: str) -> CausalLM:
        if kind in WINDOWS:
            return packed(make_decoder(torch.float32, windows=WINDOWS[kind]), on(threads=1))
        shape = Shape(family=kind, layers=3, settings=tuple(VARIANTS[kind]["plain"].items()))
        folder = write_checkpoint(tmp_path_factory.mktemp(kind) / "model", shape)
        return load_model(folder, dtype="float32", kernels="native").model

    return made


def engine_of(model: CausalLM, stored: torch.dtype | None = None) -> Engine:
    """Return an engine that drafts wrong tokens and right ones. stored: the type of keys and values."""
    kernels = getattr(model, "kernels", None)
    assert kernels is not None
    sampler = NativeSampler(kernels)
    return Engine(
        EngineOptions(LIMITS, 0, frozenset(), sampler=sampler), model,
        paged_cache(replace(model.cache_shape, stored=stored), 60, BLOCK), KeyedChances(sampler), known_verifiers(),
        Fixed(2), Drafters.of(ScriptedDrafter(lambda request: [request.tokens[-1], 3])),
    )  # fmt: skip


def step(engine: Engine) -> None:
    engine.step()
    engine.check()


def finish(engine: Engine) -> None:
    while engine.has_unfinished():
        step(engine)


def prepare(engine: Engine, prompt: Sequence[int], sender: Sender = Sender()) -> int:  # noqa: B008 - it is frozen
    """Prepare a prompt as far as it goes."""
    made = engine.prepare(prompt, sender)
    while engine.prepares:
        step(engine)
    return made.done.result(0)


def answers(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Request]:
    """Return the requests of all prompts with all settings, after they ended."""
    asked = [(prompt, params) for prompt in prompts for params in PARAMS]
    made = [engine.add_request(*each, f"r{place}")[0] for place, each in enumerate(asked)]
    finish(engine)
    return made


def assert_same(found: Sequence[Request], expected: Sequence[Request]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.output == other.output
        assert own.logprobs == other.logprobs, "other bits"


@pytest.mark.parametrize("kind", [*WINDOWS, *STATES])
def test_prepared_prompts_give_the_same_bits(model_of: Callable[[str], CausalLM], kind: str) -> None:
    model, chance = model_of(kind), random.Random(0)
    prompts = [TEXT[:length] for length in (9, 16, 17, 31, 40)]
    expected = [answers(engine_of(model), [prompt]) for prompt in prompts]
    for prompt, wanted in zip(prompts, expected, strict=True):
        for ahead in (len(prompt), len(prompt) - 1, chance.randint(4, len(prompt))):
            engine = engine_of(model)
            whole = (ahead - (kind in STATES)) // BLOCK * BLOCK
            assert prepare(engine, prompt[:ahead]) == whole
            found = answers(engine, [prompt])
            assert_same(found, wanted)
            assert found[0].metrics.cached_tokens == min(whole, len(prompt) - 1)
            assert engine.metrics.prepared_tokens == whole
            assert 0 < engine.metrics.prepared_tokens_used <= engine.metrics.prepared_tokens


def test_rounded_keys_are_the_same_too(model_of: Callable[[str], CausalLM]) -> None:
    model = model_of("full")
    expected, engine = answers(engine_of(model, torch.int8), [TEXT]), engine_of(model, torch.int8)
    assert prepare(engine, TEXT[:30]) == 28
    assert_same(answers(engine, [TEXT]), expected)


@pytest.mark.parametrize("kind", ["full", "full and 5", *STATES])
def test_a_newcomer_waits_for_no_second_part(model_of: Callable[[str], CausalLM], kind: str) -> None:
    model = model_of(kind)
    other, whole = [5, 6, 7, 8, 9], 36 if kind in STATES else 40
    expected = answers(engine_of(model), [other]), answers(engine_of(model), [TEXT])
    engine = engine_of(model)
    made = engine.prepare(TEXT)
    step(engine)
    computed = engine.metrics.prepared_tokens
    assert 0 < computed < whole
    found = answers(engine, [other])
    assert engine.metrics.prepared_tokens == computed, "something was prepared while a request ran"
    assert not made.done.done()
    while engine.prepares:
        step(engine)
    assert made.done.result(0) == whole
    assert engine.metrics.prepared_tokens == whole, "a part was computed twice"
    assert_same(found, expected[0])
    assert_same(answers(engine, [TEXT]), expected[1])


@pytest.mark.parametrize("kind", STATES)
def test_a_preparation_leaves_one_state(model_of: Callable[[str], CausalLM], kind: str) -> None:
    engine = engine_of(model_of(kind))
    assert prepare(engine, TEXT) == 36
    records = engine._context.cache.records
    assert records is not None
    assert records.num_kept == 1


def test_a_salt_of_one_client_serves_no_other(model_of: Callable[[str], CausalLM]) -> None:
    engine = engine_of(model_of("full"))
    prepare(engine, TEXT, Sender(cache_salt="one"))
    (request,) = engine.add_request(TEXT, PARAMS[0], "r", cache_salt="other")
    finish(engine)
    assert request.metrics.cached_tokens == 0
    (request,) = engine.add_request(TEXT, PARAMS[0], "r", cache_salt="one")
    finish(engine)
    assert request.metrics.cached_tokens == 39
