"""Draft lengths: the costs of steps, estimates of acceptance, and one file for each policy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
