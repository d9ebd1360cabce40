"""Beam search finds what transformers finds, on a small random Llama and a T5 with the same weights in both.

Drafts change nothing. They come from a model that may be the target itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from speculant.cache import paged_cache
from speculant.config import Limits
from speculant.drafting import Drafters, DraftModelRunner, ModelDrafter
from speculant.engine import Engine, EngineOptions, load_verifiers
from speculant.lengths import Fixed
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from tests.beams import found_by
from tests.unit.models.families import SOURCE, Pair, make_pair, random_tokens

LIMITS = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=128)
Beam = tuple[list[int], float]  # the tokens behind the prompt, up to the end token, and the score


@pytest.fixture(scope="module", params=[("llama", "llama3"), ("t5", "flan")], ids=lambda names: names[0])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("beams"), *request.param).in_float64()


def theirs(pair: Pair, prompt: list[int], params: SamplingParams, ends: Sequence[int]) -> list[Beam]:
    read, begun = (list(SOURCE), {"decoder_input_ids": torch.tensor([prompt])}) if has_source(pair) else (prompt, {})
    found = pair.theirs.generate(
        torch.tensor([read]),
        attention_mask=torch.ones(1, len(read), dtype=torch.int64),
        **begun,
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = [sequence[len(prompt) :].tolist() for sequence in found.sequences]
    return [(up_to_end(text, ends), score) for text, score in zip(texts, found.sequences_scores.tolist(), strict=True)]


def up_to_end(text: list[int], ends: Sequence[int]) -> list[int]:
    places = [place for place, token in enumerate(text) if token in ends]
    return text[: places[0] + 1] if places else text


def has_source(pair: Pair) -> bool:
    return pair.ours.needs.source


def prompt_of(pair: Pair, seed: int) -> list[int]:
    """Return a prompt; that of a decoder after an encoder begins with its start token."""
    return [*[0] * has_source(pair), *random_tokens(5 + seed, seed)]


def draft_of(pair: Pair, layers: int | None) -> ModelDrafter:
    """Make a drafter whose model consists of some of the target's layers; None = all."""
    model = pair.ours if layers is None else pair.ours.truncated(layers)  # type: ignore[attr-defined]
    cache = paged_cache(model.cache_shape, 128, 4)
    return ModelDrafter(DraftModelRunner(model, cache, KeyedChances(), 128), model.vocab_size)


def ours(
    pair: Pair, prompt: list[int], params: SamplingParams, ends: Sequence[int], drafter: ModelDrafter | None = None
) -> list[Beam]:
    model = pair.ours
    engine = Engine(
        EngineOptions(LIMITS, 0, frozenset(ends)),
        model,
        paged_cache(model.cache_shape, 32, 4),
        KeyedChances(),
        load_verifiers(),
        Fixed(3 if drafter else 0),
        Drafters.of(drafter),
    )
    requests = engine.add_request(prompt, params, "search", source=SOURCE if has_source(pair) else ())
    while engine.has_unfinished():
        engine.step()
        engine.check()
    assert [request.ending.error for request in requests] == [None] * len(requests)
    return [(request.output, found_by(request)[1] or 0.0) for request in requests]


def likely_ends(pair: Pair, prompt: list[int]) -> list[int]:
    """Return tokens that beams contain: the best ones of a search without ends."""
    text, _ = ours(pair, prompt, SamplingParams(beam_width=4, max_tokens=8), ())[0]
    return [text[3], text[5]]


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_ends", [0, 1, 2])
@pytest.mark.parametrize("length_penalty", [-0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 5])
def test_beams_are_those_of_transformers(pair: Pair, width: int, length_penalty: float, num_ends: int) -> None:
    ended = 0
    for seed in range(2):
        prompt = prompt_of(pair, seed)
        ends = likely_ends(pair, prompt)[:num_ends]
        params = SamplingParams(beam_width=width, n=width, max_tokens=10, length_penalty=length_penalty)
        expected, found = theirs(pair, prompt, params, ends), ours(pair, prompt, params, ends)
        assert [text for text, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        ended += sum(text[-1] in ends for text, _ in found)
    assert (ended > 0) == (num_ends > 0) or length_penalty > 1, "no beam ended: a weak test"


@pytest.mark.covering(1)
@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("length_penalty", [-0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 5])
def test_drafted_beams_are_those_of_transformers(
    pair: Pair, width: int, length_penalty: float, layers: int | None
) -> None:
    for seed in range(2):
        prompt, drafter = prompt_of(pair, seed), draft_of(pair, layers)
        ends = likely_ends(pair, prompt)[:1]
        params = SamplingParams(beam_width=width, n=width, max_tokens=10, length_penalty=length_penalty)
        expected, found = theirs(pair, prompt, params, ends), ours(pair, prompt, params, ends, drafter)
        assert [text for text, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        (cache,) = drafter.caches
        assert cache.free_tokens() == cache.num_blocks * cache.block_size


def test_fewer_samples_are_the_best_of_them(pair: Pair) -> None:
    prompt = prompt_of(pair, 1)
    four = ours(pair, prompt, SamplingParams(beam_width=4, n=4, max_tokens=10), ())
    assert ours(pair, prompt, SamplingParams(beam_width=4, n=2, max_tokens=10), ()) == four[:2]
    assert four == sorted(four, key=lambda beam: -beam[1])
