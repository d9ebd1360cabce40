"""Targets and drafts that do not quite fit each other: served, or refused with a reason."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant import LLM, SamplingParams
from speculant.errors import ConfigError, PairError, SpeculantError
from speculant.kernels import Kernels, open_kernels, panel_rows, usable_sets
from speculant.models import DraftVocabulary, load_model
from tests.integration.conftest import MakeLLM
from tests.models import ALPHABET, EXACT_DTYPE, VOCAB_SIZE, Checkpoints, Shape, write_checkpoint
from tests.native import needs_kernels

TEXTS = ["def read(path):", "class A:", "import os"]
GREEDY = SamplingParams(temperature=0, max_tokens=28)
SEEDED = SamplingParams(temperature=0.9, seed=8, max_tokens=28)
SAMPLED = SamplingParams(max_tokens=28)
MOST_ROWS = 320  # of the weights that `write_checkpoint` can make

KERNELS = ["reference", *(["native"] if usable_sets() else [])]
DRAFTS = {
    "fewer padded rows": Shape(noise=0.1, vocab_size=258),
    "more padded rows": Shape(noise=0.1, vocab_size=300),
    "another family": Shape(family="qwen2", seed=3),
    "a family with other norms": Shape(family="qwen3", seed=4, layers=1),
    "a shorter context": Shape(noise=0.1, max_positions=24),
    "a context shorter than the prompt": Shape(noise=0.1, max_positions=4),
}


ALIKE = ("fewer padded rows", "a family with other norms")  # other tests and cases here are nearly the same


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, id=name, marks=[pytest.mark.slow] if name in ALIKE else []) for name, shape in DRAFTS.items()],
)
def test_a_draft_that_can_be_used_changes_no_text(llm_of: MakeLLM, tmp_path: Path, shape: Shape) -> None:
    draft = write_checkpoint(tmp_path / "draft", shape)
    llm = LLM(llm_of().config.model, draft_model=draft, dtype=EXACT_DTYPE, spec_length=5)
    drafted = 0
    for params in (GREEDY, SEEDED):
        expected = llm_of().generate(TEXTS, params)
        results = llm.generate(TEXTS, params)
        assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in expected]
        drafted += sum(each.metrics.speculative_decoding.num_draft_tokens for each in results)
    results = llm.generate(TEXTS, SAMPLED)
    assert {each.metrics.verification for each in results} == {"block"}
    assert (drafted > 0) == (shape.max_positions > 4)
    llm.engine.check()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_prompt_in_the_target_s_padding_is_served(llm_of: MakeLLM, tmp_path: Path, params: SamplingParams) -> None:
    """Ids that the target's head has and the draft's has not: they mean nothing, and must not crash either."""
    draft = write_checkpoint(tmp_path / "draft", Shape(noise=0.1, vocab_size=258))
    llm = LLM(llm_of().config.model, draft_model=draft, dtype=EXACT_DTYPE, spec_length=5)
    prompt = [5, VOCAB_SIZE - 1, 6, VOCAB_SIZE - 3]
    (result,) = llm.generate([prompt], params)
    assert result.metrics.speculative_decoding.num_draft_tokens > 0
    if params is GREEDY:
        assert result.outputs[0].token_ids == llm_of().generate([prompt], params)[0].outputs[0].token_ids


@needs_kernels
@pytest.mark.parametrize("tree", [None, [2, 1]], ids=["chain", "tree"])
def test_ids_beyond_the_draft_s_head_name_none_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: list[int] | None
) -> None:
    """Texts and outputs of a larger target are full of them; the draft reads likely rows, as of a large head."""
    draw, panels = Kernels.draft, -(-258 // panel_rows(open_kernels()))  # type: ignore[arg-type]
    read = set[int]()

    def reading(self: Kernels, ops: Any, head: Any, on: Any, draft: Any) -> None:
        read.update((ctypes.c_int64 * draft.num_panels).from_address(draft.panels) if draft.panels else ())
        assert max(read, default=0) < panels, "a panel beyond the head"
        draw(self, ops, head, on, draft)

    monkeypatch.setattr(Kernels, "draft", reading)
    monkeypatch.setattr("speculant.models.native.decoder.LEAST_VOCABULARY", 1)
    target = write_checkpoint(tmp_path / "target", Shape(vocab_size=MOST_ROWS))
    draft = write_checkpoint(tmp_path / "draft", Shape(noise=0.1, vocab_size=258))
    common: dict[str, Any] = {"dtype": "float32", "kernels": "native"}
    plain = LLM(target, **common, use_speculative_decoding=False)
    llm = LLM(target, draft_model=draft, **common, spec_length=4, speculative_config={"tree": tree} if tree else {})
    generator, likes = random.Random(1), dict.fromkeys(range(258, MOST_ROWS), 3.0)
    prompts = [[MOST_ROWS - 1, 5, *generator.choices(range(200, MOST_ROWS), k=4 * place)] for place in range(6)]
    common = {"max_tokens": 24, "logit_bias": likes, "repetition_penalty": 1.2}
    params = [SamplingParams(temperature=0.9 * (place % 3), seed=place, **common) for place in range(6)]
    results, expected = llm.generate(prompts, params), plain.generate(prompts, params)
    assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in expected]
    llm.generate(prompts, SAMPLED)
    assert panels - 1 in read, "a weak test"
    assert llm.engine.metrics.drafter_errors == 0


def test_a_short_draft_context_limits_the_draft_alone(llm_of: MakeLLM, tmp_path: Path) -> None:
    """With a perfect draft of 24 positions, drafting goes as far as they reach, and the text goes on."""
    draft = write_checkpoint(tmp_path / "draft", Shape(max_positions=24))
    llm = LLM(llm_of().config.model, draft_model=draft, dtype=EXACT_DTYPE, spec_length=5)
    (result,) = llm.generate(TEXTS[1], GREEDY)
    num_prompt = len(result.prompt_token_ids)
    assert len(result.outputs[0].token_ids) == 28
    assert result.metrics.speculative_decoding.num_accepted_draft_tokens <= 24 - num_prompt
    assert result.metrics.speculative_decoding.num_accepted_draft_tokens >= (24 - num_prompt) // 2


def test_a_draft_with_other_tokens_is_refused_if_told_so(checkpoints: Checkpoints, tmp_path: Path) -> None:
    swapped = [*ALPHABET]
    swapped[7], swapped[9] = swapped[9], swapped[7]
    draft = write_checkpoint(tmp_path / "draft", tokens=swapped)
    with pytest.raises(PairError) as caught:
        LLM(checkpoints.target, draft_model=draft, speculative_config={"use_heterogeneous_vocab": False})
    problem = caught.value.problem
    assert "2 of 258 ids differ" in problem
    assert f"id 7 is {ALPHABET[7]!r} in the target, {ALPHABET[9]!r} in the draft" in problem
    assert f"id 9 is {ALPHABET[9]!r}" in problem
    assert "use_heterogeneous_vocab" in caught.value.fix


ADDED = ["<think>", "<call>"]  # tokens 258 and 259
FEWER = {
    "untied": Shape(noise=0.1),
    "tied": Shape(noise=0.1, tied=True),
    "fewer rows, tied": Shape(noise=0.1, vocab_size=258, tied=True),
    "fewer rows": Shape(noise=0.1, vocab_size=258),
}
SEEN = [5, 258, 6, 259, 7]  # a prompt with the added tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", [None, [2, 1]], ids=["chain", "tree"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", FEWER.values(), ids=FEWER)
def test_a_draft_without_some_of_the_target_s_tokens_is_used(
    tmp_path: Path, shape: Shape, kernels: str, tree: list[int] | None
) -> None:
    """The target has two added tokens and likes them; the text has them, and no draft does."""
    target = write_checkpoint(tmp_path / "target", added=ADDED)
    draft = write_checkpoint(tmp_path / "draft", shape)
    common: dict[str, Any] = {"dtype": "float32", "kernels": kernels}
    plain = LLM(target, **common, use_speculative_decoding=False)
    llm = LLM(target, draft_model=draft, **common, spec_length=4, speculative_config={"tree": tree} if tree else {})
    assert "the draft lacks 2 of the target's tokens" in llm.speculation
    likes = {258: 7.0, 259: 6.0}
    for params in (GREEDY, SEEDED, SamplingParams(temperature=1.0, seed=4, max_tokens=40, logit_bias=likes)):
        expected, (result,) = plain.generate([SEEN], params), llm.generate([SEEN], params)
        assert result.outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert {258, 259} & {*result.outputs[0].token_ids}, "committed in the middle of the text"
    assert result.metrics.speculative_decoding.num_draft_tokens > 0


@pytest.mark.parametrize("kernels", [pytest.param("reference", marks=pytest.mark.slow), *KERNELS[1:]])
@pytest.mark.parametrize("method", ["specinfer", "cascade", "merge"])
def test_every_method_with_a_draft_model_fits_its_tokens(tmp_path: Path, method: str, kernels: str) -> None:
    target = write_checkpoint(tmp_path / "target", added=ADDED)
    draft = write_checkpoint(tmp_path / "draft", FEWER["fewer rows, tied"])
    common: dict[str, Any] = {"dtype": "float32", "kernels": kernels}
    llm = LLM(target, **common, speculative_config={"method": method, "model": draft, "num_speculative_tokens": 4})
    params = [GREEDY, SEEDED, SamplingParams(temperature=1.0, seed=4, max_tokens=40, logit_bias={258: 7.0, 259: 6.0})]
    expected = LLM(target, **common, use_speculative_decoding=False).generate([SEEN] * 3, params)
    results = llm.generate([SEEN] * 3, params)
    assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in expected]
    assert results[0].metrics.speculative_decoding.num_draft_tokens > 0
    assert llm.engine.metrics.drafter_errors == 0


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", FEWER.values(), ids=FEWER)
def test_tokens_that_the_draft_lacks_are_never_drafted(tmp_path: Path, shape: Shape, kernels: str) -> None:
    """Even where the draft's rows of padding would be likely; the draft reads a line break in their place."""
    draft = write_checkpoint(tmp_path / "draft", shape)
    vocabulary = DraftVocabulary(VOCAB_SIZE, frozenset({258, 259}), substitute=10)
    model = load_model(draft, "float32", kernels=kernels, vocabulary=vocabulary).model
    plain = load_model(draft, "float32", kernels=kernels).model
    assert model.vocab_size == VOCAB_SIZE
    logits, own = (each.logits(plain.embed(torch.arange(8))) for each in (model, plain))
    drawable = [token for token in range(shape.vocab_size) if token not in (258, 259)]
    assert torch.equal(logits[:, drawable], own[:, drawable])
    assert logits.isfinite().sum(-1).tolist() == [len(drawable)] * 8
    read = [token if token in drawable else 10 for token in range(VOCAB_SIZE)]
    assert torch.equal(model.embed(torch.arange(VOCAB_SIZE)), plain.embed(torch.tensor(read)))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_draft_with_more_tokens_than_the_target_is_used(
    checkpoints: Checkpoints, tmp_path: Path, kernels: str
) -> None:
    """The draft's own tokens mean nothing to the target, which has rows of padding in their place."""
    draft = write_checkpoint(tmp_path / "draft", Shape(noise=0.1, vocab_size=300), added=ADDED)
    common: dict[str, Any] = {"dtype": "float32", "kernels": kernels}
    plain = LLM(checkpoints.target, **common, use_speculative_decoding=False)
    llm = LLM(checkpoints.target, draft_model=draft, **common, spec_length=4)
    assert "lacks" not in llm.speculation
    for params in (GREEDY, SEEDED):
        expected, results = plain.generate(TEXTS, params), llm.generate(TEXTS, params)
        assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in expected]
    assert sum(each.metrics.speculative_decoding.num_accepted_draft_tokens for each in results) > 0


def test_head_tokens_that_the_target_lacks_are_left_out(tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", Shape(noise=0.1))
    vocabulary = DraftVocabulary(VOCAB_SIZE, frozenset({258, 259}), substitute=10)
    model = load_model(draft, head_tokens=(3, 40, 258), vocabulary=vocabulary).model
    assert model.logits(torch.ones(1, 32)).isfinite().nonzero()[:, 1].tolist() == [3, 40]
    with pytest.raises(ConfigError, match="no token that both"):
        load_model(draft, head_tokens=(258,), vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_config": {"method": "ngrm"}}, "did you mean 'ngram'"),
        ({"speculative_config": {"method": "ngram", "max_ordr": 3}}, "did you mean 'max_order'"),
        ({"speculative_config": {"method": "ngram", "max_order": 1}}, "n-gram orders"),
        ({"speculative_config": {"method": "ngram", "max_order": "3"}}, "max_order"),
        ({"speculative_config": {"method": "ngram", "verification": "mach"}}, "did you mean 'match'"),
        ({"speculative_config": {"method": "ngram", "draft_length": "fxed"}}, "did you mean 'fixed'"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "uses no model"),
        ({"speculative_config": {"method": "draft_model"}}, "drafts with a model"),
        ({"speculative_config": {"method": "mlp_speculator", "model": "x"}}, "'mlp_speculator'.*is not supported"),
        ({"speculative_config": {"method": "pard2", "model": "x"}}, "reads the target's states.*is not supported"),
        ({"draft_model": "/nowhere/at/all"}, "no folder"),
        ({"max_model_len": 10_000}, "256 positions"),
    ],
)
def test_an_unfit_pair_is_refused_at_start(checkpoints: Checkpoints, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpeculantError, match=message) as caught:
        LLM(checkpoints.target, **arguments)
    assert caught.value.fix


def test_an_unknown_argument_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(checkpoints.target, max_num_seq=3)


@pytest.mark.parametrize(
    ("arguments", "speculating", "words"),
    [
        (
            {"dtype": "float32"},
            True,
            "suffix, prompt_lookup (method fallback, no draft model is named), adaptive length",
        ),
        ({"dtype": "float64"}, False, "use_speculative_decoding=True turns it on"),
        ({"use_speculative_decoding": True}, True, "suffix, prompt_lookup (method fallback, "),
        ({"draft": "near", "use_speculative_decoding": False}, False, "use_speculative_decoding is False"),
        ({"draft": "near"}, True, "suffix, prompt_lookup, draft_model (method fallback), adaptive length"),
        ({"draft": "near", "spec_length": 2}, True, "draft_model, 2 tokens"),
        ({"speculative_config": {"method": "ngram"}}, True, "ngram, adaptive length"),
        ({"speculative_config": {"method": "ngram", "draft_length": "fixed"}}, True, "ngram, 4 tokens"),
    ],
)
def test_the_engine_reports_whether_it_speculates(
    llm_of: MakeLLM, arguments: dict[str, Any], speculating: bool, words: str
) -> None:
    llm = llm_of(**arguments)
    assert llm.speculating is speculating
    assert words in llm.speculation
