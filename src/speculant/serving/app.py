"""Makes the application: routes, limits, keys, the page at `/`, the OpenAPI document, and the engine's lifespan."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from speculant import __version__
from speculant.engine import AsyncEngine
from speculant.errors import ConfigError, SpeculantError
from speculant.serving.anthropic.messages import MESSAGE_BODIES, MessageRoutes
from speculant.serving.http.limits import ApiKeys, Heads, RequestLimits, Sites
from speculant.serving.infill import InfillRoute
from speculant.serving.models import Holds, LoadedModels, ModelSource, ServedModel, Source
from speculant.serving.openai.protocol import BODIES, Body
from speculant.serving.openai.responses import ResponseRoutes
from speculant.serving.openai.service import Routes, Service
from speculant.serving.openai.settings import unknown_formats
from speculant.serving.options import PROBED_PATHS, ServerOptions
from speculant.serving.records import AccessLog, Report, RequestRecords, Tracer
from speculant.serving.state import ServerState, TextLanes
from speculant.serving.wire import (
    REQUEST_ID,
    ApiError,
    ClientGoneError,
    api_error,
    encode,
    error_response,
    note_end,
    request_id_headers,
)

logger = logging.getLogger(__name__)

_CLIENT_CLOSED = 499  # the status that proxies log for a client that disconnected
_FILES = files("speculant") / "assets" / "page"
PAGE: Mapping[str, tuple[str, str]] = MappingProxyType(  # path: file and media type
    {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", "text/javascript; charset=utf-8"),
        "/measure.js": ("measure.js", "text/javascript; charset=utf-8"),
    }
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",  # no text becomes HTML or a script
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
OPEN_PATHS = PROBED_PATHS | {*PAGE}  # need no API key
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "details": {"type": "object"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}


def make_app(engine: Source | Sequence[ModelSource], options: ServerOptions, names: Sequence[str] = ()) -> FastAPI:
    """Return an application that serves an engine. A function as `engine` loads it while the server already listens.

    Several models as `engine` are loaded when they are first asked for.

    names: names of the only model; none = the one given to the engine. If the options have names, /v1/models shows only
    these. The application's `state.server` is its `ServerState`, which shuts the engines down at the end. Raises
    ConfigError for options that have no effect.
    """
    if isinstance(engine, Sequence):
        models, several = _several_models(engine, options)
    else:
        models, several = [_only_model(engine, options, names)], None
    state = ServerState(models, TextLanes(options.max_large_texts), several)
    service = Service(state, options)
    tracer = None if options.otlp_endpoint is None else Tracer.to_collector(options.otlp_endpoint, models[0].names[0])
    app = FastAPI(
        title="Speculant",
        version=__version__,
        openapi_url=None,  # see `_description_route`
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        redirect_slashes=False,
    )
    responses = ResponseRoutes(service)
    app.state.server, app.state.service, app.state.tracer = state, service, tracer
    app.state.stored = responses.store
    _add_routes(app, Routes(service), responses, MessageRoutes(service))
    app.add_api_route("/infill", InfillRoute(service).infill, methods=["POST"])
    app.add_middleware(Holds)
    add_guards(app, options, tracer)
    app.openapi = functools.cache(lambda: describe(app))  # type: ignore[method-assign]
    app.add_api_route("/openapi.json", _description_route(app), methods=["GET"], include_in_schema=False)
    return app


def _only_model(engine: Source, options: ServerOptions, names: Sequence[str]) -> ServedModel:
    if options.memory is not None:
        raise ConfigError(
            "memory is for several models, and one is served", "leave it out; kv_memory bounds its cache."
        )
    given = [engine.config.model] if isinstance(engine, AsyncEngine) else []
    known = tuple(dict.fromkeys((*names, *given)))
    return ServedModel(engine, options.served_model_names or known[:1] or ("model",), known, options.metrics_prefix)


def _several_models(sources: Sequence[ModelSource], options: ServerOptions) -> tuple[list[ServedModel], LoadedModels]:
    models = [
        ServedModel(
            functools.partial(_load_one, each, options.tool_parser),
            each.names[:1],
            each.names,
            options.metrics_prefix,
            each.expected_bytes,
        )
        for each in sources
    ]
    return models, LoadedModels(models, options.memory_bytes())


def _load_one(source: ModelSource, tool_parser: str | None) -> AsyncEngine:
    engine = source.load()
    _warn_of_formats(engine, source.names[0], tool_parser)
    return engine


def add_guards(app: FastAPI, options: ServerOptions, tracer: Tracer | None = None) -> None:
    """Add what stands around the routes: the form of errors, limits, keys, CORS, request ids, the log and traces."""
    app.add_exception_handler(HTTPException, _on_http_error)
    for kind in (ApiError, SpeculantError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientGoneError, _on_gone)
    app.add_middleware(RequestLimits, options=options)
    open_paths = OPEN_PATHS | ({"/metrics"} if options.metrics_without_key else set())
    app.add_middleware(ApiKeys, keys=options.api_keys, open_paths=open_paths)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    if not options.api_keys:
        app.add_middleware(Sites, options=options, open_paths=PROBED_PATHS)
    app.add_middleware(Heads)
    reports: list[Report] = [] if tracer is None else [tracer]
    if options.access_log != "none":
        reports.append(AccessLog(options.access_log))
    app.add_middleware(RequestRecords, reports=reports)


def _add_routes(app: FastAPI, routes: Routes, responses: ResponseRoutes, messages: MessageRoutes) -> None:
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"])
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"])
    app.add_api_route("/v1/responses", responses.create, methods=["POST"])
    app.add_api_route("/v1/responses/{response_id}", responses.retrieve, methods=["GET"])
    app.add_api_route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"])
    app.add_api_route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"])
    app.add_api_route("/v1/responses/{response_id}/input_items", responses.input_items, methods=["GET"])
    app.add_api_route("/v1/messages", messages.create, methods=["POST"])
    app.add_api_route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"])
    app.add_api_route("/v1/prefill", routes.prefill, methods=["POST"], status_code=202)
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", routes.model, methods=["GET"])
    app.add_api_route("/tokenize", routes.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", routes.detokenize, methods=["POST"])
    app.add_api_route("/tokenizer_info", routes.tokenizer_info, methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/ping", routes.health, methods=["GET"])
    app.add_api_route("/ping", routes.health, methods=["POST"], include_in_schema=False)
    app.add_api_route("/load", routes.load, methods=["GET"])
    app.add_api_route("/props", routes.props, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"])
    app.add_api_route("/version", routes.version, methods=["GET"])
    add_page(app)


def add_page(app: FastAPI) -> None:
    """Add the routes of the page."""
    for path in PAGE:
        app.add_api_route(path, page_route(path), methods=["GET"], include_in_schema=False)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """Load the engine while requests are answered, and shut it down at the end."""
    state: ServerState = app.state.server
    loading = asyncio.create_task(_load(app))
    try:
        yield
    finally:
        with suppress(asyncio.CancelledError):
            await loading  # a thread can't be stopped
        await state.close()
        if app.state.tracer is not None:
            await asyncio.to_thread(app.state.tracer.close)


async def _load(app: FastAPI) -> None:
    """Load the engine, and say which formats of its model are unknown."""
    state, parser = app.state.server, app.state.service.options.tool_parser
    await state.load()
    if state.loaded is not None:
        await asyncio.to_thread(_warn_of_formats, state.loaded, state.models[0].names[0], parser)


def _warn_of_formats(engine: AsyncEngine, name: str, tool_parser: str | None) -> None:
    for problem in unknown_formats(engine.tokenizer, tool_parser):
        logger.warning("%s: %s", name, problem)


async def _on_error(request: Request, error: Exception) -> Response:
    body, request_id = getattr(request.state, "body", None), request.scope.get(REQUEST_ID, "")
    if not isinstance(error, ApiError | SpeculantError):
        logger.error("request %s failed: %r", request_id, error)  # the traceback comes from the server
    told = api_error(error, body.sent_as) if isinstance(body, Body) else api_error(error)
    response = error_response(told, request.scope)
    for name in request_id_headers(request.scope):  # the middleware does not see the answer to an unknown error
        response.headers[name] = request_id
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    if error.status_code == 404:
        there = ", ".join(f"{method} {path}" for path, methods in _methods(routes).items() for method in methods)
        text = f"There is no route {request.method} {request.url.path[:80]!r}. There are: {there}."
        return error_response(ApiError(404, text, code="unknown_url"), request.scope)
    if error.status_code == 405:
        matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = sorted({method for route in matching for method in route.methods or ()})
        allowed += ["HEAD"] if "GET" in allowed and "HEAD" not in allowed else []
        text = f"{request.method} is not a method of this route: use {' or '.join(allowed)}."
        return error_response(ApiError(405, text, headers={"allow": ", ".join(allowed)}), request.scope)
    return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers), request.scope)


def _methods(routes: Sequence[Route]) -> dict[str, list[str]]:
    """Return the methods of each path. HEAD, which is answered wherever GET is, is left out."""
    found: dict[str, list[str]] = {}
    for route in routes:
        found.setdefault(route.path_format, []).extend(sorted((route.methods or set()) - {"HEAD"}))
    return found


async def _on_gone(request: Request, _: Exception) -> Response:
    note_end(request.scope, "disconnected")
    return Response(status_code=_CLIENT_CLOSED)


def page_route(path: str) -> Callable[[], Awaitable[Response]]:
    """Return the handler of one of the page's paths. It needs no key: the files contain no data of the model."""
    name, kind = PAGE[path]
    content = (_FILES / name).read_bytes()

    async def answer() -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return answer


def _description_route(app: FastAPI) -> Callable[[], Awaitable[Response]]:
    """Return the handler of the OpenAPI document, which is made and encoded once."""
    content = functools.cache(lambda: encode(app.openapi()))

    async def answer() -> Response:
        return Response(content(), media_type="application/json")

    return answer


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an app: FastAPI's, with the bodies that the routes parse themselves."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    bodies = {**BODIES, **MESSAGE_BODIES}
    kinds = [(kind, "validation") for kind in bodies.values()]
    named, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {**definitions["$defs"], "ErrorResponse": _ERROR, "AnthropicErrorResponse": _ANTHROPIC_ERROR}
    for path, kind in bodies.items():
        content = {"application/json": {"schema": named[(kind, "validation")]}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for path, operations in document["paths"].items():
        name = "AnthropicErrorResponse" if path in MESSAGE_BODIES else "ErrorResponse"
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        for operation in operations.values():
            operation["responses"]["default"] = {"description": "An error", "content": content}
    return document
