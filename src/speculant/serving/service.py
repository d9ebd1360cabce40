"""The common part of the routes that generate: from a body to a response, in one piece or streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from speculant.engine.async_engine import AsyncEngine
from speculant.params import SamplingParams
from speculant.serving.answers import Answer, Call, Chunk
from speculant.serving.clients import API_KEY, client_of, key_digest
from speculant.serving.errors import ApiError, api_error, refusal
from speculant.serving.metrics import RequestMeter, ServerMetrics
from speculant.serving.options import ServerOptions
from speculant.serving.prompts import Prompt, Prompts
from speculant.serving.protocol import Body, GeneratingBody, read_body
from speculant.serving.runs import Work, run
from speculant.serving.sampling import predicts
from speculant.serving.state import ServerState
from speculant.serving.streams import EventStream, while_connected
from speculant.serving.token_texts import TokenTexts
from speculant.serving.wire import DONE, document_response, event

B = TypeVar("B", bound=Body)
_LARGE = 65_536  # bytes of a body that is parsed in a thread


@dataclass(frozen=True)
class Job:
    """One request that generates: its body and settings, how to make its prompts, and the shape of its answer.

    named_events: the stream has OpenAI's newer form, events with names.
    """

    body: GeneratingBody
    params: SamplingParams
    num_prompts: int
    make_prompts: Callable[[], Awaitable[Sequence[Prompt]]]
    answer: Answer
    named_events: bool = False


class Service:
    """The server's parts, for the routes."""

    def __init__(
        self, state: ServerState, options: ServerOptions, names: Sequence[str], aliases: Sequence[str] = ()
    ) -> None:
        """names: the model's names, its own first. aliases: further names that requests may use."""
        self.state, self.options, self.names = state, options, tuple(names)
        self._aliases = frozenset(aliases)
        self.metrics = ServerMetrics(options.metrics_prefix, self.names[0], self._totals, self._cache)
        self.prompts = Prompts(state, options)

    async def read(self, kind: type[B], request: Request) -> B:
        """Return a request's body; a large one is parsed in a thread. Raises ApiError for an invalid one."""
        raw = await request.body()
        if len(raw) <= _LARGE:
            body = read_body(kind, raw)
        else:
            body = await self.prompts.in_thread(lambda: read_body(kind, raw))
        request.state.body = body  # errors name its fields
        return body

    def has_name(self, name: str) -> bool:
        """Whether the model has this name."""
        return name in self.names or name in self._aliases

    def model(self, body: Body) -> str:
        """Return the model's name as the client knows it. Raises ApiError (404) for another model."""
        name = self.names[0] if body.model is None else body.model
        if not self.has_name(name):
            raise ApiError(
                404,
                f"The model {name!r} does not exist; {self.names[0]!r} does.",
                param="model",
                code="model_not_found",
            )
        return name

    def call(self, engine: AsyncEngine, body: GeneratingBody, params: SamplingParams, num_prompts: int = 1) -> Call:
        """Return the facts about a request for its answer. Raises ApiError (400) for too many samples."""
        samples, most = num_prompts * params.n, self.options.max_samples
        if samples > most:
            raise refusal(f"The request has {samples} answers and at most {most} are allowed.", "n")
        options = body.stream_options
        return Call(
            model=self.model(body),
            params=params,
            texts=self.texts,
            level=self.options.per_request_spec_decode_metrics,
            predicted=predicts(engine, body, params),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            lists_tokens=bool(body.speculant and body.speculant.tokens),
            returns_ids=bool(getattr(body, "return_token_ids", False)),
        )

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of single tokens."""
        return TokenTexts(self.state.engine.tokenizer)

    async def answer(self, engine: AsyncEngine, request: Request, job: Job) -> Response:
        """Generate, and return the response. Errors before the first piece set its status, later ones are an event."""
        if job.body.stream_options is not None and not job.body.stream:
            raise refusal("stream_options needs stream=true.", "stream_options")
        chunks = self._chunks(engine, request, job)
        if not job.body.stream:
            return await while_connected(request.receive, _whole(chunks, job.answer))
        first = await while_connected(request.receive, anext(chunks, None))
        return EventStream(_events(first, chunks, job.named_events), self.options.send_timeout)

    async def _chunks(self, engine: AsyncEngine, request: Request, job: Job) -> AsyncGenerator[Sequence[Chunk], None]:
        """Yield the chunks of an answer while it is generated; its first chunks come with the first piece."""
        samples, answer = job.num_prompts * job.params.n, job.answer
        with self.state.admission.admit(samples):
            meter, failed = RequestMeter(self.metrics, samples), True
            try:
                work = await self._work(engine, request, job)
                answer.prompts = work.prompts
                waiting = answer.begin(work.prompts)
                async with aclosing(run(engine, work, self.options, meter)) as pieces:
                    async for batch in pieces:
                        yield [*waiting, *(chunk for prompt, piece in batch for chunk in answer.feed(prompt, piece))]
                        waiting = []
                yield answer.end()
            except (GeneratorExit, asyncio.CancelledError):
                failed = False
                raise
            finally:
                meter.close(failed)

    async def _work(self, engine: AsyncEngine, request: Request, job: Job) -> Work:
        prompts = await job.make_prompts()
        params = await self.prompts.of_params(engine, job.params)
        salt = salt_of(request.scope.get(API_KEY), job.body.cache_salt)
        return Work(uuid.uuid4().hex, prompts, params, job.body.priority or 0, salt, client_of(request.scope))

    def _totals(self) -> Any:
        engine = self.state.loaded
        return None if engine is None else engine.metrics

    def _cache(self) -> dict[str, str] | None:
        engine = self.state.loaded
        if engine is None:
            return None
        config = engine.config
        return {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(engine.metrics.blocks_total),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "engine": "0",
        }


def salt_of(api_key: str | None, own: str | None) -> str:
    """Return the salt of a request's prefix cache. Different keys share nothing, nor do different salts of a key."""
    if api_key is None:
        return own or ""
    return f"{key_digest(api_key)}:{own or ''}"


async def _whole(chunks: AsyncGenerator[Sequence[Chunk], None], answer: Answer) -> Response:
    async with aclosing(chunks):
        async for _ in chunks:
            pass
    return await document_response(answer.document())


async def _events(
    first: Sequence[Chunk] | None, chunks: AsyncGenerator[Sequence[Chunk], None], named: bool
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events; an error is the last one."""
    number = 0
    try:
        async with aclosing(chunks):
            batch = first
            while batch is not None:
                number += len(batch)
                if batch:
                    yield b"".join(event(chunk, chunk["type"] if named else None) for chunk in batch)
                batch = await anext(chunks, None)
        if not named:
            yield DONE
    except Exception as error:  # noqa: BLE001 - the client must get it
        yield _error_event(api_error(error), number, named)


def _error_event(error: ApiError, number: int, named: bool) -> bytes:
    if not named:
        return event(error.body())
    value = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return event({**value, "sequence_number": number}, "error")
