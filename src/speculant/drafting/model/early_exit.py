"""The target's own first layers, its final norm and its output head draft for the whole target (arXiv 2404.16710).

Nothing is trained and no weights are added. How much is accepted depends on the target: models that were trained to
exit early draft well, others poorly.

Memory: a KV cache of the first layers. Cost: `layers` of the target's layers and its output head for each drafted
token; a chain is one native call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.folder import require_target
from speculant.drafting.model.drafter import ModelDrafter, make_drafter
from speculant.drafting.topology import growing_tree_option
from speculant.errors import ConfigError
from speculant.models.base import CausalLM
from speculant.models.heads import Truncatable

METHOD = Method(default_length=3, on_request=False)
SHARE = 4  # the usual number of layers is the target's over this


@dataclass(frozen=True)
class EarlyExitOptions:
    """layers: how many of the target's layers draft; None = a quarter of them. tree: as of a draft model."""

    layers: Any = None
    tree: Any = None


def build(context: DrafterContext) -> ModelDrafter:
    """Take the first layers of the target; raises ConfigError for a number that it does not have."""
    options = read_options(context, EarlyExitOptions)
    topology = growing_tree_option(context, options.tree)
    return make_drafter(context, first_layers(require_target(context.target), options.layers), topology)


def first_layers(target: CausalLM, given: object) -> CausalLM:
    """Return the target's first layers as a model."""
    if not isinstance(target, Truncatable):
        raise ConfigError("this target's backend can't run its first layers alone", "choose another method.")
    layers = max(1, target.num_layers // SHARE) if given is None else given
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers < target.num_layers:
        raise ConfigError(
            f"layers={layers!r} of a target with {target.num_layers}", f"use 1 to {target.num_layers - 1}."
        )
    return target.truncated(layers)
