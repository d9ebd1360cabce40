"""Beam search finds what transformers finds, on a small random Llama with the same weights in both."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from speculant.cache.factory import paged_cache
from speculant.config import Limits
from speculant.engine.build import load_verifiers
from speculant.engine.engine import Engine, EngineOptions
from speculant.lengths.fixed import Fixed
from speculant.params import SamplingParams
from speculant.sampling.chance import KeyedChances
from tests.beams import found_by
from tests.unit.models.families import Pair, make_pair, random_tokens

LIMITS = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=128)
Beam = tuple[list[int], float]  # the tokens behind the prompt, up to the end token, and the score


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("beams"), "llama", "llama3").in_float64()


def theirs(pair: Pair, prompt: list[int], params: SamplingParams, ends: Sequence[int]) -> list[Beam]:
    found = pair.theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
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


def ours(pair: Pair, prompt: list[int], params: SamplingParams, ends: Sequence[int]) -> list[Beam]:
    model = pair.ours
    engine = Engine(
        EngineOptions(LIMITS, 0, frozenset(ends)),
        model,
        paged_cache(model.cache_shape, 32, 4),
        KeyedChances(),
        load_verifiers(),
        Fixed(0),
    )
    requests = engine.add_request(prompt, params, "search")
    while engine.has_unfinished():
        engine.step()
        engine.check()
    assert [request.error for request in requests] == [None] * len(requests)
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
        prompt = random_tokens(5 + seed, seed)
        ends = likely_ends(pair, prompt)[:num_ends]
        params = SamplingParams(beam_width=width, n=width, max_tokens=10, length_penalty=length_penalty)
        expected, found = theirs(pair, prompt, params, ends), ours(pair, prompt, params, ends)
        assert [text for text, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        ended += sum(text[-1] in ends for text, _ in found)
    assert (ended > 0) == (num_ends > 0) or length_penalty > 1, "no beam ended: a weak test"


def test_fewer_samples_are_the_best_of_them(pair: Pair) -> None:
    prompt = random_tokens(6)
    four = ours(pair, prompt, SamplingParams(beam_width=4, n=4, max_tokens=10), ())
    assert ours(pair, prompt, SamplingParams(beam_width=4, n=2, max_tokens=10), ()) == four[:2]
    assert four == sorted(four, key=lambda beam: -beam[1])
