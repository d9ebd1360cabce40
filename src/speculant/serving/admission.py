"""How many sequences may be in the server at a time; what comes on top is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from speculant.serving.errors import overloaded, refusal


class Admission:
    """Counts the sequences of all requests from their arrival to their end. It is used in one event loop."""

    def __init__(self, most: int) -> None:
        """`most`: sequences that may run and wait together."""
        self.most, self.count = most, 0

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Count sequences while the block runs.

        Raises ApiError if there is no room for them now (429), or never (400).
        """
        if sequences > self.most:
            raise refusal(f"{sequences} answers are asked for and at most {self.most} may run and wait.", "n")
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
