"""Replicas and batches on a Ray cluster; extra `ray`.

`serve run speculant.ray:app model=MODEL` deploys replicas behind Ray's proxies; `speculant serve MODEL --replicas N`
behind this package's own server. `LLMServer` is a `server_cls` for `ray.serve.llm`.
"""

from typing import Any

import lazy_loader

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a name when it is used. Raises ConfigError if it needs Ray, which is not installed."""
    if name in ("app", "LLMServer"):
        from speculant.ray.extra import check_ray

        check_ray()
    return _find(name)
