"""More than one server: replicas on a Ray cluster (extra `ray`), and files of requests in OpenAI's batch format."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
