"""Files of requests in OpenAI's batch format: read, answered by anything, and written so that a kill loses nothing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
