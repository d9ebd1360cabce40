"""The target's logits that a drafter observes are those of a fresh pass, for every verified row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from speculant.cache import KVCache, paged_cache, slotted_cache
from speculant.config import Limits
from speculant.drafting import DrafterNeeds, Drafters, StatelessDrafter, TargetNeeds
from speculant.engine import Engine, EngineOptions
from speculant.lengths import Fixed
from speculant.models import CausalLM, SequenceInput, build_batch
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import CommittedRows, DraftTree, Request
from tests.fakes import known_verifiers
from tests.small_models import MODELS, make_model

REFERENCE = MODELS[0]
BACKENDS = [REFERENCE, *[name for name in MODELS if name.endswith(("-float32", "-int8"))][:2]]
LIMITS = Limits(max_model_len=48, max_num_seqs=4, max_num_batched_tokens=12)
TOP = 5
PROMPTS = [[7, 3, 9, 11, 2, 5, 6, 8, 7, 3, 9, 11, 2, 5, 6, 8, 1, 4], [7, 3, 9, 11, 2, 20], [33]]


class Student(StatelessDrafter):
    """Compares each observed row with a fresh pass, and drafts trees of right and wrong tokens."""

    def __init__(self, model: CausalLM, count: int, exact: bool) -> None:
        self.needs = DrafterNeeds(target=TargetNeeds(top_k=count), emits_tree=True)
        self._model, self._count, self._exact = model, count, exact
        self._drafts: dict[int, DraftTree] = {}
        self.num_rows = self.num_rejected = self.num_silent = 0

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        cache = slotted_cache(self._model.cache_shape, 1, LIMITS.max_model_len)
        batch = build_batch([SequenceInput(0, tokens, DraftTree.empty())], cache, torch.device("cpu"))
        return self._model.logits(self._model.forward(batch, cache.storage).last[-1:])[0]

    def observe(self, request: Request, rows: CommittedRows) -> None:
        draft = self._drafts.pop(request.seq_id, DraftTree.empty())
        if not self._count or not rows.gained:
            assert rows.successors == ()
            self.num_silent += 1
            return
        before = request.tokens[: len(request.tokens) - len(rows.gained)]
        texts = [[*before, *draft.tokens_to(node)] for node in range(-1, draft.size)]
        assert [token for token, _ in rows.successors] == [text[-1] for text in texts], "every verified row, in order"
        for text, (_, best) in zip(texts, rows.successors, strict=True):
            logits = self.logits(text)
            largest = logits.topk(self._count).values
            assert len(set(best)) == self._count
            if self._exact:
                assert torch.equal(logits[list(best)], largest)
            torch.testing.assert_close(logits[list(best)], largest, rtol=0, atol=1e-9)
        self.num_rows += len(texts)
        self.num_rejected += draft.size - (len(rows.gained) - 1)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        for request, limit in zip(requests, limits, strict=True):
            self._drafts[request.seq_id] = self._tree(request) if limit >= 4 else DraftTree.empty()
        return [self._drafts[request.seq_id] for request in requests]

    def _tree(self, request: Request) -> DraftTree:
        if len(request.tokens) % 4 == 0:
            return DraftTree.empty()
        first = int(self.logits(request.tokens).argmax())
        second = int(self.logits([*request.tokens, first]).argmax())
        wrong = (first + 1) % self._model.vocab_size
        return DraftTree.of([wrong, first, wrong, second], [-1, -1, 0, 1])

    def end(self, request: Request) -> None:
        self._drafts.pop(request.seq_id, None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", ["paged", "slotted"])
@pytest.mark.parametrize("name", BACKENDS)
def test_successors_are_those_of_a_fresh_pass(name: str, cache: str) -> None:
    """Prompts in chunks, drafts that branch, samples of one prompt; beside a drafter that asks for nothing."""
    model = make_model(name)
    made: KVCache = (
        paged_cache(model.cache_shape, 32, 4) if cache == "paged" else slotted_cache(model.cache_shape, 4, 48)
    )
    asking, silent = (Student(model, count, name != REFERENCE) for count in (TOP, 0))
    engine = Engine(
        EngineOptions(LIMITS, 0, frozenset()), model, made, KeyedChances(), known_verifiers(), Fixed(4),
        Drafters({"asking": asking, "silent": silent}, "asking"),
    )  # fmt: skip
    requests: list[Request] = []
    for index, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        method = "silent" if index == len(PROMPTS) else "asking"
        params = SamplingParams(
            temperature=index % 2, seed=index, n=1 + index % 2, max_tokens=14, speculation={"method": method}
        )
        requests += engine.add_request(prompt, params, str(index))
    while engine.has_unfinished():
        engine.step()
        engine.check()
    assert {request.ending.error for request in requests} == {None}
    assert engine.metrics.drafter_errors == 0, "a row was not that of a fresh pass; see the log"
    assert asking.num_rows > 40
    assert asking.num_rejected > 10
    assert asking.num_silent > 0, "no prompt was longer than a pass"
    assert silent.num_rows == 0
    assert silent.num_silent > 5
