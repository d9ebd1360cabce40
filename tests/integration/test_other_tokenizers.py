"""Drafts of another tokenizer over whole models: the text is that of plain decoding, and their tokens are accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.errors import ConfigError, PairError
from speculant.kernels import usable_sets
from tests.examples import examples
from tests.mapped import in_order
from tests.models import EXACT_DTYPE, Checkpoints, Shape, write_checkpoint

KERNELS = ["reference", *(["native"] if usable_sets() else [])]
BYTES = random.Random(5).sample(range(256), 256)
FEWER = [byte for byte in BYTES if byte not in b"aeiou"]
TEXTS = ["def read(path):", "naïve café", "def read(path):\n    return", "你好 👍"]
NUM_TOKENS = examples(16, least=10)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.9, seed=8, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, frequency_penalty=0.5, max_tokens=NUM_TOKENS),
]
METHODS: list[dict[str, Any]] = [
    {"method": "draft_model"},
    {"method": "draft_model", "tree": [2, 1]},
    {"method": "specinfer"},
    {"method": "cascade"},
    {"method": "merge"},
]


def engine(target: str, draft: str | None, kernels: str, length: int = 4, **further: Any) -> LLM:
    """Make an engine, with drafts of a length if a draft is given."""
    config = {"draft_length": "fixed", **further.pop("speculative_config", {})}
    own = {"speculative_config": {**config, "model": draft, "num_speculative_tokens": length}}
    return LLM(
        target, dtype="float32", kernels=kernels, **(own if draft else {"use_speculative_decoding": False}), **further
    )


def outputs(llm: LLM, params: SamplingParams | Sequence[SamplingParams], texts: Sequence[Any] = TEXTS) -> list[Any]:
    return [result.outputs[0].token_ids for result in llm.generate(list(texts), params)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", METHODS, ids=str)
@pytest.mark.parametrize("order", [BYTES, FEWER], ids=["other ids", "fewer tokens"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_text_is_that_of_plain_decoding(
    checkpoints: Checkpoints, tmp_path: Path, kernels: str, order: list[int], config: dict[str, Any]
) -> None:
    draft = in_order(tmp_path / "draft", order, Shape(noise=0.1))
    plain = engine(checkpoints.target, None, kernels)
    llm = engine(checkpoints.target, draft, kernels, speculative_config=config)
    assert f"share {len(order) + 2} of the target's 264 tokens" in llm.speculation
    params = [each for each in PARAMS for _ in TEXTS]
    assert outputs(llm, params, TEXTS * len(PARAMS)) == outputs(plain, params, TEXTS * len(PARAMS))
    total = llm.engine.metrics
    assert total.accepted_tokens > 0.2 * total.draft_tokens, "they are the target's tokens in another order"
    assert total.drafter_errors == 0
    (sampled,) = llm.generate(TEXTS[:1], SamplingParams(max_tokens=24))
    assert sampled.metrics.speculative_decoding.num_accepted_draft_tokens > 0
    llm.engine.check()


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_same_model_in_another_order_is_always_right(
    checkpoints: Checkpoints, tmp_path: Path, kernels: str
) -> None:
    """Its ids and rows are in another order, so it computes the target's own distributions."""
    draft = in_order(tmp_path / "draft", BYTES, Shape())
    llm = engine(checkpoints.target, draft, kernels, draft_quantization="none")
    results = llm.generate(TEXTS, PARAMS[:2] * 2)
    assert all(result.metrics.speculative_decoding.draft_acceptance_rate == 1 for result in results)


@pytest.mark.parametrize("kernels", [pytest.param("reference", marks=pytest.mark.slow), *KERNELS[1:]])
def test_prefixes_and_preemption_change_no_text(checkpoints: Checkpoints, tmp_path: Path, kernels: str) -> None:
    """The caches are too small for all sequences, and prompts share a long beginning."""
    draft = in_order(tmp_path / "draft", FEWER, Shape(noise=0.1))
    texts = ["once upon a time there was a house, " * 2 + end for end in ("and", "but", "or", "and")]
    plain = engine(checkpoints.target, None, kernels)
    small: dict[str, Any] = {"kv_memory": "120KiB", "max_num_seqs": 4, "block_size": 8}
    llm = engine(checkpoints.target, draft, kernels, **small)
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=60) for seed in (1, 2, 3, 1)]
    for _ in range(2):
        assert outputs(llm, params, texts) == outputs(plain, params, texts)
    metrics = llm.engine.metrics
    assert metrics.prefix_hit_tokens > 0
    assert metrics.preemptions > 0
    assert metrics.drafter_errors == 0
    llm.engine.check()


def test_prompts_of_any_ids_are_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Padding, special tokens and parts of characters: the draft has none of them, or others."""
    draft = in_order(tmp_path / "draft", FEWER[:100], Shape(noise=0.1))
    prompts = [[263, 5, 258], [257, 256, 7], [200, 201, 97, 101, 256]]
    llm, plain = engine(checkpoints.target, draft, "reference"), engine(checkpoints.target, None, "reference")
    assert outputs(llm, PARAMS[0], prompts) == outputs(plain, PARAMS[0], prompts)
    assert llm.engine.metrics.draft_tokens > 0
    assert llm.engine.metrics.drafter_errors == 0


def test_a_short_context_ends_drafts_of_another_tokenizer(checkpoints: Checkpoints, tmp_path: Path) -> None:
    draft = in_order(tmp_path / "draft", FEWER, Shape(max_positions=24))
    llm, plain = engine(checkpoints.target, draft, "reference"), engine(checkpoints.target, None, "reference")
    assert outputs(llm, PARAMS[0], ["class A:"]) == outputs(plain, PARAMS[0], ["class A:"])
    assert 0 < llm.engine.metrics.draft_tokens < 24


def test_adaptive_lengths_draft_with_another_tokenizer(checkpoints: Checkpoints, tmp_path: Path) -> None:
    draft = in_order(tmp_path / "draft", FEWER, Shape(noise=0.1))
    llm = LLM(checkpoints.target, draft_model=draft, dtype=EXACT_DTYPE)
    plain = LLM(checkpoints.target, dtype=EXACT_DTYPE, use_speculative_decoding=False)
    assert "the vocabularies differ" in llm.speculation
    assert outputs(llm, PARAMS[0]) == outputs(plain, PARAMS[0])


def test_vocabularies_without_a_common_token_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", Shape(vocab_size=5), tokens=["ĠĠĠĠ", "zzzz", "yyyy"])
    with pytest.raises(PairError, match="no token in common") as caught:
        LLM(checkpoints.target, draft_model=draft)
    assert "another draft model" in caught.value.fix


def test_vllm_s_key_is_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    draft = in_order(tmp_path / "draft", BYTES, Shape(noise=0.1))
    llm = engine(checkpoints.target, draft, "reference", speculative_config={"use_heterogeneous_vocab": True})
    assert "the vocabularies differ" in llm.speculation
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab='yes' is not a truth value"):
        engine(checkpoints.target, draft, "reference", speculative_config={"use_heterogeneous_vocab": "yes"})
