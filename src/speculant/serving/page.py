"""The page at `/`: static files that use the public routes. They hold nothing of the model, so they need no key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from types import MappingProxyType

from starlette.responses import Response

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


def page_route(path: str) -> Callable[[], Awaitable[Response]]:
    """Return the handler of one of the page's paths."""
    name, kind = PAGE[path]
    content = (_FILES / name).read_bytes()

    async def answer() -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return answer
