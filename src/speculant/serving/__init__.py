"""Serving over HTTP: an API in OpenAI's shape, with reasoning and tool calls read from a model's text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
