"""Figures of whole requests: those of each sample, and those of all samples of a request together."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.cli.generate import figures
from tests.figures import assert_figures, passes_of
from tests.models import END, EXACT_DTYPE, Shape, write_checkpoint

COMMON_END = 47  # a token that the models say soon
PROMPTS = ["def read(path):", "class A:", "import os", "x = [1, 2, 3]\n" * 12]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"use_speculative_decoding": False},
    "usual": {},
    "draft model": {"draft": "near", "spec_length": 4},
    "perfect": {"draft": "target", "spec_length": 5},
    "lookup": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 6, "draft_length": "fixed"}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write a target and a draft near it, which end soon."""
    folder = tmp_path_factory.mktemp("ending")
    shapes = {"target": Shape(end=[END, COMMON_END]), "near": Shape(noise=0.1, end=[END, COMMON_END])}
    return {name: write_checkpoint(folder / name, shape) for name, shape in shapes.items()}


def drawn_params(chance: random.Random, text: str, tokens: list[int]) -> SamplingParams:
    """Draw settings under which requests end in all kinds of ways: `text` and `tokens` are a likely output."""
    place = chance.randrange(2, len(tokens) - 2)
    ends: list[dict[str, Any]] = [
        {},
        {"ignore_eos": True},
        {"stop": text[place : place + 2], "ignore_eos": True},
        {"stop_token_ids": [tokens[place]], "include_stop_str_in_output": True, "ignore_eos": True},
        {"min_tokens": place, "max_tokens": 30},
    ]
    sampling = {"temperature": 0} if chance.random() < 0.5 else {"temperature": 0.8, "n": chance.randint(1, 3)}
    usual = {"max_tokens": chance.randint(1, 30), "seed": chance.randrange(99)}
    return SamplingParams(**{**usual, **sampling, **chance.choice(ends)})


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("way", WAYS)
def test_figures_are_those_of_the_tokens_that_were_given(folders: dict[str, str], way: str, kernels: str) -> None:
    """Prompts are longer than a pass, several run together, and ends fall anywhere within drafts."""
    arguments = dict(WAYS[way])
    draft = {"draft_model": folders[arguments.pop("draft")]} if "draft" in arguments else {}
    limits = {"dtype": "float32", "max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 256}
    llm = LLM(folders["target"], kernels=kernels, **draft, **arguments, **limits)
    chance, within = random.Random(5), 0
    full = [out.outputs[0] for out in llm.generate(PROMPTS, SamplingParams(temperature=0, ignore_eos=True))]
    for _ in range(12):
        number = chance.randrange(len(PROMPTS))
        params = drawn_params(chance, full[number].text, full[number].token_ids)
        pieces = list(llm.stream(PROMPTS[number], params))
        output = pieces[-1].output
        assert output is not None
        for sample in output.outputs:
            own = [piece for piece in pieces if piece.index == sample.index]
            assert [piece.token for piece in own] == sample.token_ids
            assert sample.metrics is not None
            assert_figures(sample.metrics, passes_of(own))
            within += own[-1].drafted
        each = [sample.metrics.timing for sample in output.outputs if sample.metrics is not None]
        passes = sum(timing.sampled_passes for timing in each)
        assert output.metrics.tokens_per_pass == len(pieces) / passes
        assert output.metrics.timing.num_tokens == len(pieces)
        assert max(timing.target_passes for timing in each) <= output.metrics.timing.target_passes
    assert way == "usual" or (within > 0) == (way != "plain"), "drafts of a fixed length hold some ends"


def test_the_line_of_figures_counts_the_time_of_all_samples(folders: dict[str, str]) -> None:
    """The time is not that of the first sample alone."""
    llm = LLM(folders["target"], folders["near"], dtype=EXACT_DTYPE, max_num_seqs=2)
    params = SamplingParams(n=4, temperature=1, seed=5, max_tokens=60, ignore_eos=True)
    first = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids[0]
    (output,) = llm.generate(PROMPTS[0], replace(params, stop_token_ids=[first]))
    counts = [len(sample.token_ids) for sample in output.outputs]
    assert counts[0] == 1 < max(counts)
    timing = output.metrics.timing
    seconds = (timing.ttft_s or 0.0) + timing.decode_s
    (speed,) = re.findall(r"\(([\d.]+) tokens/s\)", figures(llm, output))
    assert float(speed) == pytest.approx(sum(counts) / seconds, abs=0.1)
    ends = [sample.metrics.timing.last_token for sample in output.outputs if sample.metrics is not None]
    assert timing.arrival + seconds == pytest.approx(max(end for end in ends if end is not None))
