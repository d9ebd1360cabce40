"""Text around the engine: tokenizers, chat templates, streaming decoding, stop strings."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
