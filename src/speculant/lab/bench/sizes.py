"""How large models are, from their configs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speculant import plugins
from speculant.config import EngineConfig
from speculant.engine import Runtime
from speculant.models import DecoderConfig, parameters, read_model_config, resolve_source, values_per_position


@dataclass(frozen=True)
class Size:
    """parameters: of the checkpoint's files. values_per_token: keys and values in the cache for one position."""

    parameters: int
    values_per_token: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Size:
        """Return the size of the model that a config.json describes."""
        decoder: DecoderConfig = plugins.load("speculant.models", config["model_type"]).read_config(config)
        return cls(parameters(decoder), values_per_position(decoder))


def memory(config: EngineConfig, runtime: Runtime) -> dict[str, float]:
    """Return the sizes of the target and the draft model: parameters, and the shares that the draft model adds.

    The shares are the memory overhead (docs/references.md, metrics) where both models have weights of one type. Other
    drafters add no parameters.
    """
    target = Size.of(runtime.checkpoint.config)
    spec = config.speculative()
    named = spec.model if spec and runtime.drafting else None
    draft = Size.of(read_model_config(resolve_source(named, "draft"))) if named else Size(0, 0)
    return {
        "target_parameters": target.parameters,
        "draft_parameters": draft.parameters,
        "parameters_share": draft.parameters / target.parameters,
        "cache_share": draft.values_per_token / target.values_per_token,
    }
