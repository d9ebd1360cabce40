"""Gemma 3 270M in Q4_K_M, a base model: greedy text, and texts that no drafter changes, across its window.

Drafters with a trained head are left out: there is none for this model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speculant import LLM, RequestOutput, SamplingParams, plugins
from speculant.text import Tokenizer
from tests.drafters import HEADS, options_of, predicting
from tests.real.test_gemma3_logits import WINDOW
from tests.real.texts import SUBJECTS, chunks, pages
from tests.real.truth import load_gemma3

DRAFTERS = [name for name in plugins.names("speculant.drafting") if name not in HEADS]
TOKENS = 32
BEFORE = 12  # tokens of a long prompt up to the end of the window, which its text then crosses
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95},
}
TIE = 1e-3  # between logits, which differ from transformers' by less than 1e-4 of their spread


@pytest.fixture(scope="module")
def prompts(gemma3: Path) -> list[list[int]]:
    """Return short prompts, one that ends before the window's end, and one that is longer than the window."""
    encode = Tokenizer.load(gemma3).encode
    (text,) = chunks(encode, WINDOW + 100, pages()[:1])
    return [*(encode(each) for each in SUBJECTS[:6]), text[: WINDOW - BEFORE], text]


def params(kind: str, count: int) -> list[SamplingParams]:
    """Return the settings of each prompt; seeded ones have a seed each."""
    seeds = [None if kind == "greedy" else 100 + index for index in range(count)]
    return [SamplingParams(**KINDS[kind], seed=seed, max_tokens=TOKENS, ignore_eos=True) for seed in seeds]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


def llm_of(path: Path, **arguments: Any) -> LLM:
    return LLM(str(path), max_model_len=2 * WINDOW, **arguments)


def test_greedy_texts_are_those_of_transformers(gemma3: Path, prompts: list[list[int]]) -> None:
    """On the reference in float32. Where two texts part, the two tokens are nearly a tie."""
    model, chosen = load_gemma3(gemma3), [prompts[index] for index in (0, 3, -2, -1)]
    llm = llm_of(gemma3, kernels="reference", dtype="float32", use_speculative_decoding=False)
    texts = tokens_of(llm.generate(chosen, params("greedy", len(chosen))))
    for tokens, found in zip(chosen, texts, strict=True):
        with torch.inference_mode():
            out = model.generate(torch.tensor([tokens]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        expected = out[0].tolist()[len(tokens) :]
        part = next((index for index in range(TOKENS) if found[index] != expected[index]), None)
        if part is not None:
            with torch.inference_mode():
                logits = model(torch.tensor([[*tokens, *expected[:part]]]), logits_to_keep=1).logits[0, 0]
            assert abs(float(logits[found[part]] - logits[expected[part]])) < TIE


@pytest.fixture(scope="module")
def plain(gemma3: Path, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Return the texts without speculation, each prompt alone."""
    llm = llm_of(gemma3, max_num_seqs=1, use_speculative_decoding=False)
    return {kind: tokens_of(llm.generate(prompts, params(kind, len(prompts)))) for kind in KINDS}


def test_plain_texts_differ(plain: dict[str, list[list[int]]]) -> None:
    """Otherwise equal texts would show little."""
    for texts in plain.values():
        assert len({tuple(text) for text in texts}) == len(texts)
    assert plain["greedy"] != plain["seeded"]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_no_drafter_changes_a_text(
    gemma3: Path, prompts: list[list[int]], plain: dict[str, list[list[int]]], drafter: str, batch: int
) -> None:
    config: dict[str, Any] = {"use_speculative_decoding": False}
    if drafter != "none":
        facts = plugins.load("speculant.drafting", drafter).METHOD
        options = options_of(drafter, 262_144, plain["greedy"])
        config = {"speculative_config": {"method": drafter, **options}, "spec_length": 4}
        config |= {"draft_model": str(gemma3)} if facts.uses_model else {}
    llm = llm_of(gemma3, max_num_seqs=batch, **config)
    accepted = 0
    for kind, expected in plain.items():
        settings = [predicting(drafter, *each) for each in zip(params(kind, len(prompts)), expected, strict=True)]
        outputs = llm.generate(prompts, settings)
        assert tokens_of(outputs) == expected, kind
        accepted += sum(out.metrics.speculative_decoding.num_accepted_draft_tokens for out in outputs)
    assert accepted > 0 or drafter in ("none", "random"), "no draft was accepted: a weak test"
