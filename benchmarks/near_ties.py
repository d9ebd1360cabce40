"""How often greedy text differs with speculation on torch's kernels, and that each first difference is a near-tie.

    python benchmarks/near_ties.py [--prompts 50] [--tokens 128]

torch computes a row with other bits when other rows are beside it, so two tokens that are equally
likely up to rounding may swap. For float32 and bfloat16 and each drafter: the share of requests whose text
differs from plain decoding, and the largest gap in nats, in the plain run, between the token it chose
and the one chosen with speculation.
"""

from __future__ import annotations

import argparse
from typing import Any

from measuring import write

from speculant import LLM, RequestOutput, SamplingParams
from tests.exactness.test_identity import DRAFTERS, PROMPTS, speculative

PREDICTED = "float32: none of 50 requests differ, or one; bfloat16: one in five, every gap below 0.1 nats."


def first_gap(plain: RequestOutput, other: RequestOutput) -> float | None:
    """Return by how many nats the plain run preferred its own token where the texts part; None if they don't."""
    sample = plain.outputs[0]
    for mine, token, entry in zip(sample.token_ids, other.outputs[0].token_ids, sample.logprobs or [], strict=True):
        if mine != token:
            return entry[mine].logprob - entry[token].logprob if token in entry else float("inf")
    return None


def compare(plain: list[RequestOutput], llm: LLM, prompts: list[str], params: SamplingParams) -> dict[str, Any]:
    """Return the rate of differing requests and the largest gap."""
    gaps = [first_gap(a, b) for a, b in zip(plain, llm.generate(prompts, params), strict=True)]
    found = [gap for gap in gaps if gap is not None]
    return {"requests": len(gaps), "differing": len(found), "largest_gap_nats": max(found, default=None)}


def main() -> None:
    """Measure and write results/near_ties.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    prompts = PROMPTS[: arguments.prompts]
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True, logprobs=5)
    figures: dict[str, Any] = {}
    for dtype in ("float64", "float32", "bfloat16"):
        plain = LLM("demo", dtype=dtype, max_num_seqs=1, max_model_len=256, kernels="reference").generate(
            prompts, params
        )
        for drafter in DRAFTERS:
            llm = speculative(drafter, 4, 8, dtype=dtype, kernels="reference")
            llm.generate(prompts, params)  # some drafters learn from what was generated before
            figures[f"{dtype}, {drafter}"] = compare(plain, llm, prompts, params)
    write("near_ties", PREDICTED, figures)


if __name__ == "__main__":
    main()
