"""What a request's figures have to be, from the tokens that each step gave it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from speculant.types import Request, StepOutput

Steps = Sequence[Sequence[StepOutput]]  # of one sequence: the committed tokens of each step that had some


def steps_of(outputs: Iterable[StepOutput]) -> Steps:
    """Split the committed tokens of one sequence into steps: each ends with the target's own token, or the request."""
    steps: list[list[StepOutput]] = []
    for output in outputs:
        if not steps or not steps[-1][-1].drafted:
            steps.append([])
        steps[-1].append(output)
    return steps


def assert_figures(request: Request, steps: Steps) -> None:
    """Assert that a request counts the tokens that it was given and the passes that gave them, and nothing else."""
    metrics = request.metrics
    timing, drafts = metrics.timing, metrics.speculative_decoding
    accepted = [sum(output.drafted for output in step) for step in steps]
    own = [not step[-1].drafted for step in steps]
    assert [len(step) for step in steps] == [sum(each) for each in zip(accepted, own, strict=True)]
    assert all(own[:-1]), "a pass gave no token of its own, though the request went on"
    assert timing.num_tokens == request.num_output == sum(accepted) + sum(own)
    assert (drafts.num_accepted_draft_tokens, timing.sampled_passes) == (sum(accepted), len(steps))
    assert [count for count in drafts.per_step_accepted if count] == [count for count in accepted if count]
    assert sum(count * size for size, count in enumerate(drafts.acceptance_histogram)) == sum(accepted)
    assert timing.target_passes >= timing.sampled_passes >= drafts.num_spec_steps == len(drafts.per_step_accepted)
    assert metrics.tokens_per_pass == (request.num_output / len(steps) if steps else 0)
    tested = zip(drafts.per_step_accepted, drafts.per_step_tested, drafts.per_step_drafted, strict=True)
    assert all(accepted <= tested <= drafted for accepted, tested, drafted in tested)
