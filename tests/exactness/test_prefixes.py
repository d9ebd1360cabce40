"""Known prefixes are not fed again, and no text shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from speculant.config import Limits
from speculant.drafting.base import Drafter, DrafterNeeds
from speculant.lab.exactness.tables import FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from speculant.types import DraftTree, Request
from tests.fakes import (
    BLOCK,
    Rig,
    ScriptedDrafter,
    build_rig,
    few_blocks,
    model_drafter,
    slotted,
)

V = 4
PAIR = Pair(9, V, FULL_SUPPORT)
LIMITS = Limits(max_model_len=48, max_num_seqs=3, max_num_batched_tokens=64)
PROMPT = (0, 1, 2, 3, 3, 2, 1, 0, 0, 2)  # two blocks and a half
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def fan(request: Request) -> DraftTree:
    return DraftTree(torch.tensor([3, 2, 0, 1, 1]), torch.tensor([-1, -1, 1, 1, 2]))


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: model_drafter(TableModel(PAIR.draft, V), V, limits=LIMITS),
    "tree": lambda: ScriptedDrafter(fan, DrafterNeeds(emits_tree=True)),
}


def rig_of(drafter: str = "none", length: int = 5) -> Rig:
    return build_rig(TableModel(PAIR.target, V), DRAFTERS[drafter](), length=length, limits=LIMITS)


def run(rig: Rig, prompt: Sequence[int], params: SamplingParams = GREEDY, cache_salt: str = "") -> Request:
    (request,) = rig.add(prompt, params, cache_salt=cache_salt)
    rig.finish()
    return request


def alone(prompt: Sequence[int], params: SamplingParams = GREEDY) -> Request:
    """Run a request on an engine that keeps nothing and drafts nothing."""
    return run(build_rig(TableModel(PAIR.target, V), limits=LIMITS, cache=slotted), prompt, params)


def known(length: int) -> int:
    """Return how much is found of a prompt that was fed before: full blocks, but never the last token."""
    return min(length // BLOCK * BLOCK, length - 1)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_earlier_text_leaves_only_committed_tokens(drafter: str) -> None:
    """Prompts that end everywhere in a text whose drafts were often rejected, at block ends and between them."""
    rig = rig_of(drafter)
    params = SamplingParams(temperature=0, max_tokens=24)
    text = run(rig, PROMPT, params).tokens
    for end in range(len(PROMPT), len(text)):
        request = run(rig, text[:end])
        assert request.output == alone(text[:end]).output
        assert request.metrics.cached_tokens == known(end)


@pytest.mark.parametrize("length", range(1, 14))
def test_the_last_token_of_a_prompt_is_always_fed(length: int) -> None:
    """A prompt that is known to its end still needs one row for the token after it."""
    rig = rig_of()
    prompt = (PROMPT + PROMPT)[:length]
    first, again = run(rig, prompt), run(rig, prompt)
    assert again.output == first.output == alone(prompt).output
    assert again.metrics.cached_tokens == known(length)


def test_hits_are_counted_and_save_rows() -> None:
    target = TableModel(PAIR.target, V)
    rig = build_rig(target, limits=LIMITS)
    assert run(rig, PROMPT).metrics.cached_tokens == 0
    target.num_rows.clear()
    again = run(rig, PROMPT)
    assert again.metrics.cached_tokens == 8
    assert target.num_rows == [2] + [1] * 11
    assert rig.engine.metrics.prefix_hit_tokens == 8
    assert rig.engine.metrics.prompt_tokens == 2 * len(PROMPT)


def test_prompts_that_arrive_together_feed_a_shared_prefix_once() -> None:
    """All are admitted at once; while the first is fed, the others find more and more of it known."""
    target = TableModel(PAIR.target, V)
    rig = build_rig(target, limits=Limits(max_model_len=48, max_num_seqs=3, max_num_batched_tokens=8))
    prompts = [(*PROMPT, *PROMPT, *PROMPT, own) for own in range(3)]
    requests = [rig.add(prompt, GREEDY, f"r{own}")[0] for own, prompt in enumerate(prompts)]
    rig.finish()
    assert [request.output for request in requests] == [alone(prompt).output for prompt in prompts]
    fed = sum(target.num_rows) - sum(request.num_output - 1 for request in requests)
    assert fed < 2 * len(prompts[0]), "the common part was fed for each"
    assert all(request.metrics.cached_tokens for request in requests[1:])


def test_a_cache_without_prefixes_finds_none() -> None:
    rig = build_rig(TableModel(PAIR.target, V), limits=LIMITS, cache=few_blocks(36, keep_prefixes=False))
    assert [run(rig, PROMPT).metrics.cached_tokens for _ in range(2)] == [0, 0]


def test_a_draft_model_reuses_prefixes_too() -> None:
    draft = TableModel(PAIR.draft, V)
    rig = build_rig(TableModel(PAIR.target, V), model_drafter(draft, V, limits=LIMITS), length=2, limits=LIMITS)
    run(rig, PROMPT)
    assert draft.num_rows[0] == len(PROMPT) + 1, "it begins when the first token was chosen"
    draft.num_rows.clear()
    run(rig, PROMPT)
    assert draft.num_rows[0] == len(PROMPT) + 1 - 8


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_prompt_logprobs_are_whole_on_a_prefix_hit(drafter: str) -> None:
    rig = rig_of(drafter)
    run(rig, PROMPT)
    params = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1)
    request = run(rig, PROMPT, params)
    assert request.metrics.cached_tokens == 0
    assert request.prompt_logprobs == alone(PROMPT, params).prompt_logprobs
    assert run(rig, PROMPT).metrics.cached_tokens == 8, "without them the prompt is taken over again"


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_salts_keep_prompts_apart(prompt_logprobs: int | None) -> None:
    """Not even the number of passes shows a tenant another's prompt: neither target nor draft finds it."""
    target, draft = TableModel(PAIR.target, V), TableModel(PAIR.draft, V)
    rig = build_rig(target, model_drafter(draft, V, limits=LIMITS), length=2, limits=LIMITS)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=prompt_logprobs)
    for cache_salt in ("", "a", "b"):
        target.num_rows.clear()
        draft.num_rows.clear()
        request = run(rig, PROMPT, params, cache_salt)
        assert (request.metrics.cached_tokens, target.num_rows[0], draft.num_rows[0]) == (0, 10, 11)
    for cache_salt in ("", "a", "b"):
        assert run(rig, PROMPT, GREEDY, cache_salt).metrics.cached_tokens == 8


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_samples_share_the_blocks_of_their_prompt(drafter: str) -> None:
    rig = rig_of(drafter)
    params = SamplingParams(n=3, seed=1, max_tokens=12)
    samples = rig.add(PROMPT, params)
    rig.step()
    rig.step()
    tables = [rig.cache.table(sample.seq_id).tolist() for sample in samples]
    assert len({tuple(table[:2]) for table in tables}) == 1
    rig.finish()
    together = [sample.output for sample in samples]
    calm = build_rig(TableModel(PAIR.target, V), limits=Limits(48, 1, 64), cache=slotted)
    expected = calm.add(PROMPT, params)
    calm.finish()
    assert together == [sample.output for sample in expected]
    assert [sample.metrics.cached_tokens for sample in samples] == [0, 9, 9]
