"""Where a model's reasoning begins, as far as its chat template and the prompt show it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from speculant.text.chat import answer_in

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


_THOUGHT = "It is wet."
_REASONED = {
    "role": "assistant",
    "content": "At sea.",
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT),  # templates read different names
}
TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
)


@lru_cache(maxsize=8)
def find_tags(template: str | None) -> ReasoningTags | None:
    """Return the tags around the reasoning in a chat template; None if it contains none, or writes reasoning otherwise.

    A template that writes no reasoning is trusted.
    """
    if template is None or not (found := [tags for tags in TAGS if tags.end in template]):
        return None
    answer = answer_in(template, _REASONED) or ""
    if _THOUGHT not in answer:
        return found[0]
    return next((tags for tags in found if _reads_back(tags, answer)), None)


def _reads_back(tags: ReasoningTags, answer: str) -> bool:
    before, _, after = answer.partition(tags.end)
    thought = before.strip(_SPACE).removeprefix(tags.start).strip(_SPACE)
    return thought == _THOUGHT and after.lstrip(_SPACE).startswith(_REASONED["content"])


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
