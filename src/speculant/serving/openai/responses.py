"""Responses: a request as a chat, with the items of its conversation as messages, and its answer in OpenAI's shape.

The routes under /v1/responses generate a response, and read, cancel and delete stored ones.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from speculant.engine import StreamPiece
from speculant.serving.http.clients import client_of
from speculant.serving.models import ServedModel
from speculant.serving.openai.answers import Answer, Call, Chunk, chat_logprob, new_id
from speculant.serving.openai.messages import MessagePart, MessageReader
from speculant.serving.openai.protocol import (
    ChatBody,
    FunctionCall,
    GeneratingBody,
    Message,
    ResponseBody,
    ToolCall,
    TranslatedChat,
)
from speculant.serving.openai.service import Job, Service
from speculant.serving.openai.settings import Prompt, with_allowed_tools
from speculant.serving.openai.store import ResponseStore, StoredItem, StoredResponse, Turn
from speculant.serving.records import note_background
from speculant.serving.tools.base import CUSTOM, CUSTOM_FIX, ReasoningDelta, TextDelta, ToolDelta
from speculant.serving.wire import (
    ApiError,
    EventStream,
    api_error,
    encode,
    encode_in_parts,
    json_response,
    refusal,
    while_connected,
)

_OF_FUNCTION = ("name", "description", "parameters", "strict")
_OF_FORMAT = ("type", "name", "description", "schema", "strict")
_CHOICES = ("none", "auto", "required")
_MOST_VALUES = 20_000  # of a field that each response repeats
_MOST_METADATA = (16, 64, 512)  # entries, characters of a name and of a text: OpenAI's limits
_SAME = GeneratingBody.model_fields.keys() | {"parallel_tool_calls", "chat_template_kwargs"}
LOGPROBS = "message.output_text.logprobs"  # a response has log-probabilities if its `include` has this
_OF_NOTHING = frozenset(  # values of `include` about items that no response here has, and reasoning is not encrypted
    {
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    }
)


def as_chat(body: ResponseBody) -> ChatBody:
    """Return a response's request as a chat without messages yet.

    Raises ApiError (400) for hosted tools, and for fields that would have no effect.
    """
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise refusal("reasoning.effort is not text.", "reasoning")
    for name in ("tools", "tool_choice", "text"):
        _check_values(name, getattr(body, name))
    tools = None if body.tools is None else [_chat_tool(tool) for tool in body.tools]
    choice = _chat_choice(body.tool_choice)
    _check(body)
    logprobs = LOGPROBS in (body.include or ())
    own = {
        "messages": [],
        "tools": tools,
        "tool_choice": choice,
        "response_format": _chat_form(body),
        "reasoning_effort": effort,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs if logprobs else None,
    }
    return with_allowed_tools(TranslatedChat.model_construct(**{name: getattr(body, name) for name in _SAME} | own))


def shown_settings(body: ResponseBody) -> dict[str, Any]:
    """Return the settings of a response that its document repeats: tools, their choice and the format of the text.

    Only what this server has read of them. The body must have passed `as_chat`.
    """
    form, choice = (body.text or {}).get("format"), body.tool_choice
    form = {name: form[name] for name in _OF_FORMAT if name in form} if isinstance(form, Mapping) else {}
    if isinstance(choice, Mapping):
        is_list = choice["type"] == "allowed_tools"
        listed = {"mode": choice["mode"], "tools": list(map(_shown_name, choice["tools"]))} if is_list else {}
        choice = {**_shown_name(choice), **listed}
    return {
        "text": {"format": {"type": "text"} if form.get("type", "text") == "text" else form},
        "tool_choice": "auto" if choice is None else choice,
        "tools": [{"type": "function", **{name: tool.get(name) for name in _OF_FUNCTION}} for tool in body.tools or ()],
    }


def _shown_name(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {name: choice[name] for name in ("type", "name") if name in choice}


def _check(body: ResponseBody) -> None:
    """Raise ApiError (400) for fields of OpenAI's Responses that would have no effect here."""
    included = set(body.include or ())
    reasoning = _set_keys(body.reasoning, {"summary": "auto"})  # there are none, and none are required
    text = _set_keys(body.text, {"verbosity": "medium"})
    asked = f'include=["{LOGPROBS}"]'
    refused = {
        "n": (body.n not in (None, 1), "a response has one answer; leave it out"),
        "include": (bool(included - {LOGPROBS} - _OF_NOTHING), f"this server supports only {asked}"),
        "top_logprobs": (bool(body.top_logprobs) and LOGPROBS not in included, f"it needs {asked}"),
        "reasoning": (bool(reasoning - {"effort"}), "only effort is supported; reasoning is not summarised"),
        "text": (bool(text - {"format"}), "only format is supported"),
        "truncation": (
            body.truncation not in (None, "disabled", "auto"),
            'use "disabled"; a conversation is never cut',
        ),
        "response_format": (body.response_format is not None and "format" in text, "text.format is given too"),
    }
    for name, (wrong, instead) in refused.items():
        if wrong:
            raise refusal(f"{name} is not supported here: {instead}.", name, "unsupported_parameter")
    given, (entries, name_length, text_length) = body.metadata or {}, _MOST_METADATA
    if len(given) > entries or any(len(name) > name_length or len(text) > text_length for name, text in given.items()):
        limits = f"{entries} entries, with names of {name_length} characters and texts of {text_length}"
        raise refusal(f"metadata may have at most {limits}.", "metadata")
    if body.prompt_logprobs is not None:
        raise refusal("A response has no prompt_logprobs: use /v1/chat/completions.", "prompt_logprobs")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise refusal("A response has its usage in the last event only.", "stream_options")


def _set_keys(value: Mapping[str, Any] | None, usual: Mapping[str, str]) -> set[str]:
    """Return the keys whose values are neither null nor the usual ones."""
    return {key for key, each in (value or {}).items() if each is not None and each != usual.get(key)}


def _chat_form(body: ResponseBody) -> dict[str, Any] | None:
    form = (body.text or {}).get("format")
    if form is None:
        return body.response_format
    if not isinstance(form, Mapping):
        raise refusal("text.format is not an object.", "text")
    return None if form.get("type", "text") == "text" else {"type": form.get("type"), "json_schema": form}


def _check_values(name: str, given: Any) -> None:
    """Raise ApiError (400) if a field has too many values. Long texts take less time than many values."""
    left = [given]
    for _ in range(_MOST_VALUES):
        if not left:
            return
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if left:
        raise refusal(f"{name} has over {_MOST_VALUES} values: make its schemas smaller.", name)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _hosted(tool, "tools")
    return {"type": "function", "function": {name: tool[name] for name in _OF_FUNCTION if tool.get(name) is not None}}


def _chat_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in _CHOICES:
            raise refusal(f"tool_choice is neither one of {', '.join(_CHOICES)} nor an object.", "tool_choice")
        return choice
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        names = [_named_function(each) for each in listed] if isinstance(listed, list) else None
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": names}}
    return _named_function(choice)


def _named_function(choice: object) -> dict[str, Any]:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise _hosted(choice, "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _hosted(tool: object, param: str) -> ApiError:
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    if kind == "custom":
        return refusal(f"{CUSTOM[0].upper()}{CUSTOM[1:]}. Fix: {CUSTOM_FIX}", param, "unsupported_value")
    return refusal(
        f"A tool of type {str(kind)[:80]!r} is not supported, as this server runs no tools: use type function.",
        param,
        "unsupported_value",
    )


Item = dict[str, Any]
REFERENCE = "item_reference"
MESSAGE_ID, REASONING_ID, CALL_ID = "msg_", "rs_", "fc_"  # begin the ids of items
_LONGEST_ID = 128
_STATES = ("in_progress", "completed", "incomplete")


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item, which messages and references may leave out. Raises ApiError (400)."""
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item or "content" in item else REFERENCE
    if not isinstance(kind, str):
        raise _wrong("An item of input has a type that is not text.")
    return kind


def reference_of(item: Mapping[str, Any]) -> str:
    """Return the id to which an item refers. Raises ApiError (400) if it has none."""
    return _text(item, "id", "An item of input")


def read_items(given: str | Sequence[Item], stored: Mapping[str, Item]) -> list[Item]:
    """Return the items of a request's input in the form in which they are listed, with ids.

    stored: the items that references name, by id. Raises ApiError (400) for items that are not supported.
    """
    if isinstance(given, str):
        return [_read_message({"role": "user", "content": given})]
    return [stored[reference_of(item)] if kind_of(item) == REFERENCE else _read(item) for item in given]


def _read(item: Item) -> Item:
    kind = kind_of(item)
    reader = _READERS.get(kind)
    if reader is None:
        known = ", ".join((*_READERS, REFERENCE))
        raise _wrong(f"An item of input has the type {kind[:80]!r}, which is not supported: use {known}.")
    return reader(item)


def _read_message(item: Item) -> Item:
    role, content = _text(item, "role", "A message of input"), item.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _wrong("A message of input has no content: give a text, or a list of parts.")
    return {
        "id": _id(item, MESSAGE_ID),
        "type": "message",
        "status": _status(item),
        "role": role,
        "content": [_read_part(part, role == "assistant") for part in content],
    }


def _read_part(part: object, is_answer: bool) -> Item:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "refusal" and is_answer:
        return {"type": "refusal", "refusal": _text(part, "refusal", "A part of a message")}
    if not isinstance(part, Mapping) or kind not in ("input_text", "output_text", "text"):
        raise _wrong(
            f"A part of a message has the type {str(kind)[:80]!r}: this server reads only text (input_text, or in an"
            " assistant's message output_text and refusal)."
        )
    text = _text(part, "text", "A part of a message")
    if not is_answer:
        return {"type": "input_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _read_call(item: Item) -> Item:
    texts = {name: _text(item, name, "A function_call of input") for name in ("call_id", "name", "arguments")}
    return {"id": _id(item, CALL_ID), "type": "function_call", "status": _status(item), **texts}


def _read_output(item: Item) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        output = [_read_part(part, is_answer=False) for part in output]
    elif not isinstance(output, str):
        raise _wrong("A function_call_output of input has no output: give a text, or a list of parts.")
    return {
        "id": _id(item, "fco_"),
        "type": "function_call_output",
        "status": _status(item),
        "call_id": _text(item, "call_id", "A function_call_output of input"),
        "output": output,
    }


def _read_reasoning(item: Item) -> Item:
    if item.get("encrypted_content") is not None:
        raise _wrong("encrypted_content of a reasoning item can't be read here: send its content, or leave it out.")
    summary, content = item.get("summary"), item.get("content")
    if summary is None and content is None:
        raise _wrong("A reasoning item of input has neither summary nor content.")
    return {
        "id": _id(item, REASONING_ID),
        "type": "reasoning",
        "status": _status(item),
        "summary": _typed(summary, "summary_text"),
        "content": _typed(content, "reasoning_text"),
    }


def _typed(parts: object, kind: str) -> list[Item]:
    """Return parts that all have one type."""
    parts = [] if parts is None else parts
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and part.get("type") == kind for part in parts):
        raise _wrong(f"A reasoning item of input has parts of another type than {kind}.")
    return [{"type": kind, "text": _text(part, "text", "A reasoning item of input")} for part in parts]


_READERS: Mapping[str, Callable[[Item], Item]] = MappingProxyType(
    {
        "message": _read_message,
        "function_call": _read_call,
        "function_call_output": _read_output,
        "reasoning": _read_reasoning,
    }
)


def _wrong(message: str) -> ApiError:
    return refusal(message, "input")


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where} has no {name} that is text.")
    return value


def _id(item: Item, prefix: str) -> str:
    given = item.get("id")
    if given is None:
        return new_id(prefix)
    if not isinstance(given, str) or not given or len(given) > _LONGEST_ID:
        raise _wrong(f"An item of input has an id that is not a text of 1 to {_LONGEST_ID} characters.")
    return given


def _status(item: Item) -> str:
    given = item.get("status")
    if given is not None and given not in _STATES:
        raise _wrong(f"An item of input has a status other than {', '.join(_STATES)}.")
    return given or "completed"


def as_messages(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """Return the messages of a conversation. Reasoning, text and calls that follow each other are one message.

    Raises ApiError (400) for an output whose call does not precede it.
    """
    messages = [Message(role="system", content=instructions)] if instructions else []
    calls = set[str]()
    for item in items:
        if item["type"] == "function_call_output":
            if item["call_id"] not in calls:
                raise _wrong(f"No function_call with call_id {item['call_id'][:80]!r} precedes its output.")
            messages.append(Message(role="tool", tool_call_id=item["call_id"], content=_joined(item["output"])))
        elif item["type"] == "message" and item["role"] != "assistant":
            messages.append(Message(role=item["role"], content=_joined(item["content"])))
        else:
            _add(_assistant(messages, item["type"]), item)
            if item["type"] == "function_call":
                calls.add(item["call_id"])
    for message in messages:
        if message.content is None and not message.tool_calls:
            message.content = ""
    return messages


def _assistant(messages: list[Message], kind: str) -> Message:
    """Return the assistant's message to which an item belongs: the last message, or a new one."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant":
        begun = last.content is not None or last.tool_calls
        if kind == "function_call" or not begun:
            return last
    messages.append(Message(role="assistant"))
    return messages[-1]


def _add(message: Message, item: Item) -> None:
    if item["type"] == "message":
        message.content = _joined(item["content"])
    elif item["type"] == "reasoning":
        message.reasoning_content = (message.reasoning_content or "") + _joined(item["content"])
    else:
        function = FunctionCall(name=item["name"], arguments=item["arguments"])
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append(ToolCall(id=item["call_id"], function=function))


def _joined(parts: str | Sequence[Item]) -> str:
    if isinstance(parts, str):
        return parts
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


_COMPLETE, _RUNNING = ("completed", "incomplete"), ("queued", "in_progress")
_PIECE = 65_536  # bytes of a stored response that are sent at a time
_LISTED, _MOST_LISTED = "20", 100  # items of a page: by default, and at most


@dataclass
class _Conversation:
    """The stored turns that a request continues, and its own input. references: stored items that the input names.

    stored_bytes: of all stored items that it repeats; one that is named twice counts twice. inputs: the input in the
    form in which it is stored, once it has been read.
    """

    body: ResponseBody
    previous: Turn | None
    references: dict[str, StoredItem]
    stored_bytes: int
    inputs: Sequence[StoredItem] = ()

    def read(self) -> list[Message]:
        """Return the messages of the whole conversation. Raises ApiError (400) for invalid items."""
        named = {name: json.loads(item.data) for name, item in self.references.items()}
        before = [] if self.previous is None else [json.loads(item.data) for item in self.previous.items()]
        own = read_items(self.body.input, named)
        self.inputs = _stored(own)
        return as_messages(self.body.instructions, [*before, *own])

    def turn(self, output: Iterable[Item] = ()) -> Turn:
        """Return the conversation with an output."""
        return Turn(self.inputs, _stored(map(_without_logprobs, output)), self.previous)


class ResponseRoutes:
    """The handlers of one server, and its stored responses."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.store = ResponseStore(service.options.max_stored_bytes, service.options.response_ttl)

    async def create(self, request: Request) -> Response:
        """Answer in the shape of OpenAI's Responses: text or calls, after reasoning if there is any."""
        service = self._service
        body = await service.read(ResponseBody, request)
        model = await service.use(request, body.model)
        stores = body.store is not False and self.store.most > 0

        def translated() -> ChatBody:
            _check_background(body, stores)
            return as_chat(body)

        chat = await service.chat(model, request, translated)
        answer = ResponseAnswer(chat.call, body, chat.make_reader, stores)
        owner, making = client_of(request.scope), service.prompts(request)
        conversation = self._conversation(owner, body)
        making = replace(making, size=making.size + conversation.stored_bytes)

        async def prompts() -> list[Prompt]:
            messages = await making.in_thread(conversation.read)
            return [await making.of_chat(model.engine, chat.body.model_copy(update={"messages": messages}))]

        async def keep() -> None:
            self.store.add(StoredResponse(answer.id, owner, *await _finished(answer, conversation)))

        before_end = keep if stores else None
        job = Job(chat.body, prompts, answer, named_events=True, before_end=before_end)
        if body.background:
            return await self._begin(model, request, job, conversation)
        return await service.answer(model, request, job)

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Return a stored response."""
        found = self._find(request, response_id)
        if request.query_params.get("stream", "false") != "false":
            raise refusal("A stored response is not streamed: leave out stream.", "stream", "unsupported_parameter")
        return self._shown(found.document)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Delete a stored response. If it is still generated, that ends."""
        self.store.remove(self._find(request, response_id))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        """End a response in the background. One that is complete stays as it is."""
        found = self._find(request, response_id)
        if found.task is None:
            raise refusal("Only a response in the background can be cancelled.", "response_id")
        found.task.cancel()
        await asyncio.wait({found.task})
        if found.status in _RUNNING:
            document = json.loads(found.document) | {"status": "cancelled"}
            self.store.update(found, "cancelled", encode(document))
        return self._shown(found.document)

    async def input_items(
        self,
        request: Request,
        response_id: str,
        order: str | None = None,
        limit: str | None = None,
        after: str | None = None,
    ) -> Response:
        """List the items that precede a response's output, a page at a time."""
        turn = self._find(request, response_id).turn
        items = [*turn.before(), *turn.inputs]
        if order not in (None, "asc", "desc"):
            raise refusal('order is neither "asc" nor "desc".', "order")
        if order != "asc":
            items.reverse()
        limit = limit or _LISTED
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST_LISTED):
            raise refusal(f"limit is not a number from 1 to {_MOST_LISTED}.", "limit")
        first = 0
        if after is not None:
            first = next((place for place, item in enumerate(items, start=1) if item.id == after), 0)
            if first == 0:
                raise refusal(f"after={after[:80]!r} is not the id of an item.", "after")
        return self._shown(*page_of(items[first:], int(limit)))

    def _shown(self, *parts: bytes) -> Response:
        """Return a response with a JSON text. A large one is not copied for a client that does not read it."""
        headers = {"content-type": "application/json", "content-length": str(sum(map(len, parts)))}
        return EventStream(_pieces(parts), self._service.options.send_timeout, headers)

    def _find(self, request: Request, response_id: str) -> StoredResponse:
        """Return a client's response. Raises ApiError (404) for others, whether they exist or not."""
        found = self.store.find(client_of(request.scope), response_id)
        if found is None:
            text = f"The response {response_id[:80]!r} does not exist: it was not stored, has expired or was deleted."
            raise ApiError(404, text, param="response_id", code="response_not_found")
        return found

    def _conversation(self, owner: str, body: ResponseBody) -> _Conversation:
        """Return the conversation of a request. Raises ApiError (400) if it has no items, too many, or unknown ones."""
        previous = self._previous(owner, body.previous_response_id)
        given = [{}] if isinstance(body.input, str) else body.input
        length = len(given) + (0 if previous is None else previous.length)
        if not length:
            raise refusal("input has no items.", "input")
        if length > (most := self._service.options.max_messages):
            raise refusal(f"The conversation has {length} items and at most {most} are allowed.", "input")
        named = [] if isinstance(body.input, str) else [item for item in given if kind_of(item) == REFERENCE]
        references = [self._item(owner, reference_of(item)) for item in named]
        size = sum(len(item.data) for item in references) + (0 if previous is None else previous.total)
        if size > (most := self._service.options.max_body_bytes):  # a body with the items could not be larger
            text = f"The stored items have {size} bytes and a conversation may have at most {most}."
            raise refusal(text, "previous_response_id", "too_long")
        return _Conversation(body, previous, {item.id: item for item in references}, size)

    def _previous(self, owner: str, response_id: str | None) -> Turn | None:
        if response_id is None:
            return None
        found = self.store.find(owner, response_id)
        if found is None:
            text = f"The previous response {response_id[:80]!r} was not found: it was not stored, or has expired."
            raise refusal(text, "previous_response_id", "previous_response_not_found")
        if found.status not in _COMPLETE:
            raise refusal(f"The previous response can't be continued: it is {found.status}.", "previous_response_id")
        return found.turn

    def _item(self, owner: str, item_id: str) -> StoredItem:
        found = self.store.find_item(owner, item_id)
        if found is None:
            raise refusal(f"The item {item_id[:80]!r} was not found: it was not stored, or has expired.", "input")
        return found

    async def _begin(self, model: ServedModel, request: Request, job: Job, conversation: _Conversation) -> Response:
        """Generate in the background. Return once the prompt is made; until then errors are the request's."""
        answer = job.answer
        assert isinstance(answer, ResponseAnswer)
        needed = 2 * request.state.size  # bytes: the body, and about as many for the values parsed from it
        stored = StoredResponse(answer.id, client_of(request.scope), "queued", b"", Turn(()), needed=needed)
        begun = asyncio.Event()

        async def prompts() -> Sequence[Prompt]:
            made = await job.make_prompts()
            stored.document = await encode_in_parts(answer.unfinished("queued"))
            stored.turn = conversation.turn()
            if not self.store.add(stored):
                text = "The request is too large for a response in the background: the server can't store so much."
                raise refusal(text, "background", "too_long")
            begun.set()
            return made

        async def keep() -> None:
            self.store.update(stored, *await _finished(answer, conversation))

        detached = replace(job, make_prompts=prompts, before_end=keep)
        stored.task = asyncio.create_task(self._generate(model, request, detached, stored, begun))
        self._service.state.hold_for(model, stored.task)
        note_background(request.scope, stored.task)
        waiting = asyncio.create_task(begun.wait())
        try:
            first = asyncio.wait({stored.task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            await while_connected(request.receive, first)
        except BaseException:
            stored.task.cancel()
            self.store.remove(stored)
            raise
        finally:
            waiting.cancel()
        if not begun.is_set():
            await stored.task  # raises its error
        return self._shown(stored.document)

    async def _generate(
        self, model: ServedModel, request: Request, job: Job, stored: StoredResponse, begun: asyncio.Event
    ) -> None:
        """Generate a response that is stored once `begun` is set; errors after that are part of it."""
        answer = job.answer
        assert isinstance(answer, ResponseAnswer)
        try:
            async with aclosing(self._service.chunks(model, request, job)) as chunks:
                async for _ in chunks:
                    if stored.status == "queued":
                        begins = await encode_in_parts(answer.unfinished("in_progress"))
                        self.store.update(stored, "in_progress", begins, needed=stored.needed)
        except Exception as error:
            if not begun.is_set():
                raise
            document = answer.unfinished("failed", api_error(error, request.state.body.sent_as))
            self.store.update(stored, "failed", await encode_in_parts(document))


async def _finished(answer: ResponseAnswer, conversation: _Conversation) -> tuple[str, bytes, Turn]:
    """Return the status, the document and the turn of a complete response."""
    document = answer.document()
    return document["status"], await encode_in_parts(document), conversation.turn(document["output"])


def _check_background(body: ResponseBody, stores: bool) -> None:
    if not body.background:
        return
    if not stores:
        raise refusal("background needs a stored response: set store, if this server stores any.", "background")
    if body.stream or body.stream_options is not None:
        text = "A response in the background is not streamed: read it by its id, and leave out stream."
        raise refusal(text, "stream", "unsupported_parameter")


def _stored(items: Iterable[Item]) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(item["id"], encode(item)) for item in items)


def _without_logprobs(item: Item) -> Item:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def page_of(items: Sequence[StoredItem], limit: int) -> list[bytes]:
    """Return a page of a list, in OpenAI's form, as parts: the items' texts are those that are stored."""
    shown = items[:limit]
    ends: dict[str, Any] = {
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(items) > limit,
    }
    data = [part for item in shown for part in (b",", item.data)][1:]
    return [b'{"object":"list","data":[', *data, b"],", encode(ends)[1:]]


async def _pieces(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    piece = b""
    for part in parts:
        for start in range(0, len(part), _PIECE):
            piece += part[start : start + _PIECE]
            if len(piece) >= _PIECE:
                yield piece
                piece = b""
    if piece:
        yield piece


_TEXTS = MappingProxyType(  # in the names of events about an item's text
    {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
)
_IDS = MappingProxyType({"reasoning": REASONING_ID, "message": MESSAGE_ID, "function_call": CALL_ID})
_CODES = MappingProxyType({400: "invalid_prompt", 429: "rate_limit_exceeded"})  # of errors, by status


@dataclass
class _OutputItem:
    """One item of the output while it is generated. text: of a call, its arguments. call_id, name: of a call."""

    kind: str
    place: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    id: str = ""

    def __post_init__(self) -> None:
        self.id = new_id(_IDS[self.kind])

    def event(self, ending: str) -> str:
        """Return the type of an event about the item's text."""
        return f"response.{_TEXTS[self.kind]}.{ending}"

    @property
    def where(self) -> dict[str, Any]:
        """The place of the item's text, for events."""
        place = {"item_id": self.id, "output_index": self.place}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        """Return the only part of an item other than a call, with a text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self.logprobs]}

    def shown(self, status: str, complete: bool = True) -> dict[str, Any]:
        """Return the item, without its text unless it is complete."""
        value: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**value, "call_id": self.call_id, "name": self.name, "arguments": self.text if complete else ""}
        rest: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {**value, **rest, "content": [self.part(self.text)] if complete else []}


class ResponseAnswer(Answer):
    """A response in OpenAI's newer shape. Its chunks are events; each has a type and a number."""

    def __init__(
        self, call: Call, body: ResponseBody, make_reader: Callable[[Prompt], MessageReader], stored: bool = False
    ) -> None:
        """stored: the response says that it is stored."""
        super().__init__(call, 1)
        self.id = new_id("resp_")
        self._body, self._make_reader, self._stored = body, make_reader, stored
        self._reader = MessageReader()
        self._items: list[_OutputItem] = []
        self._unsent: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not arrived yet
        self._tokens: list[dict[str, Any]] = []  # of `speculant_tokens`: tokens that no event has listed yet
        self._reason: str | None = None
        self._number = -1
        self._document: dict[str, Any] | None = None

    @override
    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        self._reader = self._make_reader(prompts[0])
        self.readers = [self._reader]
        return [
            self._event(f"response.{kind}", response=self._response("in_progress", []))
            for kind in ("created", "in_progress")
        ]

    @override
    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        thought = self._reader.reasoning_tokens
        part = self._reader.feed(piece.text, piece.token)
        reasons = self._reader.reasoning_tokens > thought
        if piece.token is not None and piece.logprobs is not None and not reasons:
            top = self.call.params.logprobs or 0
            self._unsent.append(chat_logprob(self.call.texts, piece.token, piece.logprobs, top))
        self._reason = piece.finish_reason
        self._tokens += self.tokens_of(piece).get("speculant_tokens", ())
        events = self._shown(part, "reasoning" if reasons else "message")
        if piece.finish_reason is not None:
            events += self._shown(self._reader.finish(), "message")
        return events

    @override
    def end(self) -> list[Chunk]:
        last = "response.incomplete" if self._status == "incomplete" else "response.completed"
        opened = [] if self._items else self._delta("message", "") if self._tokens else self._open("message")
        return [*opened, *self._close(self._status), self._event(last, response=self.document())]

    @override
    def document(self) -> dict[str, Any]:
        if self._document is None:
            self._document = self._complete()
        return self._document

    def unfinished(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """Return the response without its output. status: queued, in_progress, cancelled, or failed with an error."""
        value = self._response(status, [])
        if error is not None:
            value["error"] = {"code": _CODES.get(error.status, "server_error"), "message": error.message}
        return value

    def _complete(self) -> dict[str, Any]:
        used = self.usage(self._reader.reasoning_tokens)
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": used["total_tokens"],
        }
        finished = {"completed_at": int(time.time()), "usage": usage, **self.speculation()}
        *before, last = self._items
        output = [*(item.shown("completed") for item in before), last.shown(self._status)]
        return self._response(self._status, output) | finished

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" or self._reader.is_cut else "completed"

    @property
    def _details(self) -> dict[str, Any]:
        """Why the response is incomplete. OpenAI has no reason for a call that a stop string cuts."""
        return {"reason": "max_output_tokens"} if self._reason == "length" else {}

    def _shown(self, part: MessagePart, kind: str) -> list[Chunk]:
        """Return the events of a part. kind: the item of its token, if the part is empty."""
        events = [event for delta in part.deltas for event in self._of(delta)]
        if not self._tokens:
            return events
        if events:
            return [*events[:-1], {**events[-1], **self._fetch_tokens()}]
        if not self._items and self._body.tools:
            return []  # the token may begin a call
        return self._delta(self._items[-1].kind if self._items else kind, "")

    def _of(self, delta: ReasoningDelta | TextDelta | ToolDelta) -> list[Chunk]:
        if not isinstance(delta, ToolDelta):
            return self._delta("reasoning" if isinstance(delta, ReasoningDelta) else "message", delta.text)
        self._unsent.clear()  # a call has no log-probabilities
        begun = []
        if delta.name is not None:
            begun = [*self._close("completed"), *self._open("function_call", delta.id or "", delta.name)]
        return [*begun, *self._delta("function_call", delta.arguments)] if delta.arguments else begun

    def _delta(self, kind: str, text: str) -> list[Chunk]:
        """Return the events of a text that belongs to an item of a kind: the newest item, or a new one."""
        opened: list[Chunk] = []
        if not self._items or self._items[-1].kind != kind:
            if self._items and self._items[-1].kind == "function_call":
                del self._unsent[:-1]  # tokens that ended the call
            opened = [*self._close("completed"), *self._open(kind)]
        item = self._items[-1]
        item.text += text
        rest = {}
        if kind == "message":
            rest["logprobs"] = self._fetch_logprobs()
            item.logprobs += rest["logprobs"]
        tokens = {} if text else self._fetch_tokens()
        return [*opened, self._event(item.event("delta"), **item.where, delta=text, **rest, **tokens)]

    def _fetch_tokens(self) -> dict[str, Any]:
        """Return the entry of the tokens that no event has listed yet."""
        tokens, self._tokens = self._tokens, []
        return {"speculant_tokens": tokens} if tokens else {}

    def _fetch_logprobs(self) -> list[dict[str, Any]]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def _open(self, kind: str, call_id: str = "", name: str = "") -> list[Chunk]:
        item = _OutputItem(kind, len(self._items), call_id, name)
        self._items.append(item)
        added = item.shown("in_progress", complete=False)
        events: list[Chunk] = [self._event("response.output_item.added", output_index=item.place, item=added)]
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **item.where, part=item.part("")))
        return events

    def _close(self, status: str) -> list[Chunk]:
        """Return the last events of the newest item, if there is one."""
        if not self._items:
            return []
        item = self._items[-1]
        shown: dict[str, Any] = {"text": item.text}
        if item.kind == "message":
            item.logprobs += self._fetch_logprobs()
            shown["logprobs"] = item.logprobs
        elif item.kind == "function_call":
            shown = {"name": item.name, "arguments": item.text}
        events = [self._event(item.event("done"), **item.where, **shown)]
        if item.kind != "function_call":
            events.append(self._event("response.content_part.done", **item.where, part=item.part(item.text)))
        return [*events, self._event("response.output_item.done", output_index=item.place, item=item.shown(status))]

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self.call.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": self._details if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.call.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": self._stored,
            "temperature": params.temperature,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            **shown_settings(body),
        }

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **values}
