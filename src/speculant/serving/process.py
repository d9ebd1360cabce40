"""Settings of a process that serves."""

from __future__ import annotations

import gc
import sys

_SWITCH = 0.5e-3  # seconds for which busy threads make another one wait: requests without end would delay all steps


def settle() -> None:
    """Prepare the process once its engine is loaded: collections that examine loaded objects would delay requests."""
    sys.setswitchinterval(_SWITCH)
    gc.collect()
    gc.freeze()
