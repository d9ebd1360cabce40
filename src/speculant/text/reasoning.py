"""Where a model's reasoning begins, as far as its chat template and the prompt tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_SPACE = " \t\r\n"  # may stand beside tags


class ReasoningTags(NamedTuple):
    """The texts before and after a model's reasoning."""

    start: str
    end: str


@dataclass(frozen=True)
class ExpectedReasoning:
    """What a prompt says about reasoning in its answer: a form and a reader of the answer both follow it.

    opened: the prompt ends with the start tag, so that the answer begins within the reasoning. possible: the answer
    may begin with the start tag itself.
    """

    tags: ReasoningTags
    opened: bool
    possible: bool


TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
)


def find_tags(template: str | None) -> ReasoningTags | None:
    """Return the tags that a chat template knows; None if it knows none."""
    return next((tags for tags in TAGS if template is not None and tags.end in template), None)


def is_opened(tags: ReasoningTags, prompt: str) -> bool:
    """Whether a prompt ends with the start tag, so that the answer begins within the reasoning."""
    return prompt.rstrip(_SPACE).endswith(tags.start)


def is_over(tags: ReasoningTags, prompt: str) -> bool:
    """Whether a prompt ends with the end tag: templates write an empty reasoning where there should be none."""
    return prompt.rstrip(_SPACE).endswith(tags.end)


def expect_reasoning(
    template: str | None, prompt: str, quoted: str = "", wanted: bool = True
) -> ExpectedReasoning | None:
    """Return what a prompt says about reasoning; None if its chat template knows no tags.

    quoted: the text of a user's message, which may end the prompt without opening anything. wanted: whether an answer
    begins after the prompt, and is to have reasoning if the model likes.
    """
    tags = find_tags(template)
    if tags is None:
        return None
    own = not quoted.strip() or not prompt.rstrip(_SPACE).endswith(quoted.rstrip(_SPACE))
    opened = own and is_opened(tags, prompt)
    return ExpectedReasoning(tags, opened, opened or (wanted and not is_over(tags, prompt)))
