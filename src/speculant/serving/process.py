"""A process that serves: its settings, and the application with its engine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from speculant.engine import AsyncEngine
    from speculant.serving.options import ServerOptions

_SWITCH = 0.5e-3  # seconds for which busy threads make another one wait: requests without end would delay all steps


def load_engine(values: Mapping[str, Any]) -> AsyncEngine:
    """Load the engine of a process that serves. values: its arguments. Raises the errors of `AsyncEngine`.

    Torch is imported here, so that its threads start on the cores that the process has by now.
    """
    from speculant.engine import AsyncEngine

    engine = AsyncEngine(**values)
    sys.setswitchinterval(_SWITCH)
    gc.collect()
    gc.freeze()  # collections that examine loaded objects would delay requests
    return engine


def load_app(values: Mapping[str, Any], options: ServerOptions, names: Sequence[str]) -> FastAPI:
    """Return an application whose engine is loaded. names: the model's names for clients."""
    engine = load_engine(values)
    from speculant.serving.app import make_app

    return make_app(engine, options, names)
