"""The target's own first layers, its final norm and its output head draft for the whole target (arXiv 2404.16710).

Nothing is trained and no weights are added. How much is accepted depends on the target: models that were trained to
exit early draft well, others poorly.

It uses the target's KV cache (drafting/model/target_cache.py), so there is no backlog.

Memory: none. Cost: `layers` of the target's layers and its output head for each drafted token; a chain or tree is one
native call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.folder import require_target
from speculant.drafting.model.target_cache import TargetCacheDrafter, make_target_drafter
from speculant.drafting.topology import growing_tree_option
from speculant.errors import ConfigError
from speculant.models import CausalLM, Truncatable

METHOD = Method(default_length=3, on_request=False)
SHARE = 4  # the usual number of layers is the target's over this


@dataclass(frozen=True)
class EarlyExitOptions:
    """layers: how many of the target's layers draft; None = a quarter of them.

    tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; "dynamic", or
    {"topk": 3, "depth": 6} with other numbers: see drafting/growth.py; None = a chain.
    """

    layers: Any = None
    tree: Any = None


def build(context: DrafterContext) -> TargetCacheDrafter:
    """Take the first layers of the target; raises ConfigError for a number that it does not have."""
    options = read_options(context, EarlyExitOptions)
    topology = growing_tree_option(context, options.tree)
    target = require_target(context.target.model)
    return make_target_drafter(context, target, first_layers(target, options.layers), topology)


def alternatives(target: CausalLM) -> list[dict[str, Any]]:
    """Return the options that `speculant check-pair` compares: powers of two, a quarter and half of the layers."""
    half = max(1, target.num_layers // 2)
    powers = [2**place for place in range(half.bit_length()) if 2**place <= half]
    return [{"layers": layers} for layers in sorted({*powers, max(1, target.num_layers // SHARE), half})]


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
