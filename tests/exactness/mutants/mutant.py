"""The type of a mutant, and the files that mutants edit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file` (within the package) replace `old`, which occurs once, by `new`; `killer` must fail."""

    name: str
    file: str
    old: str
    new: str
    killer: str


CHANCE, DISTRIBUTION = "sampling/choice.py", "sampling/choice.py"
SAMPLER = "kernels/reference.py"
DRAFT_RUNNER, ATTENTION = "drafting/model/drafter.py", "models/reference.py"
CACHE = "cache/paged.py"
RUNNER, COMMIT, ENGINE = "engine/runner.py", "engine/commit.py", "engine/engine.py"
LOGPROBS, COUNTS, VERIFY, PROPOSE = "engine/logprobs.py", "counts.py", "engine/runner.py", "engine/step.py"
REJECTION, MATCH = "verification/rejection.py", "verification/match.py"
BLOCK, MULTI_DRAFT, TRAVERSAL = "verification/block.py", "verification/multi_draft.py", "verification/traversal.py"
GROWTH, TOPOLOGY = "drafting/growth.py", "drafting/topology.py"
REQUESTS, VOCABULARY = "engine/requests.py", "structured/vocabulary.py"
DRAFT_VOCABULARY = "models/vocabulary.py"
SCHEDULER = "scheduling/scheduler.py"

OWN_TOKENS = "test_batches.py::test_each_request_gets_its_own_tokens[{}]"
INDEPENDENT = "test_batches.py::test_two_requests_are_independent[{}]"
END = "test_ends.py::test_an_end_token_within_a_draft_ends_the_request[{}]"
