"""The routes, and the way of a request that generates: from a body to a response, in one piece or streamed.

A route answers in OpenAI's shape, or in vLLM's if OpenAI has none.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from speculant import __version__
from speculant.engine import AsyncEngine, StreamPiece
from speculant.errors import SpeculantError
from speculant.params import SamplingParams
from speculant.scheduling import Preparation
from speculant.serving.http.clients import client_of, read_weights, salt_of
from speculant.serving.metrics import RequestMeter, joined
from speculant.serving.models import HOLDS, ServedModel
from speculant.serving.openai.ahead import TurnsAhead
from speculant.serving.openai.answers import Answer, Call, ChatAnswer, Chunk, CompletionAnswer, TokenTexts
from speculant.serving.openai.messages import MessageReader
from speculant.serving.openai.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GeneratingBody,
    PrefillBody,
    PrefilledChat,
    PrefilledCompletion,
    TokenizeBody,
    check_kind,
    read_body,
)
from speculant.serving.openai.settings import (
    Prompt,
    Prompts,
    chat_params,
    completion_params,
    count_prompts,
    finish_reason_of_calls,
    predicts,
    reader_for,
    with_allowed_tools,
    with_bounded_drafts,
    with_tools,
)
from speculant.serving.options import ServerOptions
from speculant.serving.records import RequestRecord
from speculant.serving.state import LARGE, ServerState
from speculant.serving.wire import (
    DONE,
    RECORD,
    REQUEST_ID,
    ApiError,
    EventStream,
    api_error,
    document_response,
    encode_in_parts,
    encode_long,
    error_event,
    event,
    is_anthropic,
    json_response,
    note_end,
    refusal,
    timed_out,
    unavailable,
    while_connected,
)
from speculant.text import find_fim
from speculant.types import Client, Sender

logger = logging.getLogger(__name__)

_DEADLINES = ("queue_timeout", "first_token_timeout", "request_timeout")
_SHORT_WAIT = 0.01  # seconds

B = TypeVar("B", bound=Body)
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One request that generates: its body, how to make its prompts, and the shape of its answer.

    named_events: the stream's events have names, as in OpenAI's newer form and in Anthropic's. before_end: called once
    the answer is complete, before its end is sent. done: what follows the last chunk of a stream without names.
    """

    body: GeneratingBody
    make_prompts: Callable[[], Awaitable[Sequence[Prompt]]]
    answer: Answer
    named_events: bool = False
    before_end: Callable[[], Awaitable[None]] | None = None
    done: bytes = DONE


@dataclass(frozen=True)
class Chat:
    """A request for a chat that was read: its body, and what its answer needs."""

    body: ChatBody
    call: Call
    make_reader: Callable[[Prompt], MessageReader]


class Service:
    """The server's parts, for the routes."""

    def __init__(self, state: ServerState, options: ServerOptions) -> None:
        self.state, self.options, self._ahead = state, options, TurnsAhead(state)
        self._weights = read_weights(options.client_weights, options.api_keys)
        self._texts = WeakKeyDictionary[AsyncEngine, TokenTexts]()

    async def read(self, kind: type[B], request: Request) -> B:
        """Return a request's body; a large one is parsed in a thread.

        Raises ApiError for an invalid one, and if no requests are accepted.
        """
        self.state.check()
        self._ahead.drop(client_of(request.scope))
        check_kind(request.headers.get("content-type", ""))
        raw = await request.body()
        request.state.size = len(raw)
        body = await self.apart(request, lambda: read_body(kind, raw))
        request.state.body = body  # errors name its fields
        return body

    async def apart(self, request: Request, work: Callable[[], T]) -> T:
        """Return the result of work whose time depends on the body: a large one is worked on in a thread.

        Raises ClientGoneError if the client leaves meanwhile.
        """
        if request.state.size <= LARGE:
            return work()
        return await while_connected(request.receive, self.prompts(request).in_thread(work))

    def prompts(self, request: Request) -> Prompts:
        """Return the maker of the prompts of a request, whose body was read."""
        return Prompts(self.state.texts, self.options, client_of(request.scope), request.state.size)

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a name; None = the first one. Raises ApiError (404) if no model has this name."""
        models = self.state.models
        found = models[0] if name is None else next((model for model in models if model.has_name(name)), None)
        if found is None:
            there = ", ".join(repr(model.names[0]) for model in models)
            text = f"The model {name!r} does not exist; {there} {'does' if len(models) == 1 else 'do'}."
            raise ApiError(404, text, param="model", code="model_not_found")
        return found

    async def use(self, request: Request, name: str | None) -> ServedModel:
        """Return the model of a name, which is loaded until the response has ended; see `find`.

        Raises ApiError if it can't be loaded, or not in the time that a request may wait for its first step.
        """
        self.state.check()
        model, started = self.find(name), time.monotonic()
        if not self.state.has_several:
            return model
        limits = [each for each in (self.options.queue_timeout, self.options.first_token_timeout) if each is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                await while_connected(request.receive, self.state.hold(model, request.scope[HOLDS]))
        except TimeoutError:
            text = f"The request waited for {min(limits)} s for the model {model.names[0]!r} to be loaded."
            raise unavailable(text, "queue_timeout") from None
        request.state.waited = time.monotonic() - started
        return model

    async def until_read(self, request: Request, begun: Sequence[Preparation]) -> list[int]:
        """Wait for preparations, and return how many tokens of each are known; their model may be put away meanwhile.

        Raises ApiError (504) if it takes longer than a first token may.
        """
        if self.state.has_several:
            request.scope[HOLDS].close()
        options = self._deadlines(request)
        limits = [each for each in (options.first_token_timeout, options.request_timeout) if each is not None]
        ended = asyncio.gather(*(asyncio.wrap_future(each.done) for each in begun))
        try:
            async with asyncio.timeout(min(limits, default=None)):
                return await while_connected(request.receive, ended)
        except TimeoutError:
            raise timed_out(f"The prompt was not read after {min(limits)} s, as other requests ran.") from None

    def call(self, model: ServedModel, body: GeneratingBody, params: SamplingParams, num_prompts: int = 1) -> Call:
        """Return the facts about a request for its answer. Raises ApiError (400) for too many samples."""
        count, most = num_prompts * _num_sequences(params), self.options.max_samples
        if count > most:
            raise refusal(f"The request has {count} answers or beams and at most {most} are allowed.", "n")
        options, lists_tokens = body.stream_options, bool(body.speculant and body.speculant.tokens)
        level = self.options.per_request_spec_decode_metrics
        return Call(
            model=body.model or model.names[0],
            params=params,
            texts=self._texts_of(model.engine),
            level="summary" if lists_tokens and level == "none" else level,
            predicted=predicts(model.engine, body, params),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            lists_tokens=lists_tokens,
            returns_ids=bool(getattr(body, "return_token_ids", False)),
        )

    async def chat(self, model: ServedModel, request: Request, translated: Callable[[], ChatBody]) -> Chat:
        """Return a chat. translated: returns its body, perhaps from a body in another shape."""
        engine = model.engine
        engine.check_chats()
        tokenizer, name = engine.tokenizer, self.options.tool_parser

        def settings() -> tuple[ChatBody, SamplingParams]:
            body = with_allowed_tools(translated())
            return body, with_tools(tokenizer, chat_params(engine, body), body, name)

        body, params = await self.apart(request, settings)
        reader = reader_for(tokenizer, body, name, params.structured_outputs is not None)
        return Chat(body, self.call(model, body, params), reader)

    def _texts_of(self, engine: AsyncEngine) -> TokenTexts:
        """Return the texts of single tokens."""
        found = self._texts.get(engine)
        if found is None:
            found = self._texts[engine] = TokenTexts(engine.tokenizer)
        return found

    async def answer(self, model: ServedModel, request: Request, job: Job) -> Response:
        """Generate, and return the response. Errors before the first piece set its status, later ones are an event."""
        if job.body.stream_options is not None and not job.body.stream:
            raise refusal("stream_options needs stream=true.", "stream_options")
        chunks = self.chunks(model, request, job)
        if not job.body.stream:
            return await while_connected(request.receive, self._whole(chunks, job.answer))
        first = await while_connected(request.receive, anext(chunks, None))
        return EventStream(_events(first, chunks, job, request.scope), self.options.send_timeout)

    async def _whole(self, chunks: AsyncGenerator[Sequence[Chunk], None], answer: Answer) -> Response:
        async with aclosing(chunks):
            async for _ in chunks:
                pass
        return await document_response(answer.document(), self.options.send_timeout)

    async def chunks(self, model: ServedModel, request: Request, job: Job) -> AsyncGenerator[Sequence[Chunk], None]:
        """Yield the chunks of an answer while it is generated; its first chunks come with the first piece."""
        engine, answer, params = model.engine, job.answer, job.answer.call.params
        num_prompts = len(answer.outputs)
        record: RequestRecord | None = request.scope.get(RECORD)
        if record is not None:
            record.params = params
        places = model.admission.admit(num_prompts * _num_sequences(params), self.client(request))
        with places, RequestMeter(model.metrics, num_prompts * params.n, params, record) as meter:
            prompts = answer.prompts = await job.make_prompts()
            streams = await self._streams(engine, request, job)
            answer.requests = tuple(streams)
            if record is not None:
                record.prompt_tokens = sum(each.num_tokens for each in prompts)
            waiting = answer.begin(prompts)
            async with aclosing(run(engine, streams, self._deadlines(request), meter)) as pieces:
                async for batch in pieces:
                    made = [chunk for prompt, piece in batch for chunk in answer.feed(prompt, piece)]
                    for name in answer.requests if answer.is_over else ():
                        engine.end(name)
                    yield [*waiting, *made]
                    waiting = []
            last = answer.end()
            if job.before_end is not None:
                await job.before_end()
            yield last
        if self.options.turns_ahead:
            sender = Sender(self.client(request), cache_salt=salt_of(request.scope, job.body.cache_salt))
            self._ahead.begin(engine, self.prompts(request), answer, sender)

    async def _streams(self, engine: AsyncEngine, request: Request, job: Job) -> dict[str, Pieces]:
        """Return the pieces of each prompt, by the id of its request to the engine. Nothing has begun yet."""
        params = await self.prompts(request).of_params(engine, job.answer.call.params)
        params = with_bounded_drafts(params, self.options.max_draft_tokens or engine.most_draft_tokens)
        salt = salt_of(request.scope, job.body.cache_salt)
        call = f"{request.scope.get(REQUEST_ID, '')}:{uuid.uuid4().hex}"  # clients may repeat their ids
        client, priority = replace(self.client(request), call=call), self._priority(job.body)
        streams: dict[str, Pieces] = {}
        for place, prompt in enumerate(job.answer.prompts):
            name = f"{call}-{place}"
            streams[name] = engine.stream(
                prompt.given, params, request_id=name, priority=priority, cache_salt=salt, client=client
            )
        return streams

    def client(self, request: Request) -> Client:
        """Return the client that sent a request, with the weight that the operator gave its key."""
        name = client_of(request.scope)
        return Client(name, self._weights.get(name.partition("/")[0], 1.0))

    def _priority(self, body: GeneratingBody) -> int:
        """Return a request's priority. Without a range of the operator it is 0, whatever the request has.

        Raises ApiError (400) for a priority outside of the range.
        """
        allowed = self.options.priority_range
        if body.priority is None or allowed is None:
            return 0
        if not allowed[0] <= body.priority <= allowed[1]:
            raise refusal(f"priority={body.priority} is not a number from {allowed[0]} to {allowed[1]}.", "priority")
        return body.priority

    def _deadlines(self, request: Request) -> ServerOptions:
        """Return the options with what is left of a request's deadlines after it has waited for its model."""
        waited: float = getattr(request.state, "waited", 0.0)
        if waited < _SHORT_WAIT:
            return self.options
        given = {name: getattr(self.options, name) for name in _DEADLINES}
        return replace(
            self.options, **{name: max(_SHORT_WAIT, s - waited) for name, s in given.items() if s is not None}
        )

    def metrics_page(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and its media type. Several models are engines 0, 1, 2."""
        (first, kind), *others = (model.metrics.page() for model in self.state.models)
        pages = [first, *(page for page, _ in others)]
        if not others:
            return first, kind
        return joined({str(number): page.decode() for number, page in enumerate(pages)}).encode(), kind


def _num_sequences(params: SamplingParams) -> int:
    """Return how many sequences a prompt counts as: its answers, or all beams of a search."""
    return params.beam_width or params.n


async def _events(
    first: Sequence[Chunk] | None, chunks: AsyncGenerator[Sequence[Chunk], None], job: Job, scope: Scope
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events; an error is the last one."""
    number, named = 0, job.named_events
    try:
        async with aclosing(chunks):
            batch = first
            while batch is not None:
                number += len(batch)
                if batch:
                    yield b"".join(event(chunk, chunk["type"] if named else None) for chunk in batch)
                batch = await anext(chunks, None)
        if not named and job.done:
            yield job.done
    except Exception as error:  # the client must get it
        note_end(scope, "error")
        if not isinstance(error, ApiError | SpeculantError):
            logger.error("request %s failed", scope.get(REQUEST_ID), exc_info=error)
        yield error_event(api_error(error), scope, number if named else None)


Pieces = AsyncGenerator[StreamPiece, None]
Numbered = tuple[int, StreamPiece]  # the number of a prompt, and a piece of one of its samples


async def run(
    engine: AsyncEngine, streams: Mapping[str, Pieces], options: ServerOptions, meter: RequestMeter
) -> AsyncGenerator[Sequence[Numbered], None]:
    """Yield the pieces of all prompts as they are committed, in batches. Closing the iterator aborts the request.

    streams: the pieces of each prompt, by the id of its request to the engine.
    Raises ApiError for a missed deadline, and the errors of `AsyncEngine.stream`; of several errors the first.
    """
    arrived: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue()
    readers = [
        asyncio.create_task(_read(engine, place, *stream, options, arrived))
        for place, stream in enumerate(streams.items())
    ]
    try:
        left = len(readers)
        while left:
            items = [await arrived.get()]
            while not arrived.empty():
                items.append(arrived.get_nowait())
            failed = next((item for item in items if isinstance(item, Exception)), None)
            before = items if failed is None else items[: items.index(failed)]
            pieces = [item for item in before if isinstance(item, tuple)]
            for piece in pieces:
                meter.record(*piece)
            if pieces:
                yield pieces
            if failed is not None:
                raise failed
            left -= items.count(None)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    engine: AsyncEngine,
    place: int,
    request_id: str,
    pieces: Pieces,
    options: ServerOptions,
    arrived: asyncio.Queue[Numbered | Exception | None],
) -> None:
    """Put a prompt's pieces into the queue, then None or the error that ended it."""
    try:
        async with asyncio.timeout(options.request_timeout), aclosing(pieces):
            piece: StreamPiece | None = await _first(engine, pieces, request_id, options)
            last = piece
            while piece is not None:
                arrived.put_nowait((place, piece))
                last, piece = piece, await anext(pieces, None)
            _check_output(last)
        arrived.put_nowait(None)
    except TimeoutError:
        arrived.put_nowait(timed_out(f"The answer was not complete after {options.request_timeout} s."))
    except Exception as error:  # noqa: BLE001 - any error ends the request
        arrived.put_nowait(error)


def _check_output(piece: StreamPiece | None) -> None:
    """Raise, after the last piece, the error of a sample that failed while others succeeded."""
    if piece is not None and piece.output is not None and piece.output.error is not None:
        problem, _, fix = piece.output.error.partition("\n  Fix: ")
        raise SpeculantError(problem, fix)


async def _first(engine: AsyncEngine, pieces: Pieces, request_id: str, options: ServerOptions) -> StreamPiece | None:
    """Return the first piece; raises ApiError if the queue or the first token takes too long."""
    waiting = asyncio.ensure_future(anext(pieces, None))
    queue, total = options.queue_timeout, options.first_token_timeout
    try:
        if queue is not None and (total is None or queue < total):
            await asyncio.wait({waiting}, timeout=queue)
            if not waiting.done() and not engine.has_begun(request_id):
                raise unavailable(f"The request waited for {queue} s without being started.", "queue_timeout")
            total = None if total is None else total - queue
        await asyncio.wait({waiting}, timeout=total)
        if not waiting.done():
            raise timed_out(f"There was no first token after {options.first_token_timeout} s.")
        return waiting.result()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


class Routes:
    """The handlers of one server's requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenizer_info = WeakKeyDictionary[AsyncEngine, bytes]()  # may have megabytes

    async def completions(self, request: Request) -> Response:
        """Complete one prompt or several."""
        body = await self._service.read(CompletionBody, request)
        model = await self._service.use(request, body.model)
        return await self._service.answer(model, request, await self._completion(model, request, body))

    async def _completion(self, model: ServedModel, request: Request, body: CompletionBody) -> Job:
        service, engine = self._service, model.engine
        prompts, count = service.prompts(request), count_prompts(body, service.options)
        params = await service.apart(request, lambda: completion_params(engine, body))
        call, echo = service.call(model, body, params, count), bool(body.echo)
        answer = CompletionAnswer(call, count, echo, answers=body.max_tokens != 0)
        return Job(body, lambda: prompts.of_completion(engine, body), answer)

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        body = await self._service.read(ChatBody, request)
        model = await self._service.use(request, body.model)
        return await self._service.answer(model, request, await self._chat(model, request, body))

    async def _chat(self, model: ServedModel, request: Request, body: ChatBody) -> Job:
        service = self._service
        chat = await service.chat(model, request, lambda: body)
        answer = ChatAnswer(chat.call, chat.make_reader, finish_reason_of_calls(chat.body))

        async def prompts() -> list[Prompt]:
            return [await service.prompts(request).of_chat(model.engine, chat.body)]

        return Job(chat.body, prompts, answer)

    async def prefill(self, request: Request) -> Response:
        """Have the prompt of a chat or a completion read while nothing else runs, so that a later request finds it."""
        service = self._service
        body = await service.read(PrefillBody, request)
        if (body.prompt is None) == (body.messages is None):
            raise refusal("Send either prompt or messages.", "prompt")
        if body.prompt is None:
            chat = await service.read(PrefilledChat, request)
            model = await service.use(request, body.model)
            job = await self._chat(model, request, chat)
        else:
            completion = await service.read(PrefilledCompletion, request)
            model = await service.use(request, body.model)
            job = await self._completion(model, request, completion)
        made = await while_connected(request.receive, job.make_prompts())
        salt, client = salt_of(request.scope, body.cache_salt), service.client(request)
        begun = [await model.engine.prefill(prompt.given, cache_salt=salt, client=client) for prompt in made]
        known = [each.cached for each in begun]
        if body.wait:
            known = await service.until_read(request, begun)
        sizes = {"prompt_tokens": sum(each.num_tokens for each in begun), "cached_tokens": sum(known)}
        return json_response(
            {"object": "prefill", "model": body.model or model.names[0], **sizes}, 200 if body.wait else 202
        )

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or of messages."""
        service = self._service
        body = with_allowed_tools(await service.read(TokenizeBody, request))
        engine = (await service.use(request, body.model)).engine
        if (body.prompt is None) == (body.messages is None):
            raise refusal("Send either prompt or messages.", "prompt")
        prompts = service.prompts(request)
        made = prompts.of_chat(engine, body) if body.prompt is None else prompts.of_text(engine, body.prompt, body)
        prompt = await while_connected(request.receive, made)

        def document() -> dict[str, Any]:
            tokens, text_of_token = list(prompt.tokens), engine.tokenizer.backend.id_to_token
            value = {"count": len(tokens), "max_model_len": engine.limits.max_model_len, "tokens": tokens}
            return value | ({"token_strs": list(map(text_of_token, tokens))} if body.return_token_strs else {})

        return await _made_apart(request, prompts, document)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        service = self._service
        body = await service.read(DetokenizeBody, request)
        engine = (await service.use(request, body.model)).engine

        def document() -> dict[str, str]:
            if any(not 0 <= token < 2**31 for token in body.tokens):
                raise refusal("A token id is negative or too large.", "tokens")
            return {"prompt": engine.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))}

        return await _made_apart(request, service.prompts(request), document)

    async def tokenizer_info(self, request: Request, model: str | None = None) -> Response:
        """Return the settings in the tokenizer's folder, and the chat template."""
        engine = (await self._service.use(request, model)).engine
        if engine not in self._tokenizer_info:
            self._tokenizer_info[engine] = await encode_in_parts(dict(engine.tokenizer.settings))
        return Response(self._tokenizer_info[engine], media_type="application/json")

    async def models(self, request: Request) -> Response:
        """List the names of the models."""
        self._service.state.check()
        data = [self._model(each, name, request) for each in self._service.state.models for name in each.names]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
        page = ends if is_anthropic(request.scope) else {}
        return json_response({"object": "list", "data": data, **page})

    async def model(self, request: Request, model: str) -> Response:
        """Describe a model."""
        self._service.state.check()
        return json_response(self._model(self._service.find(model), model, request))

    async def health(self) -> Response:
        """Return whether requests are served: 200, or 503 with the reason."""
        self._service.state.check()
        return json_response({"status": "ok"})

    async def load(self) -> Response:
        """Return the number of sequences that run or wait, as vLLM's server does."""
        return json_response({"server_load": sum(model.admission.count for model in self._service.state.models)})

    async def props(self, request: Request, model: str | None = None) -> Response:
        """Return the server's properties as llama.cpp's does, with the model's name in place of its path."""
        used = await self._service.use(request, model)
        engine, name = used.engine, used.names[0]
        settings = engine.default_params
        params = {
            "n_predict": -1,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "repeat_penalty": settings.repetition_penalty,
            "presence_penalty": settings.presence_penalty,
            "frequency_penalty": settings.frequency_penalty,
        }
        general = {"n_ctx": engine.limits.max_model_len, "speculative": engine.speculating, "params": params}
        return json_response(
            {
                "default_generation_settings": general,
                "total_slots": engine.limits.max_num_seqs,
                "model_alias": name,
                "model_path": name,
                "chat_template": engine.tokenizer.chat_template or "",
                "infill": not engine.has_source and find_fim(engine.tokenizer) is not None,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"speculant {__version__}",
                "is_sleeping": False,
            }
        )

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        page, kind = self._service.metrics_page()
        return Response(page, headers={"content-type": kind})

    async def version(self) -> Response:
        """Return the version of this package."""
        return json_response({"version": __version__})

    def _model(self, model: ServedModel, name: str, request: Request) -> dict[str, Any]:
        """Return the description of a model under one of its names; an engine that is not loaded has no properties.

        It has the fields of Anthropic's, too, for a client that reads these.
        """
        created = self._service.state.created
        since = datetime.fromtimestamp(created, UTC).isoformat()
        found = {"id": name, "object": "model", "created": created, "owned_by": "speculant", "root": model.names[0]}
        more = {"type": "model", "display_name": name, "created_at": since} if is_anthropic(request.scope) else {}
        if (engine := model.loaded) is None:
            return {**more, **found, "state": model.state}
        longest = engine.limits.max_model_len
        return {
            **(more and {**more, "max_input_tokens": longest}),
            **found,
            "max_model_len": longest,
            "chat": engine.tokenizer.chat_template is not None and not engine.has_source,
            "speculation": {"on": engine.speculating, "detail": engine.speculation},
            "state": model.state,
        }


async def _made_apart(request: Request, prompts: Prompts, document: Callable[[], Mapping[str, Any]]) -> Response:
    """Return a response whose document is made and written in a text thread."""
    content = await while_connected(request.receive, prompts.in_thread(lambda: encode_long(document())))
    return Response(content, media_type="application/json")
