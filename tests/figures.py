"""The figures that a sample must have, from the tokens of each of its passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from speculant.metrics import RequestMetrics


class Given(Protocol):
    """A committed token: a `StepOutput` or a `StreamPiece`."""

    @property
    def drafted(self) -> bool:
        """Whether it is an accepted draft token."""
        ...


T = TypeVar("T", bound=Given)


def passes_of(outputs: Iterable[T]) -> list[list[T]]:
    """Split a sample's tokens by the passes that gave them: each ends with the target's own token, or the sample."""
    passes: list[list[T]] = []
    for output in outputs:
        if not passes or not passes[-1][-1].drafted:
            passes.append([])
        passes[-1].append(output)
    return passes


def assert_figures(metrics: RequestMetrics, passes: Sequence[Sequence[Given]]) -> None:
    """Assert that a sample counts the tokens that it was given and the passes that gave them, and nothing else."""
    timing, drafts = metrics.timing, metrics.speculative_decoding
    accepted = [sum(token.drafted for token in each) for each in passes]
    own = [not each[-1].drafted for each in passes]
    assert [len(each) for each in passes] == [sum(each) for each in zip(accepted, own, strict=True)]
    assert all(own[:-1]), "a pass gave no token of its own, though the request went on"
    assert timing.num_tokens == sum(accepted) + sum(own)
    assert (drafts.num_accepted_draft_tokens, timing.sampled_passes) == (sum(accepted), len(passes))
    assert [count for count in drafts.per_step_accepted if count] == [count for count in accepted if count]
    assert sum(count * size for size, count in enumerate(drafts.acceptance_histogram)) == sum(accepted)
    assert timing.target_passes >= timing.sampled_passes >= drafts.num_spec_steps == len(drafts.per_step_accepted)
    assert metrics.tokens_per_pass == (timing.num_tokens / len(passes) if passes else 0)
    tested = zip(drafts.per_step_accepted, drafts.per_step_tested, drafts.per_step_drafted, strict=True)
    assert all(accepted <= tested <= drafted for accepted, tested, drafted in tested)
