"""Speculation never changes a text: greedy and seeded output, token for token, on the embedded pair.

In float64 no rounding can decide between two tokens, so equality is asked for without exception. In
float32 and bfloat16 torch's kernels give a row slightly different bits when other rows are beside
it: there a text may differ, but only where two tokens are as good as equally likely.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from speculant import LLM, RequestOutput, SamplingParams, plugins
from speculant.kernels.native import usable_sets

STEMS = [
    "def read(path):", "class Stack:", "import os\nimport sys\n", "for name in names:", "def main(argv=None):",
    "    try:\n", "if __name__ ==", "class TestParser(unittest.TestCase):", "# Return the", "    def __init__(self,",
]  # fmt: skip
BODIES = ["", "\n", '\n    """Return', " x = 1\n", "\n    self.assertEqual("]
PROMPTS = [stem + body for stem in STEMS for body in BODIES]  # 50

GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
DRAFTERS = plugins.names("speculant.drafting")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def params(law: dict[str, float], tokens: int, count: int) -> list[SamplingParams]:
    """One set per prompt; seeded ones get a seed each."""
    seeds = [None if law is GREEDY else 1000 + i for i in range(count)]
    return [SamplingParams(**law, seed=seed, max_tokens=tokens, ignore_eos=True) for seed in seeds]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


def run(llm: LLM, prompts: list[str], laws: list[SamplingParams]) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, laws))


def speculative(drafter: str, spec_length: int, batch: int, dtype: str = "float64", **engine: str) -> LLM:
    """The embedded pair with any drafter."""
    uses_model = plugins.load("speculant.drafting", drafter).METHOD.uses_model
    return LLM(
        "demo",
        draft_model="demo" if uses_model else None,
        speculative_config={"method": drafter},
        spec_length=spec_length,
        dtype=dtype,
        max_num_seqs=batch,
        max_model_len=256,
        **engine,
    )


def check_identity(
    drafter: str,
    law: dict[str, float],
    lengths: list[int],
    prompts: list[str],
    tokens: int,
    dtype: str = "float64",
    **engine: str,
) -> None:
    """Compare plain texts with those of one drafter at every draft length, alone and 8 at a time."""
    laws = params(law, tokens, len(prompts))
    plain = run(LLM("demo", dtype=dtype, max_num_seqs=1, max_model_len=256, **engine), prompts, laws)
    assert len({tuple(text) for text in plain}) > len(prompts) // 2, "the texts hardly differ: a weak test"
    for spec_length in lengths:
        for batch in (1, 8):
            llm = speculative(drafter, spec_length, batch, dtype, **engine)
            if plugins.load("speculant.drafting", drafter).METHOD.learns:
                assert run(llm, prompts, laws) == plain
            outputs = llm.generate(prompts, laws)
            assert tokens_of(outputs) == plain, f"{drafter}, {spec_length} drafts, {batch} at a time"
            accepted = sum(out.metrics.speculative_decoding.num_accepted_draft_tokens for out in outputs)
            assert accepted > 0, "nothing was ever accepted, so nothing was shown"


@pytest.mark.parametrize("law", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_identical_in_float64(drafter: str, law: dict[str, float]) -> None:
    check_identity(drafter, law, [1, 4], PROMPTS[::5], tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("law", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_identical_in_float64_in_full(drafter: str, law: dict[str, float]) -> None:
    check_identity(drafter, law, [1, 2, 4, 8], PROMPTS, tokens=128)


NATIVE = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.parametrize("law", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("weights", NATIVE)
def test_text_is_identical_on_the_native_kernels(weights: str, drafter: str, law: dict[str, float]) -> None:
    """No bit of a row depends on its neighbours, so nothing has to be close: it is the same."""
    check_identity(drafter, law, [1, 4], PROMPTS[::5], tokens=40, kernels="native", **NATIVE[weights])


@pytest.mark.slow
@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.parametrize("law", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("weights", NATIVE)
def test_text_is_identical_on_the_native_kernels_in_full(weights: str, drafter: str, law: dict[str, float]) -> None:
    check_identity(drafter, law, [1, 2, 4, 8], PROMPTS, tokens=128, kernels="native", **NATIVE[weights])


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-3), ("bfloat16", 0.25)])
def test_a_difference_on_torch_kernels_is_a_near_tie(dtype: str, near: float) -> None:
    """The first token that differs is one that the plain run held for as likely, up to `near` nats."""
    laws = [SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2)] * 10
    plain = LLM("demo", dtype=dtype, max_num_seqs=1, max_model_len=256, kernels="reference").generate(
        PROMPTS[::5], laws
    )
    drafted = speculative("draft_model", 4, 8, dtype, kernels="reference").generate(PROMPTS[::5], laws)
    for one, other in zip(plain, drafted, strict=True):
        chosen, entries = one.outputs[0].token_ids, one.outputs[0].logprobs or []
        for mine, token, entry in zip(chosen, other.outputs[0].token_ids, entries, strict=True):
            if mine != token:
                assert token in entry, "the other token was not even the runner-up"
                assert entry[mine].logprob - entry[token].logprob <= near
                break
