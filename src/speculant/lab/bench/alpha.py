"""The acceptance rate alpha of a pair of models, estimated in two ways (arXiv 2211.17192, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from speculant.lab.bench.acceptance import Estimate, TextAcceptance, TextReader, estimate, measure_acceptance, pooled
from speculant.lab.bench.pair import Candidate, write_texts
from speculant.lab.bench.runs import Bench, Mode
from speculant.lab.bench.workloads import Workload
from speculant.lab.theory import correlation_of, expected_costs
from speculant.models import Checkpoint
from speculant.params import SamplingParams

RULE = "rejection"  # the verifier; both estimates are of its acceptance


@dataclass(frozen=True)
class Alpha:
    """The estimates for drafts of `length` tokens.

    overlap: mean of sum min(p, q) along texts that the target wrote. accepted: accepted / tested of drafts for the same
    prompts, None if nothing was tested. correlation: of neighbours' acceptance. tokens_per_pass: of these drafts,
    without the first token of a text, which comes with its prompt. expected_per_pass: its expectation along the texts
    that the target wrote (`lab/theory/speedup.py`).
    """

    length: int
    overlap: Estimate
    accepted: Estimate | None
    correlation: float
    tokens_per_pass: float
    expected_per_pass: float


def measure_alpha(
    target: Checkpoint, draft: Candidate, workload: Workload, params: SamplingParams, length: int
) -> Alpha:
    """Let the target write texts, compare the models' distributions along them, and draft for the same prompts.

    params: temperature, top-k, top-p and min-p; other settings are not part of the distributions. Raises RequestError
    if a prompt and `params.max_tokens` do not fit into the context.
    """
    found = along_texts(target, draft, workload, params)
    drafting = replace(params, speculation={"num_speculative_tokens": length, "verification": RULE})
    run = Bench(draft.runtime).run(workload, Mode(drafting, sequential=True))
    passes = sum(expected_costs(each.given, np.ones(length + 1))[length] for each in found)
    return Alpha(
        length,
        estimate([each.overlap for each in found]),
        pooled(run.by_request),
        correlation_of([each.overlap for each in found]),
        sum(len(output) - 1 for output in run.outputs) / (run.steps - len(run.outputs)),
        sum(len(each.given) for each in found) / float(passes),
    )


def along_texts(
    target: Checkpoint, draft: Candidate, workload: Workload, params: SamplingParams
) -> list[TextAcceptance]:
    """Return the acceptance along texts that the target writes, without first tokens, which are never drafted."""
    texts = write_texts(draft.runtime, workload, params)
    sampler, size = target.backend.sampler, target.model.vocab_size
    readers = TextReader(target.model, sampler, size), TextReader(draft.checkpoint.model, sampler, size, draft.split)
    found = measure_acceptance(*readers, texts, params)
    return [TextAcceptance(each.overlap[1:], each.given[1:]) for each in found]
