"""Gemma 3 270M in Q4_K_M, a base model: its greedy texts are those of transformers, across its window."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.real.test_drafters import gemma3_texts, tokens_of
from tests.real.truth import load_gemma3

TIE = 1e-3  # between logits, which differ from transformers' by less than 1e-4 of their spread


def test_greedy_texts_are_those_of_transformers(gemma3: Path) -> None:
    """On the reference in float32. Where two texts part, the two tokens are nearly a tie."""
    model, own = load_gemma3(gemma3), gemma3_texts()
    chosen = [own.prompts[index] for index in (0, 3, -2, -1)]
    llm = own.llm(kernels="reference", dtype="float32", use_speculative_decoding=False)
    texts = tokens_of(llm.generate(chosen, own.params("greedy")[: len(chosen)]))
    for tokens, found in zip(chosen, texts, strict=True):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([tokens]), max_new_tokens=own.tokens, min_new_tokens=own.tokens, do_sample=False
            )
        expected = out[0].tolist()[len(tokens) :]
        part = next((index for index in range(own.tokens) if found[index] != expected[index]), None)
        if part is not None:
            with torch.inference_mode():
                logits = model(torch.tensor([[*tokens, *expected[:part]]]), logits_to_keep=1).logits[0, 0]
            assert abs(float(logits[found[part]] - logits[expected[part]])) < TIE
