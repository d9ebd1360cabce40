"""What a request used, and what its speculation did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speculant.types import RequestOutput


def usage(outputs: Sequence[RequestOutput], predicted: bool, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return `usage` in OpenAI's shape, over all prompts.

    predicted: the drafts were the user's own prediction and nothing else, so that their counts are the prediction's.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    specs = [output.metrics.speculative_decoding for output in outputs] if predicted else []
    accepted = sum(spec.num_accepted_draft_tokens for spec in specs)
    drafted = sum(spec.num_draft_tokens for spec in specs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.metrics.cached_tokens for output in outputs)},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def speculation(outputs: Sequence[RequestOutput], level: str) -> dict[str, Any]:
    """Return what a response says about its speculation, in vLLM's shape: the key `metrics`, or nothing.

    `tokens_per_pass` stands beside vLLM's figures.
    level: "none", "summary" or "detailed". The figures are of one sample, so they are None where there are several.
    """
    if level == "none":
        return {}
    if len(outputs) != 1 or len(outputs[0].outputs) != 1:
        return {"metrics": None}
    metrics = outputs[0].metrics
    if metrics.verification is None:
        return {"metrics": {"speculative_decoding": None}}
    figures = {"tokens_per_pass": metrics.tokens_per_pass, **metrics.to_dict()["speculative_decoding"]}
    if level == "detailed":
        figures |= metrics.speculative_decoding.steps()
    return {"metrics": {"speculative_decoding": figures}}
