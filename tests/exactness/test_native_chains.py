"""A draft in one native call is the draft made token by token: the same tokens from the same probs, bit for bit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest
import torch

from speculant.cache import CacheShape, KVCache, paged_cache, slotted_cache
from speculant.drafting import grow_chains
from speculant.kernels import NativeSampler, panel_rows
from speculant.models import ROUNDINGS, Chain, LikelyPanels, NativeDecoder, SequenceInput, build_batch, is_foreseeable
from speculant.models.native import decoder as native_decoder
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances, MostLikely
from speculant.types import DraftTree
from tests.automata import Automaton
from tests.exactness.test_native_decoder import make_decoder, make_native, packed, tokens_of
from tests.models import make_request
from tests.native import SETS, needs_kernels

pytestmark = needs_kernels

DISTRIBUTIONS = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 2.0, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.02},
]  # fmt: skip
LIMITS = [3, 0, 5, 1, 4]  # tokens to draw; 0 = a backlog that is only fed
COUPLED = [[True] * 5, [False] * 5, [True, False, True, False, False]]
CACHES = {
    "slotted": lambda shape: slotted_cache(shape, 8, 64),
    "paged": lambda shape: paged_cache(shape, 100, 4),
}


def cache_of(shape: CacheShape, kind: str) -> KVCache:
    """Make a cache that another sequence has used before."""
    made: KVCache = CACHES[kind](shape)
    made.reserve(99, 3)
    return made


def make_chains(
    model: NativeDecoder,
    shared_noise: Sequence[bool],
    seed: int | None = None,
    stop_below: float = 0.0,
    stop_path: float = 0.0,
) -> list[Chain]:
    """Make five chains at different places in different texts; every second one has a backlog."""
    chances, made = KeyedChances(NativeSampler(model.kernels)), []
    for seq_id, (distribution, limit, shares) in enumerate(zip(DISTRIBUTIONS, LIMITS, shared_noise, strict=True)):
        tokens = tokens_of(seq_id, model.vocab_size)[: 9 + 5 * seq_id]
        params = SamplingParams(seed=seed, **distribution)  # type: ignore[arg-type]
        request = make_request(tokens, params=params, seq_id=seq_id, shared_noise=shares)
        chance = MostLikely() if stop_below and params.greedy else chances.draft(request)
        inputs = tokens[-1:] if seq_id % 2 else tokens[5:]
        made.append(Chain(request, inputs, limit, chance, stop_below=stop_below, stop_path=stop_path))
    return made


@torch.inference_mode()
def feed_before(model: NativeDecoder, made: list[Chain], cache: KVCache) -> None:
    """Compute the context of each chain."""
    feeds = [
        SequenceInput(chain.request.seq_id, chain.request.tokens[: -len(chain.input_tokens)], DraftTree.empty())
        for chain in made
    ]
    model.forward(build_batch(feeds, cache, torch.device("cpu")), cache.storage)


@torch.inference_mode()
def grown(
    model: NativeDecoder,
    kind: str,
    shared_noise: Sequence[bool],
    vocab_size: int,
    together: bool = True,
    seed: int | None = None,
    **ends: float,
) -> list[Chain]:
    """Grow the chains, all at once or one after the other. ends: where they end, see `Chain`."""
    cache, made = cache_of(model.cache_shape, kind), make_chains(model, shared_noise, seed, **ends)
    feed_before(model, made, cache)
    for share in [made] if together else [[chain] for chain in made]:
        grow_chains(model, share, cache, vocab_size, NativeSampler(model.kernels))
    for chain in [chain for chain in made if len(chain.tokens) == chain.limit]:
        assert cache.length(chain.request.seq_id) == len(chain.request.tokens) + max(chain.limit - 1, 0)
    cache.check()
    return made


def assert_same(some: list[Chain], others: list[Chain]) -> None:
    assert [chain.tokens for chain in some] == [chain.tokens for chain in others]
    for one, other in zip(some, others, strict=True):
        assert (one.probs is None) == (other.probs is None) == (not one.emits_probs or not one.tokens)
        if one.probs is not None and other.probs is not None:
            assert torch.equal(one.probs, other.probs)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("isa", SETS)
def test_a_draft_reads_likely_rows_of_a_large_head(isa: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws as if the other tokens were impossible, but for seeded requests that a ratio rule verifies."""
    model, every = make_native(isa), make_native(isa)
    read = panel_rows(model.kernels)
    model._likely = LikelyPanels(96, read)
    model._likely.panels = array("q", [1])
    monkeypatch.setattr(LikelyPanels, "add", lambda self, tokens: None)
    shares = COUPLED[2]
    likely, whole = (grown(each, kind, shares, 96) for each in (model, every))
    assert {token // read for chain in likely for token in chain.tokens} == {1}
    assert [chain.tokens for chain in likely] != [chain.tokens for chain in whole], "a weak test"
    assert_same(grown(model, kind, shares, 96, seed=5), grown(every, kind, shares, 96, seed=5))
    logits, others = every.logits, torch.arange(96) // read != 1
    monkeypatch.setattr(every, "logits", lambda hidden: logits(hidden).masked_fill(others, -torch.inf))
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    assert_same(likely, grown(every, kind, shares, 96))


def test_likely_rows_are_those_of_low_ids_and_of_texts() -> None:
    """A third of all panels is read at most, without those that texts had before others."""
    likely = LikelyPanels(48 * 60, 48)
    assert [*likely.panels] == [*range(10)]
    likely.add([48 * panel + 7 for panel in (30, 2, 31, 59, 30)])
    likely.add([48 * 60, 2**31, -1])  # a target may have tokens that its draft lacks
    assert sorted(likely.panels) == [*range(10), 30, 31, 59]
    likely.add([48 * 30])  # it is the latest now
    for panel in range(32, 41):
        likely.add([48 * panel])
    assert sorted(likely.panels) == [*range(10), 30, *range(32, 41)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("vocab_size", [96, 80, 130])
@pytest.mark.parametrize("shared_noise", COUPLED)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("quantization", [None, *ROUNDINGS])
@pytest.mark.parametrize("isa", SETS)
def test_one_call_is_many(
    isa: str,
    quantization: str | None,
    kind: str,
    shared_noise: list[bool],
    vocab_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_native(isa, ROUNDINGS[quantization] if quantization else None)
    at_once = grown(model, kind, shared_noise, vocab_size)
    alone = grown(model, kind, shared_noise, vocab_size, together=False)
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    stepwise = grown(model, kind, shared_noise, vocab_size)
    assert_same(at_once, stepwise)
    assert_same(alone, stepwise)
    assert [len(chain.tokens) for chain in stepwise] == LIMITS
    assert len({token for chain in stepwise for token in chain.tokens}) > 5


@pytest.mark.covering(2)
@pytest.mark.parametrize("stop_below", [0.02, 0.03, 0.2])
@pytest.mark.parametrize("shared_noise", COUPLED)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("isa", SETS)
def test_a_chain_ends_with_an_unlikely_token(
    isa: str, kind: str, shared_noise: list[bool], stop_below: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, size = make_native(isa), 96
    whole = grown(model, kind, shared_noise, size, stop_below=1e-300)
    at_once = grown(model, kind, shared_noise, size, stop_below=stop_below)
    alone = grown(model, kind, shared_noise, size, together=False, stop_below=stop_below)
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    assert_same(at_once, grown(model, kind, shared_noise, size, stop_below=stop_below))
    assert_same(alone, at_once)
    for chain, long in zip(at_once, whole, strict=True):
        assert chain.tokens == long.tokens[: len(chain.tokens)]
        if chain.probs is not None:
            drawn = [float(row[token]) for row, token in zip(chain.probs, chain.tokens, strict=True)]
            assert all(p >= stop_below for p in drawn[:-1])
            assert len(drawn) == chain.limit or drawn[-1] < stop_below
    assert at_once[0].probs is None, "a greedy token is not drawn from its distribution"
    assert [len(chain.tokens) for chain in whole] == LIMITS
    assert 0 < sum(len(chain.tokens) for chain in at_once) < sum(LIMITS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stop_path", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("shared_noise", COUPLED)
@pytest.mark.parametrize("isa", SETS)
def test_a_chain_ends_where_its_path_is_unlikely(
    isa: str, shared_noise: list[bool], stop_path: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_native(isa)
    ends = {"stop_below": 1e-300, "stop_path": stop_path}
    at_once = grown(model, "paged", shared_noise, 96, **ends)
    assert_same(at_once, grown(model, "paged", shared_noise, 96, together=False, **ends))
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    assert_same(at_once, grown(model, "paged", shared_noise, 96, **ends))
    for chain in [each for each in at_once if each.probs is not None]:
        drawn = [float(row[token]) for row, token in zip(chain.probs, chain.tokens, strict=True)]
        paths = [*accumulate(drawn, mul)]
        assert all(path >= stop_path for path in paths[:-1])
        assert len(drawn) == chain.limit or paths[-1] < stop_path
    assert 0 < sum(len(chain.tokens) for chain in at_once) < sum(LIMITS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("vocab_size", [96, 80, 130])
@pytest.mark.parametrize("shared_noise", COUPLED)
@pytest.mark.parametrize("isa", SETS)
def test_a_short_head_draws_its_own_tokens(
    isa: str, shared_noise: list[bool], vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tuple(range(1, 96, 3))
    model = make_native(isa, head_tokens=head)
    at_once = grown(model, "paged", shared_noise, vocab_size)
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    assert_same(at_once, grown(model, "paged", shared_noise, vocab_size))
    drawn = {token for chain in at_once for token in chain.tokens}
    assert len(drawn) > 3
    assert drawn <= set(head)
    assert [len(chain.tokens) for chain in at_once] == LIMITS


EDITED = [
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.9},
    {"temperature": 0.8, "logit_bias": {3: 9.5, 40: -float("inf"), 90: 9.0}},
    {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.4, "min_tokens": 7},
    {"temperature": 2.0, "top_k": 7, "repetition_penalty": 0.8},
    {"temperature": 0.1, "min_tokens": 6, "logit_bias": {3: 30.0}, "repetition_penalty": 1.1},
]  # fmt: skip
ENDS = frozenset({3, 95})


def make_edited(model: NativeDecoder, shared_noise: Sequence[bool]) -> list[Chain]:
    """Make chains whose probs depend on single tokens; four tokens of each are output."""
    chances, made = KeyedChances(NativeSampler(model.kernels)), []
    for seq_id, (settings, shares) in enumerate(zip(EDITED, shared_noise, strict=True)):
        tokens, params = tokens_of(seq_id, model.vocab_size)[: 9 + 5 * seq_id], SamplingParams(**settings)  # type: ignore[arg-type]
        shape = {"seq_id": seq_id, "shared_noise": shares, "end_token_ids": ENDS}
        request = make_request(tokens[:-4], tokens[-4:], params, **shape)  # type: ignore[arg-type]
        made.append(Chain(request, tokens[5:], 5, chances.draft(request)))
    return made


@torch.inference_mode()
def grown_edited(model: NativeDecoder, shared_noise: Sequence[bool], vocab_size: int) -> list[Chain]:
    cache, made = cache_of(model.cache_shape, "paged"), make_edited(model, shared_noise)
    feed_before(model, made, cache)
    grow_chains(model, made, cache, vocab_size, NativeSampler(model.kernels))
    return made


@pytest.mark.covering(2)
@pytest.mark.parametrize("vocab_size", [96, 130])
@pytest.mark.parametrize("shared_noise", COUPLED)
@pytest.mark.parametrize("isa", SETS)
def test_chains_with_edits_are_drawn_in_one_call(
    isa: str, shared_noise: list[bool], vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bias, end tokens and penalties, drafted tokens counted on the way: the bits of the chain drawn step by step."""
    model = make_native(isa)
    assert all(map(is_foreseeable, make_edited(model, shared_noise)))
    at_once = grown_edited(model, shared_noise, vocab_size)
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    stepwise = grown_edited(model, shared_noise, vocab_size)
    assert_same(at_once, stepwise)
    assert [len(chain.tokens) for chain in stepwise] == [5] * 5
    banned = [3 in chain.tokens[:place] for chain, place in ((stepwise[2], 3), (stepwise[4], 2))]
    assert (banned, stepwise[4].tokens[2]) == ([False, False], 3), "an end token was banned for too long, or too short"


@pytest.mark.parametrize("shared_noise", [True, False])
def test_a_constrained_chain_is_drawn_beside_others(shared_noise: bool) -> None:
    """It gets a mask for each step and ends where no token may follow; its neighbours stay the same."""
    model, shares = make_native(), [shared_noise] * 5
    plain = grown(model, "paged", shares, 96)
    cache, made = cache_of(model.cache_shape, "paged"), make_chains(model, shares)
    constraint = Automaton({0: {7: 1, 8: 1}, 1: {60: 2}, 2: {}}).constrain()
    request = make_request(tokens_of(0)[:9], seq_id=50, shared_noise=shared_noise, constraint=constraint)
    extra = Chain(request, request.tokens, 4, KeyedChances(NativeSampler(model.kernels)).draft(request))
    feed_before(model, made, cache)
    with torch.inference_mode():
        grow_chains(model, [extra, *made], cache, 96, NativeSampler(model.kernels))
    assert extra.tokens in ([7, 60], [8, 60])
    assert_same(made, plain)


@pytest.mark.parametrize("shared_noise", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", CACHES)
def test_a_chain_ends_where_the_model_fails(
    kind: str, at_once: bool, shared_noise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token drawn from NaN would be accepted or rejected by chance; the neighbours are not affected."""
    shares = [shared_noise] * 5
    healthy = grown(make_native(), kind, shares, 96)
    poison = next(token for token in healthy[2].tokens[:-1] if token not in healthy[2].request.tokens)
    decoder = make_decoder()
    decoder.model.embed_tokens.weight[poison] = torch.nan
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: at_once)
    failing = grown(packed(decoder, make_native().kernels), kind, shares, 96)
    for chain, whole in zip(failing, healthy, strict=True):
        text = [*chain.request.tokens, *whole.tokens]
        sound = text.index(poison) + 1 if poison in text else len(text)
        assert chain.tokens == whole.tokens[: max(0, sound - len(chain.request.tokens))]
        assert shared_noise or not chain.tokens or (chain.probs is not None and len(chain.probs) == len(chain.tokens))
    assert 0 < len(failing[2].tokens) < len(healthy[2].tokens)
