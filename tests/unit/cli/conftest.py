"""Models for the commands: a target, and a draft that often agrees with it."""

from __future__ import annotations

from tests.models import checkpoints

__all__ = ["checkpoints"]
