"""No drafter changes a text of a trained model: SmolLM2-135M-Instruct, and Gemma 3 270M across its window.

Drafters with a trained head are left out: there is none for these models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, RequestOutput, SamplingParams, plugins
from speculant.text import Tokenizer
from tests.drafters import HEADS, options_of, predicting
from tests.real.conftest import file_of
from tests.real.test_logits import WINDOW
from tests.real.texts import SUBJECTS, chunks, pages

DRAFTERS = [name for name in plugins.names("speculant.drafting") if name not in HEADS]
BEFORE = 12  # tokens of a long prompt up to the end of the window, which its text then crosses
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "top_p": 0.95}


@dataclass
class Texts:
    """A model's prompts, and its texts of `tokens` tokens for each kind of settings."""

    file: Path
    prompts: Sequence[str | list[int]]
    tokens: int
    kinds: dict[str, dict[str, float]]
    max_model_len: int
    vocab_size: int

    def params(self, kind: str) -> list[SamplingParams]:
        """Return the settings of each prompt; seeded ones have a seed each."""
        seeds = [None if kind == "greedy" else 100 + index for index in range(len(self.prompts))]
        return [
            SamplingParams(**self.kinds[kind], seed=seed, max_tokens=self.tokens, ignore_eos=True) for seed in seeds
        ]

    def llm(self, **arguments: Any) -> LLM:
        return LLM(str(self.file), max_model_len=self.max_model_len, **arguments)

    @cached_property
    def plain(self) -> dict[str, list[list[int]]]:
        """The texts without speculation, each prompt alone."""
        llm = self.llm(max_num_seqs=1, use_speculative_decoding=False)
        return {kind: tokens_of(llm.generate([*self.prompts], self.params(kind))) for kind in self.kinds}


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


def smollm2_texts() -> Texts:
    kinds = {"greedy": GREEDY, "seeded": {**SEEDED, "repetition_penalty": 1.1}}
    return Texts(file_of("smollm2"), SUBJECTS, 40, kinds, 512, 49152)


def gemma3_texts() -> Texts:
    """Return short prompts, one that ends before the window's end, and one that is longer than the window."""
    file = file_of("gemma3")
    encode = Tokenizer.load(file).encode
    (text,) = chunks(encode, WINDOW + 100, pages()[:1])
    prompts = [*(encode(each) for each in SUBJECTS[:6]), text[: WINDOW - BEFORE], text]
    return Texts(file, prompts, 32, {"greedy": GREEDY, "seeded": SEEDED}, 2 * WINDOW, 262_144)


@pytest.fixture(scope="module", params=[smollm2_texts, gemma3_texts], ids=["smollm2", "gemma3"])
def texts(request: pytest.FixtureRequest) -> Texts:
    made: Texts = request.param()
    return made


def test_plain_texts_differ(texts: Texts) -> None:
    """Otherwise equal texts would show little."""
    for own in texts.plain.values():
        assert len({tuple(text) for text in own}) == len(texts.prompts)
    assert texts.plain["greedy"] != texts.plain["seeded"]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_no_drafter_changes_a_text(texts: Texts, drafter: str, batch: int) -> None:
    config: dict[str, Any] = {"use_speculative_decoding": False}
    if drafter != "none":
        facts = plugins.load("speculant.drafting", drafter).METHOD
        options = options_of(drafter, texts.vocab_size, texts.plain["greedy"])
        config = {"speculative_config": {"method": drafter, **options}, "spec_length": 4}
        config |= {"draft_model": str(texts.file)} if facts.uses_model else {}
    llm = texts.llm(max_num_seqs=batch, **config)
    accepted = 0
    for kind, expected in texts.plain.items():
        settings = [predicting(drafter, own, text) for own, text in zip(texts.params(kind), expected, strict=True)]
        outputs = llm.generate([*texts.prompts], settings)
        assert tokens_of(outputs) == expected, kind
        accepted += sum(out.metrics.speculative_decoding.num_accepted_draft_tokens for out in outputs)
    assert accepted > 0 or drafter in ("none", "random"), "no draft was accepted: a weak test"
