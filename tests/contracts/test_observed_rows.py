"""What a drafter observes of a pass is what a fresh pass over the text gives.

States of layers, the likeliest next tokens, and states of look-ahead rows, for each committed or verified row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import paged_cache, slotted_cache
from speculant.config import Limits
from speculant.drafting import DrafterNeeds, DrafterReads, Drafters, LookAheadTree, StatelessDrafter
from speculant.engine import Engine, EngineOptions
from speculant.errors import ConfigError
from speculant.lengths import Fixed
from speculant.models import CausalLM, Hidden, SequenceInput, build_batch
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import CommittedRows, DraftTree, Request
from tests.fakes import known_verifiers
from tests.heads import fresh_ahead
from tests.small_models import MODELS, make_model

REFERENCE = MODELS[0]
BACKENDS = [REFERENCE, *[name for name in MODELS if name.endswith(("-float32", "-int8"))][:2]]
LIMITS = Limits(max_model_len=60, max_num_seqs=4, max_num_batched_tokens=12)
LAYERS = (2, 0, 3, 1)  # in the drafter's own order; 3 = the last one's output after the final norm
COMMON = [7, 3, 9, 11, 2, 5, 6, 8]
PROMPTS = [[*COMMON, *COMMON, 1, 4], [*COMMON, *COMMON, 20, 21, 22], [33]]

caches = pytest.mark.parametrize("cache", ["paged", "slotted"])
backends = pytest.mark.parametrize("name", BACKENDS)


class Comparing(StatelessDrafter):
    """Drafts trees of right and wrong tokens, and compares what it observes with fresh passes."""

    needs = DrafterNeeds(emits_tree=True)

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.exact = model is not make_model(REFERENCE)
        self.num_compared = self.num_kept = 0

    @torch.inference_mode()
    def fresh(self, tokens: Sequence[int]) -> Hidden:
        """Return the states of a text, computed alone in a cache of its own."""
        cache = slotted_cache(self.model.cache_shape, 1, LIMITS.max_model_len)
        batch = build_batch([SequenceInput(0, tokens, DraftTree.empty())], cache, torch.device("cpu"))
        return self.model.forward(batch, cache.storage, (0, 1, 2))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.model.logits(self.fresh(tokens).last[-1:])[0]

    def assert_same(self, seen: Tensor, expected: Tensor) -> None:
        assert seen.shape == expected.shape
        assert torch.equal(seen, expected) if self.exact else torch.allclose(seen, expected, rtol=0, atol=1e-9)
        self.num_compared += 1

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [self.tree(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def tree(self, request: Request, limit: int) -> DraftTree:
        if limit < 4 or len(request.tokens) % 4 == 0:
            return DraftTree.empty()
        first = int(self.logits(request.tokens).argmax())
        second = int(self.logits([*request.tokens, first]).argmax())
        wrong = (first + 1) % self.model.vocab_size
        return DraftTree.of([wrong, first, wrong, second], [-1, -1, 0, 1])


def run(
    drafters: Drafters,
    name: str,
    cache: str,
    prompts: Sequence[Sequence[int]] = (*PROMPTS, PROMPTS[0]),
    budget: int = LIMITS.max_num_batched_tokens,
    num_blocks: int = 40,
    max_tokens: int = 16,
    methods: Sequence[str] = (),
) -> tuple[Engine, list[Request]]:
    """Serve greedy and seeded requests, prompts in chunks, samples of one prompt, and prefixes that others fed."""
    model = make_model(name)
    limits = Limits(LIMITS.max_model_len, LIMITS.max_num_seqs, budget)
    made = (
        paged_cache(model.cache_shape, num_blocks, 4)
        if cache == "paged"
        else slotted_cache(model.cache_shape, limits.max_num_seqs, limits.max_model_len)
    )
    options = EngineOptions(limits, 0, frozenset())
    engine = Engine(options, model, made, KeyedChances(), known_verifiers(), Fixed(4), drafters)
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        wanted: dict[str, Any] = {"speculation": {"method": methods[index]}} if methods else {}
        params = SamplingParams(
            temperature=index % 2, seed=index, n=1 + (index == 0), max_tokens=max_tokens, **wanted
        )  # fmt: skip
        requests += engine.add_request(prompt, params, str(index))
    while engine.has_unfinished():
        engine.step()
        engine.check()
    assert {request.ending.error for request in requests} == {None}
    assert engine.metrics.drafter_errors == 0, "a row was not that of a fresh pass; see the log"
    return engine, requests


# --- states of layers


class Watcher(Comparing):
    """Compares the states of each row. adopts: whether the target may take over prefixes of which it saw nothing."""

    needs = DrafterNeeds(hidden_layers=LAYERS, emits_tree=True)

    def __init__(self, model: CausalLM, adopts: bool) -> None:
        super().__init__(model)
        self._adopts = adopts
        self._next: dict[int, int | None] = {}  # the position that the next row must have; None = any
        self.num_begun = self.num_rows = 0

    @override
    def begin(self, request: Request) -> None:
        self._next[request.seq_id] = None if self._adopts else 0
        self.num_begun += 1

    @override
    def match_prefix(self, request: Request) -> int:
        return len(request.tokens) if self._adopts else 0

    @override
    def end(self, request: Request) -> None:
        del self._next[request.seq_id]

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        end, expected = rows.start + len(rows.tokens), self._next[request.seq_id]
        assert expected in (None, rows.start), "rows are missing, or came twice"
        assert list(rows.tokens) == request.tokens[rows.start : end], "rows of tokens that are not committed"
        gained = list(rows.gained)
        assert gained == request.tokens[len(request.tokens) - len(gained) :]
        fresh = self.fresh(request.tokens[:end])
        for seen, layer in zip(rows.hidden, LAYERS, strict=True):
            self.assert_same(seen, (*fresh.taps, fresh.last)[layer][rows.start :])
        self._next[request.seq_id] = end
        self.num_rows += len(rows.tokens)
        self.num_kept += max(0, len(gained) - 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("adopts", [False, True], ids=["keeps states", "adopts"])
@caches
@backends
def test_observed_states_are_those_of_a_fresh_pass(name: str, cache: str, adopts: bool) -> None:
    watcher = Watcher(make_model(name), adopts)
    _, requests = run(Drafters.of(watcher), name, cache)
    assert watcher.num_rows >= sum(request.num_output - 1 for request in requests)
    assert watcher.num_kept > 0, "no draft was ever accepted"
    hits = sum(request.metrics.cached_tokens for request in requests)
    assert (hits > 0) == (adopts and cache == "paged") or (adopts and cache == "slotted"), "what was taken over"
    if not adopts:
        assert hits == 0, "the target took over a prefix that the drafter has no states for"
        fed = sum(len(request.tokens) - 1 for request in requests)
        assert watcher.num_rows >= fed, "every position was observed"


@backends
def test_observed_states_begin_anew_after_preemption(name: str) -> None:
    watcher = Watcher(make_model(name), adopts=False)
    engine, requests = run(Drafters.of(watcher), name, "paged", [[33], [34], [35]], num_blocks=12, max_tokens=30)
    assert engine.metrics.preemptions > 0
    assert watcher.num_begun == len(requests) + engine.metrics.preemptions


def test_layers_that_the_target_lacks_are_refused_at_start() -> None:
    class Greedy(Watcher):
        needs = DrafterNeeds(hidden_layers=(5,))

    with pytest.raises(ConfigError, match="layer 5 are asked for, and the model has 2 layers"):
        run(Drafters.of(Greedy(make_model(REFERENCE), adopts=True)), REFERENCE, "paged")


# --- the likeliest tokens after each verified row


class Student(Comparing):
    """Compares the likeliest tokens after every verified row."""

    def __init__(self, model: CausalLM, count: int) -> None:
        super().__init__(model)
        self.needs = DrafterNeeds(reads=DrafterReads(top_k=count), emits_tree=True)
        self._drafts: dict[int, DraftTree] = {}
        self.num_rejected = self.num_silent = 0

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        draft = self._drafts.pop(request.seq_id, DraftTree.empty())
        if not self.needs.reads.top_k or not rows.gained:
            assert rows.successors == ()
            self.num_silent += 1
            return
        before = request.tokens[: len(request.tokens) - len(rows.gained)]
        texts = [[*before, *draft.tokens_to(node)] for node in range(-1, draft.size)]
        assert [token for token, _ in rows.successors] == [text[-1] for text in texts], "every verified row, in order"
        for text, (_, best) in zip(texts, rows.successors, strict=True):
            logits = self.logits(text)
            assert len(set(best)) == self.needs.reads.top_k
            self.assert_same(logits[list(best)], logits.topk(self.needs.reads.top_k).values)
        self.num_rejected += draft.size - (len(rows.gained) - 1)

    @override
    def tree(self, request: Request, limit: int) -> DraftTree:
        self._drafts[request.seq_id] = super().tree(request, limit)
        return self._drafts[request.seq_id]

    @override
    def end(self, request: Request) -> None:
        self._drafts.pop(request.seq_id, None)


@pytest.mark.covering(1)
@caches
@backends
def test_successors_are_those_of_a_fresh_pass(name: str, cache: str) -> None:
    """Beside a drafter that asks for nothing."""
    asking, silent = (Student(make_model(name), count) for count in (5, 0))
    drafters = Drafters({"asking": asking, "silent": silent}, "asking")
    run(drafters, name, cache, methods=["asking"] * len(PROMPTS) + ["silent"])
    assert asking.num_compared > 40
    assert asking.num_rejected > 10
    assert asking.num_silent > 0, "no prompt was longer than a pass"
    assert silent.num_compared == 0
    assert silent.num_silent > 5


# --- states of look-ahead rows


class LookingAhead(Comparing):
    """Drafts with rows of its own, whose states it compares."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self.needs = DrafterNeeds(hidden_layers=(model.num_layers + 1,), target_inputs=2, emits_tree=True, max_nodes=4)
        noise = torch.randn(2, model.hidden_size, generator=torch.Generator().manual_seed(0))
        self.inputs: Tensor = noise.to(model.cache_shape.dtype)

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        ahead = rows.hidden[0][len(rows.tokens) :]
        if len(ahead):
            end, inputs = rows.start + len(rows.tokens), self.inputs[: len(ahead)]
            self.assert_same(ahead, fresh_ahead(self.model, request.tokens[:end], inputs))
            self.num_kept += len(rows.tokens) - 1

    @override
    def tree(self, request: Request, limit: int) -> DraftTree:
        if not limit or len(request.tokens) % 5 == 0:
            return DraftTree.empty()
        return LookAheadTree.around(super().tree(request, limit), self.inputs[: min(limit, 2)])


def look_ahead(name: str, cache: str, num_blocks: int) -> tuple[Comparing, Engine, Engine]:
    """Serve requests with look-ahead rows and without drafts; their texts are the same."""
    drafter = LookingAhead(make_model(name))
    (engine, requests), (other, plain) = (
        run(Drafters.of(each), name, cache, budget=40, num_blocks=num_blocks, max_tokens=20) for each in (drafter, None)
    )
    assert [request.output for request in requests] == [request.output for request in plain]
    return drafter, engine, other


@pytest.mark.covering(1)
@caches
@backends
def test_states_of_look_ahead_rows_are_those_of_a_fresh_pass(name: str, cache: str) -> None:
    """Trees with own rows below each node."""
    drafter, *_ = look_ahead(name, cache, num_blocks=60)
    assert drafter.num_compared > 10
    assert drafter.num_kept > 5, "no state below an accepted node was compared"


@backends
def test_look_ahead_rows_cause_no_preemption(name: str) -> None:
    """They use the rows that the step leaves; if memory is short, there are fewer or none."""
    drafter, engine, plain = look_ahead(name, "paged", num_blocks=24)
    assert engine.metrics.preemptions <= plain.metrics.preemptions + 1
    assert drafter.num_compared > 0
