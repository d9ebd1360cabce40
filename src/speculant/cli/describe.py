"""Descriptions of a result, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculant.engine import LLM
    from speculant.types import CompletionOutput, Logprobs, RequestOutput


def document(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """Return a result as `--json` prints it. Of several samples, `outputs` lists each one with its metrics.

    `metrics` are those of all samples together.
    """
    samples = [_sample(sample) for sample in output.outputs]
    prompt_tokens = output.num_prompt_tokens
    completion_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    value = {
        **samples[0],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "metrics": output.metrics.to_dict(),
        "speculation": {"on": output.metrics.verification is not None, "detail": speculation(llm, output)},
    }
    if output.prompt_logprobs is not None:
        columns = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        value["prompt_logprobs"] = [None if entry is None else _logprob(token, entry) for token, entry in columns]
    if len(samples) > 1:
        figures_of = [None if each.metrics is None else each.metrics.to_dict() for each in output.outputs]
        value["outputs"] = [{**sample, "metrics": own} for sample, own in zip(samples, figures_of, strict=True)]
    return value


def _sample(sample: CompletionOutput) -> dict[str, Any]:
    value: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.score is not None:
        value |= {"score": sample.score, "cumulative_logprob": sample.cumulative_logprob}
    if sample.logprobs is not None:
        columns = zip(sample.token_ids, sample.logprobs, strict=True)
        value["logprobs"] = [_logprob(token, entry) for token, entry in columns]
    return value


def _logprob(token: int, entry: Logprobs) -> dict[str, Any]:
    """Return the chosen token's log-probability and, in `top`, those of all reported tokens."""
    return {"token": token, **asdict(entry[token]), "top": {other: each.logprob for other, each in entry.items()}}


def speculation(llm: LLM, output: RequestOutput) -> str:
    """Return which drafter a request had, or why it had none."""
    metrics, searched = output.metrics, any(sample.score is not None for sample in output.outputs)
    if llm.speculating and searched and not llm.speculating_beams:
        return f"{llm.speculation}, but not for a beam search"
    if llm.speculating and metrics.verification is None:
        return "switched off for this request"
    if metrics.verification is None:
        return llm.speculation
    warning = "" if metrics.lossless else " (not lossless: the text may not be the target's own)"
    return f"{llm.speculation}, verified by {metrics.verification}{warning}"


def figures(llm: LLM, output: RequestOutput) -> str:
    """Return one line: measurements, the drafter or the reason why speculation is off, and the weights."""
    metrics, timing = output.metrics, output.metrics.timing
    tokens = sum(len(sample.token_ids) for sample in output.outputs)
    seconds = (timing.ttft_s or 0.0) + timing.decode_s
    made = f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds if seconds else 0.0:.1f} tokens/s)"
    detail, weights = speculation(llm, output), ", ".join(filter(None, (llm.weight_packing, llm.weight_source)))
    weights += f"; context: {llm.context}"
    if output.metrics.verification is None:
        return f"{made}; speculation is off: {detail}; weights are {weights}"
    return (
        f"{made}; speculation is on: {detail}; {metrics.tokens_per_pass:.2f} tokens per pass, "
        f"acceptance rate {metrics.speculative_decoding.acceptance_rate:.2f}; weights are {weights}"
    )
