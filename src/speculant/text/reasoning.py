"""The tags that a model puts around its reasoning, as far as its chat template tells."""

from __future__ import annotations

from typing import NamedTuple

_SPACE = " \t\r\n"  # may stand beside tags


class ReasoningTags(NamedTuple):
    """The texts before and after a model's reasoning."""

    start: str
    end: str


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
