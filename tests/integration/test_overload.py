"""`LLM` with too little room in the queue, too little memory, or failing passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from speculant import LLM, RequestOutput, SamplingParams
from speculant.engine import StreamPiece, runner as runner_module, step as step_module
from speculant.errors import CapacityError, SpeculantError
from tests.integration.conftest import MakeLLM

PROMPTS = [[i + 1, 2 * i + 1, 5, 7, i + 3] for i in range(9)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def tokens_of(results: Sequence[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for result in results for sample in result.outputs]


def test_more_prompts_than_may_wait_are_all_completed(llm_of: MakeLLM) -> None:
    expected = tokens_of(llm_of().generate(PROMPTS, GREEDY))
    llm = llm_of("near", max_waiting=2, max_num_seqs=2)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
    samples = SamplingParams(temperature=0, max_tokens=3, n=2)
    assert len(tokens_of(llm.generate(PROMPTS[:3], samples))) == 6


def test_more_samples_than_may_ever_wait_are_refused(llm_of: MakeLLM) -> None:
    llm = llm_of(max_waiting=2, max_num_seqs=2)
    with pytest.raises(CapacityError, match="5 sequences come together and max_num_seqs . max_waiting is 4"):
        llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(n=5)])
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("draft", [pytest.param(None, marks=pytest.mark.slow), "near"])
def test_a_text_does_not_depend_on_the_memory(llm_of: MakeLLM, draft: str | None) -> None:
    """64 positions for the target: one sequence of 64, or two of 32; nine want 25 each."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=1, n=2)
    expected = llm_of(max_model_len=64, dtype="float64").generate(PROMPTS, params)
    position = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, dimensions, bytes
    kv_memory = 64 * position * (1 if draft is None else 2)
    llm = llm_of(draft, dtype="float64", max_model_len=64, kv_memory=kv_memory, block_size=4)
    results = llm.generate(PROMPTS, params)
    assert tokens_of(results) == tokens_of(expected)
    for result, alike in zip(results, expected, strict=True):
        logprobs = [sample.cumulative_logprob for sample in alike.outputs]
        assert [sample.cumulative_logprob for sample in result.outputs] == pytest.approx(logprobs, abs=1e-9)
    assert sum(result.metrics.num_preemptions for result in results) == llm.engine.metrics.preemptions > 0


def test_results_count_their_prefix_hits(llm_of: MakeLLM) -> None:
    llm = llm_of(block_size=4, seed=1)
    first, again = (llm.generate([list(range(20, 30))], GREEDY)[0] for _ in range(2))
    assert [result.metrics.cached_tokens for result in (first, again)] == [0, 8]
    assert again.metrics.to_dict()["cached_tokens"] == 8
    assert tokens_of([first]) == tokens_of([again])


def broken_for(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], output: int) -> None:
    """Let the target's pass raise for these prompts once they have a number of output tokens."""
    forward_target = runner_module.forward_target

    def failing(model: Any, cache: Any, scheduled: Sequence[Any], trees: Any, layers: Any) -> Any:
        for item in scheduled:
            if list(item.request.prompt) in prompts and item.request.num_output >= output:
                raise SpeculantError("bad luck", "try again.")
        return forward_target(model, cache, scheduled, trees, layers)

    monkeypatch.setattr(step_module, "forward_target", failing)


@pytest.mark.parametrize("output", [0, 7])
def test_a_failed_prompt_is_explained_and_others_finish(
    llm_of: MakeLLM, monkeypatch: pytest.MonkeyPatch, output: int
) -> None:
    llm = llm_of("near")
    expected = llm.generate(PROMPTS[:3], GREEDY)
    broken_for(llm, monkeypatch, [PROMPTS[1]], output)
    results = llm.generate(PROMPTS[:3], GREEDY)
    assert [result.error for result in results] == [None, "bad luck\n  Fix: try again.", None]
    assert [result.outputs[0].finish_reason for result in results] == ["length", "error", "length"]
    assert tokens_of([results[0], results[2]]) == tokens_of([expected[0], expected[2]])
    (failed,) = results[1].outputs
    assert output <= len(failed.token_ids) < 20
    assert failed.token_ids == expected[1].outputs[0].token_ids[: len(failed.token_ids)]
    assert failed.text == llm.tokenizer.decode(failed.token_ids)
    assert results[1].finished


def test_an_error_is_raised_only_if_all_prompts_fail(llm_of: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of("near")
    broken_for(llm, monkeypatch, PROMPTS[:2], 3)
    with pytest.raises(SpeculantError, match="bad luck"):
        llm.generate(PROMPTS[:2], GREEDY)
    assert [result.error is None for result in llm.generate(PROMPTS[:3], GREEDY)] == [False, False, True]


def test_a_stream_yields_its_text_and_then_raises(llm_of: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of("near")
    expected = tokens_of(llm.generate(PROMPTS[:1], GREEDY))[0]
    broken_for(llm, monkeypatch, PROMPTS[:1], 5)
    pieces: list[StreamPiece] = []
    with pytest.raises(SpeculantError, match="bad luck"):
        pieces.extend(llm.stream(PROMPTS[0], GREEDY))  # keeps what comes before the error
    *before, last = pieces
    assert [piece.token for piece in before] == expected[: len(before)]
    assert len(before) >= 5
    assert (last.token, last.finish_reason) == (None, "error")
    assert last.output is not None
    assert last.output.error is not None
    assert "bad luck" in last.output.error
    assert last.output.outputs[0].text == "".join(piece.text for piece in pieces)
