"""Every row of hidden states that a drafter observes is that of a fresh pass over the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from speculant.cache import KVCache, paged_cache, slotted_cache
from speculant.config import Limits
from speculant.drafting import DrafterNeeds, Drafters, StatelessDrafter, TargetNeeds
from speculant.engine import Engine, EngineOptions
from speculant.errors import ConfigError
from speculant.lengths import Fixed
from speculant.models import CausalLM, Hidden, SequenceInput, build_batch
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import CommittedRows, DraftTree, Request
from tests.fakes import known_verifiers
from tests.small_models import MODELS, make_model

REFERENCE = MODELS[0]
BACKENDS = [REFERENCE, *[name for name in MODELS if name.endswith(("-float32", "-int8"))][:2]]
LIMITS = Limits(max_model_len=48, max_num_seqs=3, max_num_batched_tokens=12)
LAYERS = (2, 0, 3, 1)  # in the drafter's own order; 3 = the last one's output after the final norm
COMMON = [7, 3, 9, 11, 2, 5, 6, 8]
PROMPTS = [[*COMMON, *COMMON, 1, 4], [*COMMON, *COMMON, 20, 21, 22], [33]]


class Reader:
    """Fresh passes of a model, each over a whole text in a cache of its own."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Hidden:
        cache = slotted_cache(self.model.cache_shape, 1, LIMITS.max_model_len)
        batch = build_batch([SequenceInput(0, tokens, DraftTree.empty())], cache, torch.device("cpu"))
        hidden = self.model.forward(batch, cache.storage, (0, 1, 2))
        return hidden._replace(taps=tuple((*hidden.taps, hidden.last)[layer] for layer in LAYERS))

    def next_token(self, tokens: Sequence[int]) -> int:
        return int(self.model.logits(self.hidden(tokens).last[-1:]).argmax())


class Watcher(StatelessDrafter):
    """Compares each row that it observes with a fresh pass, and drafts trees of right and wrong tokens.

    adopts: whether the target may take over prefixes of which it saw nothing.
    """

    needs = DrafterNeeds(target=TargetNeeds(hidden_layers=LAYERS), emits_tree=True)

    def __init__(self, reader: Reader, adopts: bool, exact: bool) -> None:
        self._reader, self._adopts, self._exact = reader, adopts, exact
        self._next: dict[int, int | None] = {}  # the position that the next row must have; None = any
        self.starts: list[int] = []
        self.num_rows = self.num_kept = 0

    def begin(self, request: Request) -> None:
        self._next[request.seq_id] = None if self._adopts else 0
        self.starts.append(request.seq_id)

    def match_prefix(self, request: Request) -> int:
        return len(request.tokens) if self._adopts else 0

    def end(self, request: Request) -> None:
        del self._next[request.seq_id]

    def observe(self, request: Request, rows: CommittedRows) -> None:
        end, expected = rows.start + len(rows.tokens), self._next[request.seq_id]
        assert expected in (None, rows.start), "rows are missing, or came twice"
        assert list(rows.tokens) == request.tokens[rows.start : end], "rows of tokens that are not committed"
        gained = list(rows.gained)
        assert gained == request.tokens[len(request.tokens) - len(gained) :]
        assert len(rows.hidden) == len(LAYERS)
        fresh = self._reader.hidden(request.tokens[:end])
        for seen, own in zip(rows.hidden, fresh.taps, strict=True):
            self._compare(seen, own[rows.start :])
        self._next[request.seq_id] = end
        self.num_rows += len(rows.tokens)
        self.num_kept += max(0, len(gained) - 1)

    def _compare(self, seen: Tensor, expected: Tensor) -> None:
        assert seen.shape == expected.shape
        assert torch.equal(seen, expected) if self._exact else torch.allclose(seen, expected, rtol=0, atol=1e-9)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [self._tree(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _tree(self, request: Request, limit: int) -> DraftTree:
        if limit < 4 or len(request.tokens) % 4 == 0:
            return DraftTree.empty()
        first = self._reader.next_token(request.tokens)
        second = self._reader.next_token([*request.tokens, first])
        wrong = (first + 1) % self._reader.model.vocab_size
        return DraftTree.of([wrong, first, wrong, second], [-1, -1, 0, 1])


def run(
    name: str, cache: str, adopts: bool, prompts: Sequence[list[int]], max_tokens: int = 14, num_blocks: int = 24
) -> tuple[Watcher, Engine, list[Request]]:
    model = make_model(name)
    sizes = (model.cache_shape, num_blocks, 4)
    made: KVCache = paged_cache(*sizes) if cache == "paged" else slotted_cache(model.cache_shape, 3, 48)
    watcher = Watcher(Reader(model), adopts, exact=name != REFERENCE)
    options = EngineOptions(LIMITS, 0, frozenset())
    engine = Engine(options, model, made, KeyedChances(), known_verifiers(), Fixed(4), Drafters.of(watcher))
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0 if index < 2 else 1.0, seed=index, n=1 + (index == 0), max_tokens=max_tokens
        )
        requests += engine.add_request(prompt, params, str(index))
    while engine.has_unfinished():
        engine.step()
        engine.check()
    assert {request.ending.error for request in requests} == {None}
    assert engine.metrics.drafter_errors == 0, "a row was not that of a fresh pass; see the log"
    return watcher, engine, requests


@pytest.mark.covering(1)
@pytest.mark.parametrize("adopts", [False, True], ids=["keeps states", "adopts"])
@pytest.mark.parametrize("cache", ["paged", "slotted"])
@pytest.mark.parametrize("name", BACKENDS)
def test_observed_rows_are_those_of_a_fresh_pass(name: str, cache: str, adopts: bool) -> None:
    """Prompts in chunks, drafts that branch, samples of one prompt, prefixes that others fed."""
    watcher, _, requests = run(name, cache, adopts, [*PROMPTS, PROMPTS[0]])
    assert watcher.num_rows >= sum(request.num_output - 1 for request in requests)
    assert watcher.num_kept > 0, "no draft was ever accepted"
    hits = sum(request.metrics.cached_tokens for request in requests)
    assert (hits > 0) == (adopts and cache == "paged") or (adopts and cache == "slotted"), "what was taken over"
    if not adopts:
        assert hits == 0, "the target took over a prefix that the drafter has no states for"
        fed = sum(len(request.tokens) - 1 for request in requests)
        assert watcher.num_rows >= fed, "every position was observed"


@pytest.mark.parametrize("name", BACKENDS)
def test_observed_rows_begin_anew_after_preemption(name: str) -> None:
    watcher, engine, requests = run(name, "paged", False, [[33], [34], [35]], max_tokens=30, num_blocks=12)
    assert engine.metrics.preemptions > 0
    assert len(watcher.starts) == len(requests) + engine.metrics.preemptions


def test_layers_that_the_target_lacks_are_refused_at_start() -> None:
    class Greedy(Watcher):
        needs = DrafterNeeds(target=TargetNeeds(hidden_layers=(5,)))

    model = make_model(REFERENCE)
    cache = paged_cache(model.cache_shape, 16, 4)
    with pytest.raises(ConfigError, match="layer 5 are asked for, and the model has 2 layers"):
        Engine(
            EngineOptions(LIMITS, 0, frozenset()), model, cache, KeyedChances(), known_verifiers(), Fixed(4),
            Drafters.of(Greedy(Reader(model), adopts=True, exact=True)),
        )  # fmt: skip
