"""The path of the application: `serve run speculant.ray:app model=MODEL` deploys replicas behind Ray's proxies."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `app` when it is used, so that `import speculant.ray` imports no Ray.

    Raises ConfigError if Ray is not installed.
    """
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from speculant.scale import check_ray

    check_ray()
    from speculant.scale import app

    return app
