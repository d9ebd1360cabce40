"""Conversations whose questions and answers a target writes, by its chat template (arXiv 2406.08464).

    begin                 question    asked                    answer    answered           question ...
    <system><user>        ...         <end><assistant>         ...       <end><user>        ...

A model that was trained on conversations continues `begin` with a question. So no data are needed, and the texts are
like those that the model writes for its users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speculant.errors import ConfigError, SpeculantError
from speculant.text import Tokenizer

MOST_OF_QUESTION = 4  # a question that the target writes takes at most a quarter of a text
_MARKS = ("first-question", "first-answer", "second-question")
_FIX = "leave out --chat, or add a chat template to the target's folder that shows every message."

# texts, the most tokens to add to each, the number of the turn -> the tokens that the target adds
Continue = Callable[[Sequence[list[int]], Sequence[int], int], list[list[int]]]


@dataclass(frozen=True)
class Turns:
    """The tokens of a chat template around the messages of a conversation."""

    begin: list[int]
    asked: list[int]
    answered: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Turns:
        """Read a tokenizer's template. Raises ConfigError if it has none, or one that hides a message."""
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        try:
            opening = tokenizer.apply_chat_template(messages[:1])
            whole = tokenizer.apply_chat_template(messages)
        except SpeculantError as error:
            raise ConfigError(f"the target writes no conversations: {error}", _FIX) from error
        begin, _, asked = opening.partition(_MARKS[0])
        answered = whole.partition(_MARKS[1])[2].partition(_MARKS[2])[0]
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in (begin, asked, answered)]
        if not all(parts):
            raise ConfigError("the target's chat template does not show the messages of a conversation", _FIX)
        return cls(*parts)


def write_conversations(
    turns: Turns, questions: Sequence[Sequence[int]], seq: int, ends: frozenset[int], go_on: Continue
) -> list[list[int]]:
    """Return conversations of `seq` tokens, one for each question.

    The target writes a first question where none is given, and all later ones. ends: the target's end tokens, which end
    a message.
    """
    texts = [[*turns.begin, *question, *(turns.asked if question else ())] for question in questions]
    asking, turn = [not question for question in questions], 0
    while short := [place for place, text in enumerate(texts) if len(text) < seq]:
        room = [seq - len(texts[place]) for place in short]
        most = [
            min(left, max(1, seq // MOST_OF_QUESTION)) if asking[place] else left
            for place, left in zip(short, room, strict=True)
        ]
        added = go_on([texts[place] for place in short], most, turn)
        for place, message in zip(short, added, strict=True):
            ended = message[:-1] if message and message[-1] in ends else message
            texts[place] += [*ended, *(turns.asked if asking[place] else turns.answered)]
            asking[place] = not asking[place]
        turn += 1
    return [text[:seq] for text in texts]
