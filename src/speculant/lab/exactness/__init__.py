"""Checks that the output has the target's distribution: by enumeration on tables, and by tests on a real pair."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
