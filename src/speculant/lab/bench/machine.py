"""The machine on which figures were measured."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Return what the figures of two runs must have in common to be compared."""
    return {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
