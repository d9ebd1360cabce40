"""Turns ahead: what a conversation's next prompt is certain to begin with is read as soon as an answer is complete.

The conversation is rendered with the answer and a next message, once with each of two texts:

    history, answer, end of the turn, header of the next message | 1 ...
    history, answer, end of the turn, header of the next message | A ...
    '----------------------- what both have ----------------------'

A busy server prepares nothing: each piece of this work is begun only while no request is read, waits or runs, and a
client's next request ends what is left of it. A piece that has begun can't be stopped, but no request waits for it.

The conversation may differ from what was generated: templates drop the reasoning of earlier turns, and write calls in
their own way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any

from speculant.engine import AsyncEngine
from speculant.errors import SpeculantError
from speculant.serving.openai.answers import Answer
from speculant.serving.openai.messages import MessageReader, joined_calls
from speculant.serving.openai.protocol import ConversationBody, Message, ToolCall
from speculant.serving.openai.settings import Prompts
from speculant.serving.state import ServerState
from speculant.serving.wire import ApiError, overloaded
from speculant.types import Sender

logger = logging.getLogger(__name__)
Apart = Callable[[Callable[[], Any]], Awaitable[Any]]

TEXTS = ("1", "A")  # of the next message
PAUSE_S = 0.01  # in which the answer is sent


class TurnsAhead:
    """Prepares the next turns of chats, in tasks of the event loop in which it is used."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._tasks = set[asyncio.Task[None]]()  # the name of each is that of its client

    def begin(self, engine: AsyncEngine, prompts: Prompts, answer: Answer, sender: Sender) -> None:
        """Prepare the turn after a complete answer, unless there is nothing certain about it."""
        body = answer.prompts[0].conversation
        if body is None or not (engine.config.enable_prefix_caching and _is_turn(answer) and continues(body)):
            return
        work = self._prepare(engine, prompts, body, answer.readers[0], sender)
        task = asyncio.create_task(work, name=sender.client.name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop(self, client: str) -> None:
        """End the work for a client that sends its next request."""
        for task in self._tasks:
            if task.get_name() == client:
                task.cancel()

    async def _prepare(
        self, engine: AsyncEngine, prompts: Prompts, body: ConversationBody, reader: MessageReader, sender: Sender
    ) -> None:
        await asyncio.sleep(PAUSE_S)
        try:
            for answer in answers(reader, body.messages or ()):
                known = await certain(prompts, engine, body, answer, partial(self._when_idle, sender.client.name))
                if known:
                    await engine.prefill(known, cache_salt=sender.cache_salt, client=sender.client)
        except (ApiError, SpeculantError) as error:
            logger.debug("the next turn of a chat is not prepared: %s", error)

    async def _when_idle(self, client: str, work: Callable[[], Any]) -> Any:
        """Return the result of a piece of work for a client. Raises ApiError if the server is busy."""
        if not self._state.is_idle:
            raise overloaded("The server is busy.")
        return await asyncio.wrap_future(self._state.texts.submit_ahead(client, work))


def continues(body: ConversationBody) -> bool:
    """Whether the answer to a conversation is a message of its own, and the next prompt begins as this one does."""
    whole = body.truncate_prompt_tokens is None and not body.continue_final_message
    return whole and body.add_generation_prompt is not False


def _is_turn(answer: Answer) -> bool:
    """Whether an answer can be a part of a conversation: it is the only one, whole, and its calls are complete."""
    if len(answer.readers) != 1:
        return False
    return answer.results[0].outputs[0].finish_reason in ("stop", "length") and not answer.readers[0].is_cut


def answers(reader: MessageReader, before: Sequence[Message]) -> Iterator[Message]:
    """Yield the message of an answer, as a client may send it: with its reasoning, or without.

    Where earlier answers had reasoning or none, so has this one; without such answers both are possible.
    """
    read = reader.message
    calls = [ToolCall.model_validate(call) for call in joined_calls(read.calls)] or None
    message = Message(role="assistant", content=read.content or (None if calls else ""), tool_calls=calls)
    earlier = {bool(each.reasoning_content) for each in before if each.role == "assistant"}
    if read.reasoning and earlier != {False}:
        yield message.model_copy(update={"reasoning_content": read.reasoning})
    if not read.reasoning or earlier != {True}:
        yield message


async def certain(
    prompts: Prompts, engine: AsyncEngine, body: ConversationBody, answer: Message, apart: Apart
) -> list[int]:
    """Return the tokens with which the prompt of the turn after an answer begins, whatever its new text is.

    apart: does each piece of the work in a thread. Raises ApiError or SpeculantError if the template can't render such
    a turn.
    """
    given = {"role": "tool", "tool_call_id": answer.tool_calls[0].id} if answer.tool_calls else {"role": "user"}
    turns = [[*(body.messages or ()), answer, Message.model_validate({**given, "content": text})] for text in TEXTS]
    texts = [(await apart(partial(prompts.render, engine, turn, body))).text for turn in turns]
    text = commonprefix(texts)  # noqa: RUF071 - of characters
    tokens: list[int] = await apart(lambda: engine.tokenizer.encode(text, bool(body.add_special_tokens)))
    return tokens[:-1]  # the last one may grow with the text
