"""The routes under /v1/responses: generate a response, and read, cancel and delete stored ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from speculant.engine.async_engine import AsyncEngine
from speculant.serving.clients import client_of
from speculant.serving.errors import ApiError, api_error, refusal
from speculant.serving.options import ServerOptions
from speculant.serving.prompts import Prompt
from speculant.serving.protocol import ChatBody, Message, ResponseBody
from speculant.serving.records import note_background
from speculant.serving.responses.answers import ResponseAnswer
from speculant.serving.responses.chat import as_chat
from speculant.serving.responses.items import REFERENCE, Item, as_messages, kind_of, read_items, reference_of
from speculant.serving.responses.store import ResponseStore, StoredItem, StoredResponse, Turn
from speculant.serving.service import Job, Service
from speculant.serving.streams import EventStream, while_connected
from speculant.serving.wire import encode, encode_in_parts, json_response

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
        service, engine = self._service, self._service.state.engine
        body = await service.read(ResponseBody, request)
        stores = body.store is not False and self.store.most > 0

        def translated() -> ChatBody:
            _check_background(body, stores)
            return as_chat(body)

        chat = await service.chat(engine, request, translated)
        answer = ResponseAnswer(chat.call, body, chat.make_reader, stores)
        owner, making = client_of(request.scope), service.prompts(request)
        conversation = self._conversation(owner, body)
        making = replace(making, size=making.size + conversation.stored_bytes)

        async def prompts() -> list[Prompt]:
            messages = await making.in_thread(conversation.read)
            return [await making.of_chat(engine, chat.body.model_copy(update={"messages": messages}))]

        async def keep() -> None:
            self.store.add(StoredResponse(answer.id, owner, *await _finished(answer, conversation)))

        before_end = keep if stores else None
        job = Job(chat.body, chat.params, 1, prompts, answer, named_events=True, before_end=before_end)
        if body.background:
            return await self._begin(engine, request, job, conversation)
        return await service.answer(engine, request, job)

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
        if length > self._service.options.max_messages:
            most = self._service.options.max_messages
            raise refusal(f"The conversation has {length} items and at most {most} are allowed.", "input")
        named = [] if isinstance(body.input, str) else [item for item in given if kind_of(item) == REFERENCE]
        references = [self._item(owner, reference_of(item)) for item in named]
        size = sum(len(item.data) for item in references) + (0 if previous is None else previous.total)
        _check_size(size, self._service.options)
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

    async def _begin(self, engine: AsyncEngine, request: Request, job: Job, conversation: _Conversation) -> Response:
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
        stored.task = asyncio.create_task(self._generate(engine, request, detached, stored, begun))
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
        self, engine: AsyncEngine, request: Request, job: Job, stored: StoredResponse, begun: asyncio.Event
    ) -> None:
        """Generate a response that is stored once `begun` is set; errors after that are part of it."""
        answer = job.answer
        assert isinstance(answer, ResponseAnswer)
        try:
            async with aclosing(self._service.run(engine, request, job)) as pieces:
                async for _ in pieces:
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


def _check_size(size: int, options: ServerOptions) -> None:
    """Raise ApiError (400) if stored items are larger than a body with them could be."""
    if size > options.max_body_bytes:
        text = f"The stored items have {size} bytes and a conversation may have at most {options.max_body_bytes}."
        raise refusal(text, "previous_response_id", "too_long")


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
