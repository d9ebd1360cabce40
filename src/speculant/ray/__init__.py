"""Replicas and batches on a Ray cluster; extra `ray`.

`serve run speculant.ray:app model=MODEL` deploys replicas behind Ray's proxies; `speculant serve MODEL --replicas N`
behind this package's own server. `LLMServer` is a `server_cls` for `ray.serve.llm`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
