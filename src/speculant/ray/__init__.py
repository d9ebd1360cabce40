"""Replicas and batches on a Ray cluster; extra `ray`.

`serve run speculant.ray:app model=MODEL` deploys replicas behind Ray's proxies; `speculant serve MODEL --replicas N`
behind this package's own server. `LLMServer` is a `server_cls` for `ray.serve.llm`.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {"app": "speculant.ray.application", "LLMServer": "speculant.ray.llm_server"}


def __getattr__(name: str) -> Any:
    """Import a name when it is used, so that `import speculant.ray` imports no Ray.

    Raises ConfigError if Ray is not installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from speculant.ray.extra import check_ray

    check_ray()
    return getattr(importlib.import_module(_MODULES[name]), name)
