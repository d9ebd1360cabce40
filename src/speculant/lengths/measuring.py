"""A measurement in slices, which run between the steps of an engine, so that no request waits for all of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator

import torch

from speculant.errors import Guard

logger = logging.getLogger(__name__)

SLICE_S = 0.05  # that every request can wait for


class Measurement:
    """Measures costs slice by slice. active: slices are left; until they have run, nothing is drafted."""

    def __init__(self) -> None:
        self._make: Callable[[], Iterator[None]] = lambda: iter(())
        self._slices: Iterator[None] = iter(())
        self.active = False
        self._guard = Guard(logger, "and drafts have the usual costs")

    def begin(self, make: Callable[[], Iterator[None]]) -> None:
        """Take over a function that makes the slices; each `next` runs one. After an interrupt they begin anew."""
        self._make, self._slices, self.active = make, make(), True

    @torch.inference_mode()
    def run(self, seconds: float) -> None:
        """Run the next slice, and further ones until `seconds` are over."""
        started = time.perf_counter()
        while self.active:
            try:
                next(self._slices)
            except StopIteration:
                self.active = False
            except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
                self._slices = self._make()
                self._guard.note("the measurement of costs", error)
                self.active = False
            if time.perf_counter() - started >= seconds:
                break

    def finish(self) -> None:
        """Run all slices that are left."""
        self.run(math.inf)
