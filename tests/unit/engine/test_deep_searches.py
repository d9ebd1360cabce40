"""Beam searches whose hypotheses part early and lie far apart: their trees are wide and hundreds of tokens deep."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from speculant import LLM, SamplingParams
from speculant.beams import Hypothesis
from speculant.cache.base import CacheShape, KVStorage
from speculant.cache.storage import slotted_cache
from speculant.config import Limits
from speculant.engine.build import load_verifiers
from speculant.engine.engine import Engine, EngineOptions
from speculant.lengths.fixed import Fixed
from speculant.models.base import Batch, Hidden, ModelNeeds
from speculant.sampling.chance import KeyedChances
from speculant.tree import depths_of
from speculant.types import Request
from tests.beams import beams_of, hypotheses, text_of
from tests.exactness.plain_beams import plain_beams
from tests.exactness.searches import assert_found
from tests.models import Shape, write_checkpoint
from tests.timing import cpu_seconds

START, DEEP = 0, 600
ROOMY = Limits(max_model_len=4 * DEEP, max_num_seqs=1, max_num_batched_tokens=4 * DEEP)
# The likeliest texts repeat 1 or 2 for ever, and are equally likely; a 3 is the second best, and leads to either.
NEXT = torch.tensor(
    [[-9, 0, 0, -9], [-9, 2, -9, 0.5], [-9, -9, 2, 0.5], [-9, 1, 1.1, -9]],
    dtype=torch.float64,
)


class LastTokenModel:
    """A `CausalLM` whose next token depends on the last one alone, so that a row costs next to nothing."""

    vocab_size, max_positions, num_layers = len(NEXT), 4 * DEEP, 1
    cache_shape = CacheShape(1, 1, 1, torch.float64, torch.device("cpu"))
    needs = ModelNeeds()

    def __init__(self) -> None:
        self.deepest = 0

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`; the hidden states are the tokens."""
        depths = (depth for segment in batch.segments for depth in [0, *depths_of(segment.parents)])
        self.deepest = max(self.deepest, *depths)
        return Hidden(batch.tokens[:, None].to(torch.float64))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return NEXT[hidden[:, 0].long()]


def search(model: LastTokenModel, width: int, longest: int, limits: Limits = ROOMY) -> list[Request]:
    """Search to the end."""
    cache = slotted_cache(model.cache_shape, 1, limits.max_model_len)
    options = EngineOptions(limits, 0, frozenset())
    engine = Engine(options, model, cache, KeyedChances(), load_verifiers(), Fixed(0))
    samples = engine.add_request([START], SamplingParams(beam_width=width, n=width, max_tokens=longest), "search")
    while engine.has_unfinished():
        engine.step()
    return samples


@pytest.mark.parametrize(
    ("limits", "deepest"),
    [
        pytest.param(ROOMY, DEEP - 1, marks=pytest.mark.slow),
        pytest.param(Limits(DEEP + 1, 1, 4 * DEEP), DEEP - 1, marks=pytest.mark.slow),
        pytest.param(Limits(4 * DEEP, 1, 512), 511, marks=pytest.mark.slow),
    ],
)
def test_search_deeper_than_512_is_the_plain_one(limits: Limits, deepest: int) -> None:
    """With room for all hypotheses in a pass, with memory for one of them, and with less budget than one is long."""
    model = LastTokenModel()
    samples = search(model, 3, DEEP, limits)
    assert model.deepest == deepest, "the hypotheses did not part at once"
    probs = NEXT.softmax(-1).tolist()
    assert_found(samples, plain_beams(lambda history: probs[history[-1]], (START,), 3, DEEP))


def seconds(longest: int) -> float:
    """Return the processor time of a search that ends after `longest` tokens."""
    return cpu_seconds(lambda: search(LastTokenModel(), 2, longest), repeats=2)


@pytest.mark.slow
def test_search_time_does_not_grow_with_the_cube() -> None:
    """Four times the tokens are sixteen times the nodes; cubic bookkeeping would take sixty-four times as long.

    A step's fixed cost makes the real ratio smaller than either: about 6, against almost 40.
    """
    assert seconds(DEEP) < 18 * seconds(DEEP // 4)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_checkpoint(tmp_path_factory.mktemp("deep") / "target", Shape(max_positions=4 * DEEP))
    return LLM(path, kernels="reference", dtype="float64", max_num_seqs=1, max_num_batched_tokens=4 * DEEP)


def next_round(llm: LLM, prompt: list[int], live: tuple[Hypothesis, ...]) -> list[tuple[tuple[int, ...], float]]:
    """Return the two likeliest continuations of two hypotheses, each of which is computed as a prompt."""
    found = []
    for each in live:
        (result,) = llm.generate([[*prompt, *each.tokens()]], SamplingParams(max_tokens=1, temperature=0, logprobs=2))
        (logprobs,) = result.outputs[0].logprobs or []
        found += [((*each.tokens(), token), each.logprob + entry.logprob) for token, entry in logprobs.items()]
    return sorted(found, key=lambda candidate: -candidate[1])[:2]


def test_tree_deeper_than_512_is_scored_as_its_texts(deep_model: LLM) -> None:
    """Two rounds of a search that is put where its hypotheses have 600 tokens each, beside plain passes."""
    prompt, engine = [72, 101, 108], deep_model.engine
    (request,) = engine.add_request(prompt, SamplingParams(beam_width=2, max_tokens=DEEP + 9), "deep")
    assert request.search is not None
    live = hypotheses((first, *((first * place) % 50 + 65 for place in range(1, DEEP))) for first in (67, 68))
    request.search.beams = dataclasses.replace(beams_of(request), rounds=DEEP, live=live)
    rounds = [beams_of(request)]
    for _ in range(2):
        engine.step()
        rounds.append(beams_of(request))
    engine.abort("deep")
    for before, after in itertools.pairwise(rounds):
        expected = next_round(deep_model, prompt, before.live)
        assert [text_of(each) for each in after.live] == [text for text, _ in expected]
        assert [each.logprob for each in after.live] == pytest.approx([logprob for _, logprob in expected], abs=1e-9)
