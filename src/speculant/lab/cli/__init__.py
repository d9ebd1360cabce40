"""The laboratory's commands: one file a command. Nothing here imports torch before a command runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
