"""A draft in one native call is the draft made token by token: the same tokens from the same probs, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from speculant.cache.base import CacheShape, KVCache
from speculant.cache.paged import PagedKVCache
from speculant.cache.slotted import SlottedKVCache
from speculant.drafting.growth.chains import grow
from speculant.kernels.native import QUANTIZED
from speculant.kernels.native_sampler import NativeSampler
from speculant.models import native_decoder
from speculant.models.base import Chain, SequenceInput, build_batch
from speculant.models.native_decoder import NativeDecoder
from speculant.params import SamplingParams
from speculant.sampling.chance import KeyedChances
from speculant.types import DraftTree
from tests.exactness.test_native_decoder import SETS, make_decoder, make_native, packed, tokens_of
from tests.models import make_request

pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels are not built")

DISTRIBUTIONS = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 2.0, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.02},
]  # fmt: skip
LIMITS = [3, 0, 5, 1, 4]  # tokens to draw; 0 = a backlog that is only fed
COUPLED = [[True] * 5, [False] * 5, [True, False, True, False, False]]
CACHES = {
    "slotted": lambda shape: SlottedKVCache(shape, 8, 64),
    "paged": lambda shape: PagedKVCache(shape, 100, 4),
}


def cache_of(shape: CacheShape, kind: str) -> KVCache:
    """Make a cache in which somebody else has been at work."""
    made: KVCache = CACHES[kind](shape)
    made.reserve(99, 3)
    return made


def make_chains(model: NativeDecoder, shared_noise: Sequence[bool]) -> list[Chain]:
    """Make five chains at different places in different texts; every second one has a backlog."""
    chances, made = KeyedChances(NativeSampler(model.kernels)), []
    for seq_id, (distribution, limit, shares) in enumerate(zip(DISTRIBUTIONS, LIMITS, shared_noise, strict=True)):
        tokens = tokens_of(seq_id, model.vocab_size)[: 9 + 5 * seq_id]
        params = SamplingParams(**distribution)  # type: ignore[arg-type]
        request = make_request(tokens, params=params, seq_id=seq_id, shared_noise=shares)
        made.append(Chain(request, tokens[-1:] if seq_id % 2 else tokens[5:], limit, chances.draft(request)))
    return made


@torch.inference_mode()
def feed_before(model: NativeDecoder, made: list[Chain], cache: KVCache) -> None:
    """Feed what comes before each chain."""
    feeds = [
        SequenceInput(chain.request.seq_id, chain.request.tokens[: -len(chain.feed)], DraftTree.empty())
        for chain in made
    ]
    model.forward(build_batch(feeds, cache, torch.device("cpu")), cache)


@torch.inference_mode()
def grown(
    model: NativeDecoder, kind: str, shared_noise: Sequence[bool], vocab_size: int, together: bool = True
) -> list[Chain]:
    """Let the chains grow, all at once or one after the other."""
    cache, made = cache_of(model.cache_shape, kind), make_chains(model, shared_noise)
    feed_before(model, made, cache)
    for share in [made] if together else [[chain] for chain in made]:
        grow(model, share, cache, vocab_size, NativeSampler(model.kernels))
    for chain in [chain for chain in made if len(chain.tokens) == chain.limit]:
        assert cache.length(chain.request.seq_id) == len(chain.request.tokens) + max(chain.limit - 1, 0)
    cache.check()
    return made


def assert_same(some: list[Chain], others: list[Chain]) -> None:
    assert [chain.tokens for chain in some] == [chain.tokens for chain in others]
    for one, other in zip(some, others, strict=True):
        assert (one.probs is None) == (other.probs is None) == (one.request.shared_noise or not one.tokens)
        if one.probs is not None and other.probs is not None:
            assert torch.equal(one.probs, other.probs)


@pytest.mark.parametrize("vocab_size", [96, 80, 130])
@pytest.mark.parametrize("shared_noise", COUPLED)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("quantization", [None, *QUANTIZED])
@pytest.mark.parametrize("isa", SETS)
def test_one_call_is_many(
    isa: str,
    quantization: str | None,
    kind: str,
    shared_noise: list[bool],
    vocab_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_native(isa, QUANTIZED[quantization] if quantization else None)
    at_once = grown(model, kind, shared_noise, vocab_size)
    alone = grown(model, kind, shared_noise, vocab_size, together=False)
    monkeypatch.setattr(native_decoder, "can_replay", lambda chain: False)
    stepwise = grown(model, kind, shared_noise, vocab_size)
    assert_same(at_once, stepwise)
    assert_same(alone, stepwise)
    assert [len(chain.tokens) for chain in stepwise] == LIMITS
    assert len({token for chain in stepwise for token in chain.tokens}) > 5


def test_a_chain_with_a_history_is_drawn_step_by_step_beside_one_without() -> None:
    """Penalties are counted in Python; the neighbour is none the worse."""
    model = make_native()
    plain = grown(model, "paged", [True] * 5, 96)
    cache, made = cache_of(model.cache_shape, "paged"), make_chains(model, [True] * 5)
    penalised = make_request(tokens_of(0)[:9], params=SamplingParams(repetition_penalty=1.3), seq_id=50)
    extra = Chain(penalised, penalised.tokens, 4, KeyedChances(NativeSampler(model.kernels)).draft(penalised))
    feed_before(model, made, cache)
    with torch.inference_mode():
        grow(model, [extra, *made], cache, 96, NativeSampler(model.kernels))
    assert len(extra.tokens) == 4
    assert_same(made, plain)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", CACHES)
def test_a_chain_ends_where_the_model_fails(kind: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token drawn from NaN would be accepted or rejected by chance; the neighbours are not affected."""
    healthy = grown(make_native(), kind, [False] * 5, 96)
    poison = next(token for token in healthy[2].tokens[:-1] if token not in healthy[2].request.tokens)
    decoder = make_decoder()
    decoder.model.embed_tokens.weight[poison] = torch.nan
    monkeypatch.setattr(native_decoder, "can_replay", lambda chain: at_once)
    failing = grown(packed(decoder, make_native().kernels), kind, [False] * 5, 96)
    for chain, whole in list(zip(failing, healthy, strict=True))[1:]:  # what is not a number has a best one: the first
        text = [*chain.request.tokens, *whole.tokens]
        sound = text.index(poison) + 1 if poison in text else len(text)
        assert chain.tokens == whole.tokens[: max(0, sound - len(chain.request.tokens))]
        assert not chain.tokens or (chain.probs is not None and len(chain.probs) == len(chain.tokens))
    assert 0 < len(failing[2].tokens) < len(healthy[2].tokens)
