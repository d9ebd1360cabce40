"""How many sequences may be in the server at a time; what comes on top is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from speculant.serving.errors import overloaded


class Admission:
    """Counts the sequences of all requests from their arrival to their end. It is used in one event loop."""

    def __init__(self, most: int) -> None:
        """`most`: sequences that may run and wait together."""
        self.most, self.count = most, 0

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Count sequences while the block runs. Raises ApiError (429) if there is no room for them."""
        if self.count + sequences > self.most:
            raise overloaded(
                f"The server's queue is full: {self.count} sequences run or wait, {sequences} more came and at most"
                f" {self.most} may. Try again later."
            )
        self.count += sequences
        try:
            yield
        finally:
            self.count -= sequences
