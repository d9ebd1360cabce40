"""Pairs of models whose text and acceptance are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.lab.inflation import LLAMA_50M, write_pair
from tests.examples import examples

SIZES = {"vocab_size": 9000, "num_hidden_layers": 2}
LLAMA = {
    **LLAMA_50M, **SIZES, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
T5 = {
    "model_type": "t5", "is_encoder_decoder": True, "vocab_size": 9000, "d_model": 64, "d_kv": 16, "d_ff": 96,
    "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    "decoder_start_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TOKENS = examples(80, least=40)


@pytest.mark.parametrize("config", [LLAMA, T5], ids=lambda config: config["model_type"])
def test_a_draft_s_acceptance_is_the_chosen_share(config: dict[str, Any], tmp_path: Path) -> None:
    """The text after token 0 has it exactly: plain decoding of the draft model finds the same tokens."""
    target, draft = write_pair(tmp_path, 0.75, (config, config), first=TOKENS)
    llm = LLM(str(target), draft_model=str(draft), spec_length=1, dtype="bfloat16", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompt = {"encoder_prompt": {"prompt_token_ids": [5, 6]}, "decoder_prompt": None} if config is T5 else [0]
    (made,) = llm.generate([prompt], params, use_tqdm=False)
    text = [0, *made.outputs[0].token_ids]
    assert len(set(text)) == TOKENS + 1
    guesses = LLM(str(draft), dtype="bfloat16", use_speculative_decoding=False, max_model_len=256)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompts = [
        {"encoder_prompt": {"prompt_token_ids": [5]}, "decoder_prompt": {"prompt_token_ids": [0, token]}}
        if config is T5
        else [token]
        for token in text[:-1]
    ]
    found = [each.outputs[0].token_ids[0] for each in guesses.generate(prompts, one, use_tqdm=False)]
    assert sum(a == b for a, b in zip(found, text[1:], strict=True)) == 0.75 * TOKENS
    metrics = made.metrics.speculative_decoding
    assert 0.6 < metrics.acceptance_rate < 0.9
