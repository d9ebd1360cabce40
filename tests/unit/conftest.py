"""The small checkpoints."""

from tests.models import checkpoints

__all__ = ["checkpoints"]
