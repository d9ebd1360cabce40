"""mBART: BART with norms before the blocks and after all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.description import DecoderConfig
from speculant.models.families.bart import NORM, describe


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an mBART config.json."""
    return describe(hf, embedding={"norm": NORM}, norms_first=True)
