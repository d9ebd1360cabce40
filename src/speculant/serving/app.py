"""Makes the application: routes, limits, keys, the page at `/`, the OpenAPI document, and the engine's lifespan."""

from __future__ import annotations

import asyncio
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

from speculant import __version__
from speculant.engine.async_engine import AsyncEngine
from speculant.errors import SpeculantError
from speculant.serving.errors import ApiError, api_error
from speculant.serving.middleware import ApiKeys, Heads, RequestIds, RequestLimits
from speculant.serving.options import ServerOptions
from speculant.serving.protocol import BODIES, Body
from speculant.serving.routes import Routes
from speculant.serving.service import Service
from speculant.serving.state import ServerState, Source
from speculant.serving.streams import ClientGoneError
from speculant.serving.text_lanes import TextLanes
from speculant.serving.wire import error_response

_CLIENT_CLOSED = 499  # the status that proxies log for a client that disconnected
_FILES = files("speculant") / "assets" / "page"
PAGE: Mapping[str, tuple[str, str]] = MappingProxyType(  # path: file and media type
    {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    }
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
OPEN_PATHS = frozenset({"/health", *PAGE})  # need no API key
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


def make_app(engine: Source, options: ServerOptions, names: Sequence[str] = ()) -> FastAPI:
    """Return an application that serves an engine. A function as `engine` loads it while the server already listens.

    names: names of the model; none = the one given to the engine. If the options have names, /v1/models shows only
    these. The application's `state.server` is its `ServerState`, which shuts the engine down at the end.
    """
    state = ServerState(engine, TextLanes(options.max_large_texts))
    given = [engine.config.model] if isinstance(engine, AsyncEngine) else []
    known = tuple(dict.fromkeys((*names, *given)))
    service = Service(state, options, options.served_model_names or known[:1] or ("model",), known)
    app = FastAPI(
        title="Speculant",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        redirect_slashes=False,
    )
    app.state.server, app.state.service = state, service
    _add_routes(app, Routes(service))
    app.add_exception_handler(HTTPException, _on_http_error)
    for kind in (ApiError, SpeculantError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientGoneError, _on_gone)
    app.add_middleware(RequestLimits, options=options)
    app.add_middleware(ApiKeys, keys=options.api_keys, open_paths=OPEN_PATHS)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Heads)
    app.add_middleware(RequestIds)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI, routes: Routes) -> None:
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"])
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"])
    app.add_api_route("/v1/responses", routes.responses, methods=["POST"])
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", routes.model, methods=["GET"])
    app.add_api_route("/tokenize", routes.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", routes.detokenize, methods=["POST"])
    app.add_api_route("/tokenizer_info", routes.tokenizer_info, methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"])
    app.add_api_route("/version", routes.version, methods=["GET"])
    for path in PAGE:
        app.add_api_route(path, page_route(path), methods=["GET"], include_in_schema=False)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """Load the engine while requests are answered, and shut it down at the end."""
    state: ServerState = app.state.server
    loading = asyncio.create_task(state.load())
    try:
        yield
    finally:
        with suppress(asyncio.CancelledError):
            await loading  # a thread can't be stopped
        await state.close()


async def _on_error(request: Request, error: Exception) -> Response:
    body = getattr(request.state, "body", None)
    return error_response(api_error(error, body.sent_as) if isinstance(body, Body) else api_error(error))


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: "There is no such route.", 405: "This route does not have this method."}
    text = texts.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, text, headers=error.headers))


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


def page_route(path: str) -> Callable[[], Awaitable[Response]]:
    """Return the handler of one of the page's paths. It needs no key: the files contain no data of the model."""
    name, kind = PAGE[path]
    content = (_FILES / name).read_bytes()

    async def answer() -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return answer


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an app: FastAPI's, with the bodies that the routes parse themselves."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    kinds = [(kind, "validation") for kind in BODIES.values()]
    named, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {**definitions["$defs"], "ErrorResponse": _ERROR}
    for path, kind in BODIES.items():
        content = {"application/json": {"schema": named[(kind, "validation")]}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"]["default"] = {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
            }
    return document
