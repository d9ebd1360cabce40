"""Makes the application: routes, limits, keys, and the life of the engine behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from speculant import __version__
from speculant.engine.async_engine import AsyncEngine
from speculant.errors import SpeculantError
from speculant.serving.disconnect import ClientGoneError
from speculant.serving.errors import ApiError, api_error
from speculant.serving.middleware import ApiKeys, Heads, Limits, RequestIds
from speculant.serving.openapi import describe
from speculant.serving.options import ServerOptions
from speculant.serving.page import PAGE, page_route
from speculant.serving.protocol import Body
from speculant.serving.routes import Routes
from speculant.serving.service import Service
from speculant.serving.state import ServerState, Source
from speculant.serving.wire import error_response

_NOBODY_READS = 499  # the status that proxies log for a client that went away


def make_app(engine: Source, options: ServerOptions, names: Sequence[str] = ()) -> FastAPI:
    """Return an application that serves an engine, or one that a function loads while the server listens already.

    names: what the model may be called; none = what the engine was given. If the options have names, /v1/models shows
    these alone. The application's `state.server` is its `ServerState`; it shuts the engine down in the end.
    """
    state = ServerState(engine)
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
    app.add_middleware(Limits, options=options)
    app.add_middleware(ApiKeys, keys=options.api_keys)
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
    """Load the engine while requests are answered, and shut it down in the end."""
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
    texts = {404: "There is no such route.", 405: "This route has other methods."}
    text = texts.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, text, headers=error.headers))


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_NOBODY_READS)
