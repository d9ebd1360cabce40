"""Where a model's reasoning begins, as far as its chat template and the prompt show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_SPACE = " \t\r\n"  # may be next to tags


class ReasoningTags(NamedTuple):
    """The texts before and after a model's reasoning."""

    start: str
    end: str


@dataclass(frozen=True)
class ExpectedReasoning:
    """The reasoning to expect in an answer. The constraint of a form and the reader of the answer both use it.

    opened: the prompt ends with the start tag, so the answer begins within the reasoning. possible: the answer may have
    reasoning.
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
    """Return the tags that a chat template contains; None if it contains none."""
    return next((tags for tags in TAGS if template is not None and tags.end in template), None)


def is_opened(tags: ReasoningTags, prompt: str) -> bool:
    """Whether a prompt ends with the start tag, so the answer begins within the reasoning."""
    return prompt.rstrip(_SPACE).endswith(tags.start)


def is_over(tags: ReasoningTags, prompt: str) -> bool:
    """Whether a prompt ends with the end tag. Templates write empty reasoning to switch it off."""
    return prompt.rstrip(_SPACE).endswith(tags.end)


def expect_reasoning(
    template: str | None, prompt: str, quoted: str = "", wanted: bool = True
) -> ExpectedReasoning | None:
    """Return the reasoning to expect after a prompt; None if its chat template has no tags.

    quoted: the text of a user's message; a tag in it at the end of the prompt opens no reasoning. wanted: an answer
    begins after the prompt, and the model may reason in it.
    """
    tags = find_tags(template)
    if tags is None:
        return None
    own = not quoted.strip() or not prompt.rstrip(_SPACE).endswith(quoted.rstrip(_SPACE))
    opened = own and is_opened(tags, prompt)
    return ExpectedReasoning(tags, opened, opened or (wanted and not is_over(tags, prompt)))
