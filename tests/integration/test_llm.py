"""`LLM.generate` on small checkpoints: prompts, order, samples, seeds, log-probabilities, refusals."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant import LLM, BeamSearchOutput, BeamSearchParams, RequestOutput, SamplingParams
from speculant.cache import slotted_cache
from speculant.engine import build, step as step_module
from speculant.errors import ConfigError, RequestError
from speculant.models import SequenceInput, build_batch, load_model
from speculant.types import DraftTree
from tests.integration.conftest import MakeLLM
from tests.models import EXACT_DTYPE, VOCAB_SIZE, Checkpoints
from tests.unit.engine.test_progress import Bar

TEXTS = ["def read(path):", "class A:", "import os", "hello world " * 4]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3, max_tokens=24)
SPECULATIVE: list[dict[str, Any]] = [
    {"draft": "near"},
    {"draft": "far", "spec_length": 2},
    {"draft": "target", "spec_length": 8, "max_num_seqs": 2},
    {"speculative_config": {"method": "ngram"}},
]
TIGHT: list[dict[str, Any]] = [
    {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    {"max_num_seqs": 2, "max_num_batched_tokens": 5},
    {"draft": "near", "max_num_seqs": 3, "max_num_batched_tokens": 7},
]


def tokens_of(results: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in result.outputs] for result in results]


# --- prompts and results


def test_prompts_are_texts_or_token_ids_one_or_many(llm_of: MakeLLM) -> None:
    llm = llm_of()
    ids = llm.tokenizer.encode(TEXTS[0])
    (by_text,) = llm.generate(TEXTS[0], GREEDY)
    for prompts in ([TEXTS[0]], ids, tuple(ids), [ids], (tuple(ids),), [TEXTS[0], ids][1:]):
        (result,) = llm.generate(prompts, GREEDY)
        assert result.prompt_token_ids == ids
        assert tokens_of([result]) == tokens_of([by_text])
    assert by_text.prompt == TEXTS[0]
    assert llm.generate(ids, GREEDY)[0].prompt is None
    assert llm.generate([], GREEDY) == []


def test_results_come_in_the_order_of_the_prompts(llm_of: MakeLLM) -> None:
    llm = llm_of(max_num_seqs=2)
    prompts = [TEXTS[3], [7, 8, 9], TEXTS[1], TEXTS[0], [9], TEXTS[2]]
    lengths = [3, 20, 1, 9, 15, 2]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    results = llm.generate(prompts, params)
    assert [result.prompt for result in results] == [p if isinstance(p, str) else None for p in prompts]
    assert [len(result.outputs[0].token_ids) for result in results] == lengths
    alone = [llm.generate([prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
    assert tokens_of(results) == tokens_of(alone)
    assert len({result.request_id for result in results}) == len(prompts)


def test_a_result_is_whole(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    (result,) = llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=9))
    (sample,) = result.outputs
    assert result.finished
    assert (sample.index, sample.finish_reason, sample.stop_reason) == (0, "length", None)
    assert sample.text == llm.tokenizer.decode(sample.token_ids)
    assert (sample.logprobs, sample.cumulative_logprob, result.prompt_logprobs) == (None, None, None)
    counted = result.metrics.speculative_decoding
    assert result.metrics.timing.num_tokens == 9
    assert result.metrics.timing.target_passes == 1 + counted.num_spec_steps + (
        9 - 1 - counted.num_spec_steps - counted.num_accepted_draft_tokens
    )


def test_parameters_default_to_the_checkpoint_s(llm_of: MakeLLM) -> None:
    llm = llm_of()
    assert llm.default_params == SamplingParams()
    assert len(llm.generate(TEXTS[0])[0].outputs[0].token_ids) == 16


@pytest.mark.parametrize(
    "prompts",
    [
        "",
        [[]],
        [TEXTS[0], ""],
        [TEXTS[0], [1, -2]],
        [TEXTS[0], [1, VOCAB_SIZE]],
        [TEXTS[0], "x" * 256],
        [1, "x"],
        [TEXTS[0], None],
        [TEXTS[0], 3],
        [[1.5, 2.0]],
        None,
        b"text",
        [bytearray(b"text")],
        {7, 8},
        7,
        7.0,
        True,
        [True, False],
        [[7, True]],
        [[7, [8]]],
        [[[7, 8]]],
        {},
        {"text": "x"},
        {7: 8},
        {"prompt": [7, 8]},
        {"prompt_token_ids": "x"},
        {"prompt_token_ids": [7.0]},
        {"prompt": "x", "cache_salt": 7},
        {"prompt": "x", "cache_salt": "s\0long"},
        {"prompt": "x", "multi_modal_data": {"image": 1}},
        {"prompt_embeds": torch.zeros(2, 2)},
        {"encoder_prompt": "x", "decoder_prompt": "y"},
        torch.tensor([7.0, 8.0]),
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.zeros(1, 1, 2, dtype=torch.int64),
        np.array([7.0]),
        np.array(["x"]),
        [np.array([[7, 8]])],
    ],
    ids=str,
)
def test_a_refused_prompt_leaves_no_request_behind(llm_of: MakeLLM, prompts: Any) -> None:
    llm = llm_of("near")
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.fix
    assert not llm.engine.has_unfinished()


ONE_PROMPT: list[Any] = [
    [70, 71, 72],
    (70, 71, 72),
    range(70, 73),
    [np.int64(70), np.int32(71), 72],
    [torch.tensor(70), 71, 72],
    np.array([70, 71, 72], dtype=np.uint16),
    torch.tensor([70, 71, 72], dtype=torch.int32),
    {"prompt_token_ids": [70, 71, 72]},
    {"prompt_token_ids": np.array([70, 71, 72]), "cache_salt": "mine", "multi_modal_data": None},
    {"prompt": "ghi"},
    {"prompt": "another text", "prompt_token_ids": (70, 71, 72)},
]


@pytest.mark.parametrize("prompt", ONE_PROMPT, ids=str)
def test_a_prompt_in_any_form_is_read_as_token_ids(llm_of: MakeLLM, prompt: Any) -> None:
    llm, few = llm_of("near"), SamplingParams(temperature=0, max_tokens=4)
    (expected,) = llm.generate([[70, 71, 72]], few)
    for given in (prompt, [prompt], (prompt,), iter([prompt])):
        (result,) = llm.generate(given, few)
        assert result.prompt_token_ids == [70, 71, 72]
        assert result.outputs == expected.outputs
        assert result.prompt == (prompt.get("prompt") if isinstance(prompt, dict) else None)
    *_, last = llm.stream(prompt, few)
    assert last.output is not None
    assert last.output.outputs == expected.outputs


@pytest.mark.parametrize(
    "rows", [np.array([[7, 8], [9, 7]]), torch.tensor([[7, 8], [9, 7]]), [[7, 8], (9, 7)]], ids=str
)
def test_each_row_of_an_array_is_a_prompt(llm_of: MakeLLM, rows: Any) -> None:
    results = llm_of("near").generate(rows, GREEDY)
    assert [result.prompt_token_ids for result in results] == [[7, 8], [9, 7]]


def test_prompts_of_all_forms_run_together(llm_of: MakeLLM) -> None:
    results = llm_of("near").generate(ONE_PROMPT, GREEDY)
    assert [result.prompt_token_ids for result in results] == [[70, 71, 72]] * len(ONE_PROMPT)


def test_the_salt_of_a_prompt_separates_its_cache(llm_of: MakeLLM) -> None:
    llm, tokens = llm_of("near"), [11, 12, 13, 14] * 12
    for salt in ("", "a", "b"):
        first, again = (llm.generate({"prompt_token_ids": tokens, "cache_salt": salt}, GREEDY)[0] for _ in range(2))
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ({"promt": "x"}, r"unknown key 'promt'(.|\n)*did you mean 'prompt'"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data: images"),
        ({"prompt_embeds": torch.zeros(2, 2)}, "embeddings"),
        (b"x", "a prompt is a bytes"),
        (None, "a prompt is a NoneType"),
        ([[7, True]], "has True, which is not a token id"),
    ],
    ids=str,
)
def test_a_refused_prompt_is_explained(llm_of: MakeLLM, prompt: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        llm_of("near").generate(prompt, GREEDY)


def test_a_bad_prompt_is_refused_before_any_runs(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    steps = llm.engine.metrics.steps
    with pytest.raises(RequestError):
        llm.generate([*TEXTS, [10**9]], GREEDY)
    assert llm.engine.metrics.steps == steps


def test_a_request_can_t_load_another_kind_of_drafter(llm_of: MakeLLM) -> None:
    for method in ("synthetic", "draft_model"):
        with pytest.raises(ConfigError, match="a request can't load it"):
            llm_of().generate(TEXTS[0], SamplingParams(speculation={"method": method}))


@pytest.mark.parametrize(
    "config",
    [{}, {"method": "merge"}, {"method": "cascade", "inner": {"method": "draft_model", "model": "near"}}],
    ids=["default", "merge", "cascade"],
)
def test_a_request_may_name_a_drafter_within_the_engine_s(
    llm_of: MakeLLM, checkpoints: Checkpoints, config: dict[str, Any]
) -> None:
    """The model is loaded once, and its cache is that of the drafter that holds it."""
    if inner := config.get("inner"):
        config = {**config, "inner": {**inner, "model": checkpoints.near}}
    llm = llm_of("near", speculative_config=config)
    caches = {id(cache) for cache in llm.engine._drafters.caches}
    named = replace(GREEDY, speculation={"method": "draft_model", "num_speculative_tokens": 3})
    expected = [each.outputs[0].token_ids for each in llm_of().generate(TEXTS, GREEDY)]
    found = llm.generate([*TEXTS, *TEXTS], [named] * len(TEXTS) + [GREEDY] * len(TEXTS))
    assert [each.outputs[0].token_ids for each in found] == 2 * expected
    assert all(each.metrics.speculative_decoding.num_draft_tokens for each in found[: len(TEXTS)])
    assert {id(cache) for cache in llm.engine._drafters.caches} == caches


def test_parameters_are_one_or_one_for_each_prompt(llm_of: MakeLLM) -> None:
    with pytest.raises(RequestError, match=r"2 prompts came with 1 sampling"):
        llm_of().generate(TEXTS[:2], [GREEDY])


# --- one text, however it is made


@pytest.fixture(scope="module")
def plain_results() -> dict[str, list[RequestOutput]]:
    """Keep the results of each text alone, by their parameters."""
    return {}


@pytest.mark.covering(1)
@pytest.mark.parametrize("arguments", [*SPECULATIVE, *TIGHT], ids=str)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_text_depends_on_nothing_but_the_request(
    llm_of: MakeLLM, plain_results: dict[str, list[RequestOutput]], arguments: dict[str, Any], params: SamplingParams
) -> None:
    """Not on the drafter, nor on the batch, the chunks, or how many run side by side."""
    key = repr(params)
    if key not in plain_results:
        plain_results[key] = [llm_of().generate(text, params)[0] for text in TEXTS]
    expected, results = plain_results[key], llm_of(**arguments).generate(TEXTS, params)
    assert tokens_of(results) == tokens_of(expected)
    assert [result.outputs[0].text for result in results] == [result.outputs[0].text for result in expected]


def test_many_more_requests_than_sequences(llm_of: MakeLLM) -> None:
    prompts = [[i + 1, 2 * i + 1, 5] for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 7) for i in range(20)]
    results = llm_of("near", max_num_seqs=2).generate(prompts, params)
    assert tokens_of(results) == tokens_of(llm_of().generate(prompts, params))


def test_mixed_parameters_share_a_batch(llm_of: MakeLLM) -> None:
    """Greedy, seeded, filtered and undrafted rows side by side (VA 16396, V 9441)."""
    params = [
        GREEDY,
        SEEDED,
        SamplingParams(seed=9, top_k=4, max_tokens=24),
        SamplingParams(seed=9, min_p=0.1, max_tokens=24, speculation=False, frequency_penalty=0.5),
    ]
    expected = [llm_of().generate(text, each)[0] for text, each in zip(TEXTS, params, strict=True)]
    assert tokens_of(llm_of("near").generate(TEXTS, params)) == tokens_of(expected)


def test_an_engine_s_seed_repeats_unseeded_text(checkpoints: Checkpoints) -> None:
    def fresh(seed: int, **arguments: Any) -> list[list[list[int]]]:
        llm = LLM(checkpoints.target, draft_model=checkpoints.near, dtype=EXACT_DTYPE, seed=seed, **arguments)
        return tokens_of(llm.generate(TEXTS[:2], SamplingParams(max_tokens=24)))

    assert fresh(1) == fresh(1) == fresh(1, spec_length=4) == fresh(1, use_speculative_decoding=False) != fresh(2)


def test_engines_without_a_seed_sample_different_texts(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes are two engines: neither time nor batch tells them apart, only the seeds that they draw."""
    monkeypatch.setattr(build, "secrets", secrets)
    arguments: dict[str, Any] = {"dtype": EXACT_DTYPE, "use_speculative_decoding": False}
    one, other = (LLM(checkpoints.target, **arguments) for _ in range(2))
    params = SamplingParams(max_tokens=24)
    assert tokens_of(one.generate(TEXTS[:2], params)) != tokens_of(other.generate(TEXTS[:2], params))


def test_context_is_the_model_s_own_unless_memory_is_short(checkpoints: Checkpoints, caplog: Any) -> None:
    own = LLM(checkpoints.target, dtype=EXACT_DTYPE)
    assert own.limits.max_model_len == own._runtime.checkpoint.model.max_positions
    assert own.context == f"{own.limits.max_model_len} tokens"
    assert not [each for each in caplog.records if "max_model_len" in each.message]
    short = LLM(checkpoints.target, dtype=EXACT_DTYPE, draft_model=checkpoints.near, kv_memory="40KiB")
    assert 16 < short.limits.max_model_len < own.limits.max_model_len
    assert "raise kv_memory" in short.context
    assert [each.message for each in caplog.records if "max_model_len" in each.message] == [
        f"max_model_len is {short.context}"
    ]
    assert short.generate([[40] * (short.limits.max_model_len - 1)], SamplingParams(max_tokens=5))[0].finished


# --- samples


@pytest.mark.parametrize(
    "arguments",
    [*SPECULATIVE[:1], TIGHT[0], *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, *TIGHT[1:]))],
    ids=str,
)
def test_samples_are_those_of_fewer_samples_and_of_one(llm_of: MakeLLM, arguments: dict[str, Any]) -> None:
    """A sample's tokens depend on seed and index alone: not on the others, nor on a prompt taken over from one."""
    params = {"temperature": 0.9, "seed": 5, "max_tokens": 16}
    expected = tokens_of(llm_of().generate(TEXTS[3], SamplingParams(**params, n=4)))[0]
    assert len({tuple(tokens) for tokens in expected}) == 4
    llm = llm_of(**arguments)
    for n in (1, 2, 4):
        (result,) = llm.generate(TEXTS[3], SamplingParams(**params, n=n))
        assert [sample.index for sample in result.outputs] == list(range(n))
        assert tokens_of([result]) == [expected[:n]]


def test_samples_share_the_work_on_their_prompt(llm_of: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(enable_prefix_caching=False)
    rows: list[int] = []
    forward_target = step_module.forward_target

    def counted(*arguments: Any) -> Any:
        rows.append(sum(item.count for item in arguments[2]))
        return forward_target(*arguments)

    monkeypatch.setattr(step_module, "forward_target", counted)
    (result,) = llm.generate(TEXTS[3], SamplingParams(n=4, max_tokens=5, ignore_eos=True))
    num_prompt = len(result.prompt_token_ids)
    assert sum(rows) == num_prompt + 3 + 4 * 4  # one prompt, its last token for the others, four more tokens each
    assert rows[:2] == [num_prompt, 4]
    assert len(rows) == 6


def test_greedy_samples_are_equal(llm_of: MakeLLM) -> None:
    (result,) = llm_of("near", spec_length=2).generate(TEXTS[0], SamplingParams(temperature=0, n=3, max_tokens=8))
    assert len({tuple(sample.token_ids) for sample in result.outputs}) == 1
    assert result.metrics.speculative_decoding.num_spec_steps >= 3


# --- log-probabilities


@pytest.fixture(scope="module")
def table_of(checkpoints: Checkpoints) -> Any:
    """Return the model's own log-probabilities after each token of a sequence, [n, V], by one plain pass."""
    model = load_model(checkpoints.target, "float64", "cpu").model

    def log_softmax(tokens: Sequence[int]) -> Tensor:
        cache = slotted_cache(model.cache_shape, 1, 256)
        with torch.inference_mode():
            batch = build_batch([SequenceInput(0, tokens, DraftTree.empty())], cache, torch.device("cpu"))
            hidden = model.forward(batch, cache.storage).last
            return torch.log_softmax(model.logits(hidden), -1)

    return log_softmax


@pytest.mark.covering(1)
@pytest.mark.parametrize("arguments", [{}, *SPECULATIVE, *TIGHT], ids=str)
@pytest.mark.parametrize("values", [{"temperature": 0}, {"temperature": 0.7, "seed": 2, "top_k": 5, "n": 2}], ids=str)
def test_log_probabilities_are_the_model_s_own(
    llm_of: MakeLLM, table_of: Any, arguments: dict[str, Any], values: dict[str, Any]
) -> None:
    params = SamplingParams(**values, max_tokens=14, logprobs=3, prompt_logprobs=2)
    results = llm_of(dtype="float64", **arguments).generate([TEXTS[0], [5, 6, 7], TEXTS[3]], params)
    for result in results:
        prompt = result.prompt_token_ids
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        assert_reported(result.prompt_logprobs[1:], table_of(prompt), prompt[1:], 2)
        for sample in result.outputs:
            table = table_of([*prompt, *sample.token_ids])[len(prompt) - 1 :]
            assert_reported(sample.logprobs, table, sample.token_ids, 3)
            total = sum(float(table[i, token]) for i, token in enumerate(sample.token_ids))
            assert sample.cumulative_logprob == pytest.approx(total, abs=1e-9)


def assert_reported(entries: Any, table: Tensor, tokens: Sequence[int], top: int) -> None:
    """Assert that each entry holds the token said and the `top` likeliest, with their ranks."""
    assert len(entries) == len(tokens)
    for entry, row, token in zip(entries, table, tokens, strict=False):
        best = row.topk(top).indices.tolist()
        assert set(entry) == {token, *best}
        for each, told in entry.items():
            assert told.logprob == pytest.approx(float(row[each]), abs=1e-9)
            assert told.rank == int((row > row[each]).sum()) + 1


def test_a_prompt_of_one_token_has_one_empty_entry(llm_of: MakeLLM) -> None:
    (result,) = llm_of().generate([[5]], SamplingParams(prompt_logprobs=1, max_tokens=1))
    assert result.prompt_logprobs == [None]


# --- speculation by default


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_default_speculation_changes_no_text(llm_of: MakeLLM, params: SamplingParams, dtype: str) -> None:
    default = llm_of(dtype=dtype, use_speculative_decoding=True)
    plain = llm_of(dtype=dtype, use_speculative_decoding=False)
    assert tokens_of(default.generate(TEXTS, params)) == tokens_of(plain.generate(TEXTS, params))


def test_default_speculation_drafts_repeated_text(llm_of: MakeLLM) -> None:
    llm = llm_of(dtype="float32")
    assert llm.speculating
    results = [
        llm.generate(TEXTS[0], GREEDY)[0] for _ in range(8)
    ]  # on a busy machine, drafts may seem too slow at first
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
    accepted = [result.metrics.speculative_decoding.num_accepted_draft_tokens for result in results]
    assert any(accepted), "it was told the same before"


# --- speculation per request


def test_speculation_can_be_switched_off_per_request(llm_of: MakeLLM) -> None:
    llm = llm_of("near", spec_length=2)
    off, on = llm.generate(
        TEXTS[:1] * 2, [SamplingParams(temperature=0, max_tokens=24, speculation=wish) for wish in (False, True)]
    )
    assert tokens_of([off]) == tokens_of([on])
    assert (off.metrics.speculative_decoding.num_spec_steps, off.metrics.verification) == (0, None)
    assert on.metrics.speculative_decoding.num_accepted_draft_tokens > 0
    assert on.metrics.verification == "match"


@pytest.mark.parametrize("length", [0, 1, 3, 9])
def test_a_request_may_choose_its_draft_length(llm_of: MakeLLM, length: int) -> None:
    wish = SamplingParams(temperature=0, max_tokens=24, speculation={"num_speculative_tokens": length})
    (result,) = llm_of("target").generate(TEXTS[0], wish)
    assert len(result.metrics.speculative_decoding.acceptance_histogram) == (length + 1 if length else 0)
    assert tokens_of([result]) == tokens_of(llm_of().generate(TEXTS[0], GREEDY))


@pytest.mark.parametrize("method", ["draft_model", "cascade", "suffix"])
def test_drafts_that_end_where_the_drafter_is_unsure(llm_of: MakeLLM, method: str) -> None:
    draft = None if method == "suffix" else "near"
    config = {"method": method, "draft_length": {"policy": "confidence", "threshold": 0.05}}
    params = [SamplingParams(temperature=0, max_tokens=40), SamplingParams(seed=3, max_tokens=40)]
    speculating = llm_of(draft, speculative_config=config).generate([TEXTS[0] * 3] * 2, params)
    assert tokens_of(speculating) == tokens_of(llm_of().generate([TEXTS[0] * 3] * 2, params))
    metrics = speculating[0].metrics.speculative_decoding
    assert 0 < metrics.num_draft_tokens < 16 * metrics.num_spec_steps


@pytest.mark.parametrize("threshold", [0, 1.5, "high"])
def test_a_threshold_that_is_no_probability_is_refused(llm_of: MakeLLM, threshold: Any) -> None:
    config = {"draft_length": {"policy": "confidence", "threshold": threshold}}
    with pytest.raises(ConfigError, match="threshold"):
        llm_of("near", speculative_config=config)
    with pytest.raises(ConfigError, match="draws trees"):
        llm_of("near", speculative_config={"draft_length": "confidence", "tree": [2, 1]})


def test_a_request_may_choose_its_rule(llm_of: MakeLLM) -> None:
    verifiers = ["match", "rejection", "auto"]
    params = [SamplingParams(max_tokens=8, speculation={"verification": verifier}) for verifier in verifiers]
    results = llm_of("near").generate(TEXTS[:1] * 3, params)
    assert [result.metrics.verification for result in results] == ["match", "rejection", "block"]
    with pytest.raises(ConfigError, match="did you mean 'match'"):
        llm_of("near").generate(TEXTS[0], SamplingParams(speculation={"verification": "macht"}))


# --- trouble


def test_an_exception_in_the_middle_leaves_the_engine_usable(llm_of: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of("near", spec_length=2)
    expected = tokens_of(llm.generate(TEXTS, GREEDY))
    forward_target, calls = step_module.forward_target, iter(range(100))

    def failing(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return forward_target(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "forward_target", failing)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, GREEDY)
    assert not llm.engine.has_unfinished()
    assert tokens_of(llm.generate(TEXTS, GREEDY)) == expected


def test_two_engines_in_one_process_are_independent(checkpoints: Checkpoints) -> None:
    first = LLM(checkpoints.target, draft_model=checkpoints.near, dtype=EXACT_DTYPE)
    second = LLM(checkpoints.far, speculative_config={"method": "ngram"}, dtype=EXACT_DTYPE)
    alone = [[piece.token for piece in llm.stream(TEXTS[0], SEEDED)] for llm in (first, second)]
    streams = [llm.stream(TEXTS[0], SEEDED) for llm in (first, second)]
    together: list[list[int]] = [[], []]
    for pieces in zip(*streams, strict=True):
        for said, piece in zip(together, pieces, strict=True):
            said.append(piece.token)
    assert together == alone
    assert alone[0] != alone[1]


# --- what vLLM's users call


def test_a_lower_priority_is_served_sooner(llm_of: MakeLLM) -> None:
    llm, params = llm_of("near", max_num_seqs=1), SamplingParams(temperature=0, max_tokens=4)
    results = llm.generate(TEXTS[:3], params, priority=[2, 0, 1], use_tqdm=False)
    ended = [result.metrics.timing.last_token or 0.0 for result in results]
    assert sorted(range(3), key=ended.__getitem__) == [1, 2, 0]
    assert tokens_of(results) == tokens_of(llm.generate(TEXTS[:3], params))
    with pytest.raises(RequestError, match="3 prompts came with 1 priorities"):
        llm.generate(TEXTS[:3], params, priority=[1])


def test_a_bar_counts_prompts(llm_of: MakeLLM) -> None:
    bars: list[Bar] = []

    def make(**arguments: Any) -> Bar:
        bars.append(Bar(**arguments))
        return bars[-1]

    llm = llm_of("near")
    llm.generate(TEXTS, SamplingParams(n=3, seed=1, max_tokens=5), use_tqdm=make)
    llm.generate(TEXTS[:2], SamplingParams(n=2, beam_width=2, max_tokens=5), use_tqdm=make)
    assert [(bar.arguments["total"], bar.count, bar.closed) for bar in bars] == [(4, 4, True), (2, 2, True)]


def test_adapters_are_refused_before_anything_runs(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    with pytest.raises(ConfigError, match="adapters"):
        llm.generate(TEXTS, GREEDY, lora_request=object())
    assert not llm.engine.has_unfinished()


def test_prefixes_are_forgotten_but_for_open_streams(llm_of: MakeLLM) -> None:
    llm, prompt = llm_of("near"), [31, 32, 33] * 20
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    for cache in (llm.engine._context.cache, *llm.engine._drafters.caches):
        cache.reserve(99, 2 * cache.block_size)
        cache.insert_prefix(99, range(2 * cache.block_size))
        cache.release(99)
    assert not llm.reset_prefix_cache()
    for cache in (llm.engine._context.cache, *llm.engine._drafters.caches):
        assert cache.match_prefix(98, range(2 * cache.block_size)) == 0, "a cache kept what nobody holds"
        cache.release(98)
    assert len(list(stream)) == (GREEDY.max_tokens or 0) - 1
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_a_beam_search_is_that_of_generate(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5)
    outputs = llm.beam_search(TEXTS[:2], params)
    settings = SamplingParams(n=3, beam_width=3, max_tokens=6, length_penalty=0.5)
    for output, result in zip(outputs, llm.generate(TEXTS[:2], settings), strict=True):
        found = [(each.tokens, each.cum_logprob, each.finish_reason) for each in output.sequences]
        prompt = result.prompt_token_ids
        assert found == [([*prompt, *s.token_ids], s.cumulative_logprob, s.finish_reason) for s in result.outputs]


def test_a_beam_search_leaves_an_end_token_out_unless_asked(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    end = llm.generate([[7]], SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids[0]
    settings = SamplingParams(beam_width=1, max_tokens=4, length_penalty=-1, stop_token_ids=[end])
    (result,) = llm.generate([[7]], settings)
    for included in (True, False):
        params = BeamSearchParams(1, 4, include_stop_str_in_output=included)
        (sequence,) = BeamSearchOutput.of(result, params, llm.tokenizer).sequences
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", end)
        assert sequence.tokens == ([7, end] if included else [7])


@pytest.mark.parametrize("refused", [{"temperature": 0.5}, {"structured_outputs": {"regex": "a"}}, {"beam_width": 0}])
def test_settings_that_a_search_can_t_follow_are_refused(refused: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **refused})
