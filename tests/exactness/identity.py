"""Texts of engines with any drafter, to be compared with those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speculant import LLM, SamplingParams, plugins
from tests.drafters import BLIND, model_of, options_of, predicting

Texts = list[list[int]]


def prompts_of(count: int) -> Texts:
    """Return prompts for the small checkpoints; each repeats two tokens."""
    return [[70 + place, 71, 72 + place, 80, 71, 72] for place in range(count)]


def params_of(count: int, tokens: int) -> dict[str, list[SamplingParams]]:
    """Return greedy settings, and seeded ones with a seed each, for a number of prompts."""
    common: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    return {
        "greedy": [SamplingParams(temperature=0.0, **common)] * count,
        "seeded": [SamplingParams(temperature=0.7, seed=place, **common) for place in range(count)],
    }


@dataclass(frozen=True)
class Job:
    """A target with what its engines have in common, and prompts.

    sizes: the width of its states, and its vocabulary. arguments: of every engine. says: what engines tell of their
    kernels.
    """

    target: str
    prompts: Sequence[Any]
    sizes: tuple[int, int]
    arguments: dict[str, Any]
    says: Sequence[str] = ()

    def generate(self, params: list[SamplingParams], runs: int = 1, **arguments: Any) -> tuple[Texts, int, int]:
        """Return the texts, the same in every run, and how many tokens were drafted and accepted in the last one."""
        llm = LLM(self.target, **{**self.arguments, **arguments})
        assert all(words in llm.kernels for words in self.says), llm.kernels
        found = [llm.generate(self.prompts, params) for _ in range(runs)]
        texts = [[list(out.outputs[0].token_ids) for out in outputs] for outputs in found]
        assert texts == texts[-1:] * runs, "a text changed from one run to the next"
        assert llm.engine.metrics.drafter_errors == 0
        counted = [out.metrics.speculative_decoding for out in found[-1]]
        drafted = sum(each.num_draft_tokens for each in counted)
        return texts[-1], drafted, sum(each.num_accepted_draft_tokens for each in counted)

    def plain(self, params: list[SamplingParams], least: int = 1) -> Texts:
        """Return the text of each prompt alone, without drafts; more than `least` differ."""
        found, *_ = self.generate(params, use_speculative_decoding=False, max_num_seqs=1)
        assert len({tuple(text) for text in found}) > least, "the texts hardly differ: a weak test"
        return found

    def check(
        self, drafter: str, draft: str, params: list[SamplingParams], plain: Texts, length: int = 3, **arguments: Any
    ) -> int:
        """Assert that a drafter with drafts of a length changes no text; return how many tokens were accepted.

        draft: the model of drafters that take one.
        """
        given = [predicting(drafter, each, text) for each, text in zip(params, plain, strict=True)]
        options = {**options_of(drafter, self.sizes[1], plain), **arguments.pop("options", {})}
        config = {"method": drafter, "num_speculative_tokens": length, **options}
        model = model_of(drafter, draft, *self.sizes)
        learns = plugins.load("speculant.drafting", drafter).METHOD.learns
        texts, drafted, accepted = self.generate(
            given, 2 if learns else 1, draft_model=model, speculative_config=config, **arguments
        )
        assert texts == plain, f"{drafter}, {length} drafts, {arguments}"
        assert drafted > 0, "nothing was drafted, so nothing was shown"
        assert accepted > 0 or model != draft or drafter in BLIND, "no draft was accepted: a weak test"
        return accepted
