"""How often greedy text differs with speculation on torch's kernels, and that each first difference is a near-tie.

torch computes a row with other bits when other rows are beside it, so two tokens that are equally likely up to rounding
may swap. For each type and drafter: the number of requests whose text differs from plain decoding, and the largest gap,
in nats of the plain run, between the token it chose and the one chosen with speculation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `tests`, however the script is started

from speculant import LLM, RequestOutput, SamplingParams
from speculant.lab.bench import Benchmark
from tests.exactness.test_identity import PROMPTS, speculative

DRAFTERS = ("draft_model", "ngram", "specinfer", "synthetic")


def first_gap(plain: RequestOutput, other: RequestOutput) -> float | None:
    """Return by how many nats the plain run preferred its own token at the first difference; None = the same text."""
    sample = plain.outputs[0]
    for mine, token, entry in zip(sample.token_ids, other.outputs[0].token_ids, sample.logprobs or [], strict=True):
        if mine != token:
            return entry[mine].logprob - entry[token].logprob if token in entry else float("inf")
    return None


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare the texts of every drafter with those of plain decoding."""
    prompts, figures = PROMPTS[: arguments.prompts], dict[str, Any]()
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True, logprobs=5)
    for dtype in ("float64", "float32", "bfloat16"):
        llm = LLM("demo", dtype=dtype, max_num_seqs=1, max_model_len=256, kernels="reference")
        plain = llm.generate(prompts, params)
        for drafter in DRAFTERS:
            llm = speculative(drafter, 4, 8, dtype=dtype, kernels="reference")
            llm.generate(prompts, params)  # some drafters learn from earlier requests
            gaps = [first_gap(*pair) for pair in zip(plain, llm.generate(prompts, params), strict=True)]
            found = [gap for gap in gaps if gap is not None]
            own = {"requests": len(gaps), "differing": len(found), "largest_gap_nats": max(found, default=None)}
            figures[f"{dtype}, {drafter}"] = own
            yield figures


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="float32: none of 50 requests differ, or one; bfloat16: one in five, every gap below 0.1 nats.",
    measure=measure, options={"prompts": 50, "tokens": 128},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
