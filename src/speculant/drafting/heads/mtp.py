"""Multi-token prediction: a head that was trained with its target (arXiv 2412.19437, section 2.2).

A matrix maps a token's normalized embedding and the target's normalized state before it to the input of a decoder
layer, and a final norm follows the layer. After the first drafted token the head reads its own output in place of the
target's state, as EAGLE does. Where a target has several such modules, the first one drafts all tokens.

The folder may be the target's own. Names of the tensors, possibly with the prefix `model.`:

    mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}      the `speculators` package, MiMo
    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0            Qwen
    layers.L.{enorm, hnorm, eh_proj, shared_head.norm, shared_head.head}               DeepSeek; the target has L layers

The columns of the matrix for the embedding come first; in MiMo's files they come last. Qwen's norms add one to the
stored scales. For the next token, DeepSeek's head reads its state before the final norm, and the other heads read
the state after it. The embedding is the target's. So is the output head, unless the file has `shared_head.head`.

Memory: the head's weights, and a KV cache of its layer. Cost: a pass of the layer and of the output head for each
drafted token; a chain is one native call.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.folder import SPECULATORS, HeadFolder, Renamed, require_target
from speculant.drafting.heads.hidden_drafter import HiddenDrafter, make_head_drafter, newest
from speculant.drafting.heads.layers import load_layers, read_sizes, renamed
from speculant.errors import ModelError
from speculant.models.base import CausalLM
from speculant.models.description import DecoderConfig
from speculant.models.heads import HeadConfig, StateEntry
from speculant.models.weights.source import WeightSource, read_plain

KIND = "mtp"
METHOD = Method(default_length=3, uses_model=True, uses_head=True)
MATRIX, QWEN = "fc.weight", "mtp."
PARTS = {
    "token_layernorm": "token_norm", "pre_fc_norm_embedding": "token_norm", "enorm": "token_norm",
    "hidden_layernorm": "hidden_norm", "pre_fc_norm_hidden": "hidden_norm", "hnorm": "hidden_norm",
    "input_proj": "fc", "fc": "fc", "eh_proj": "fc",
    "final_layernorm": "norm", "norm": "norm", "shared_head.norm": "norm", "shared_head.head": "lm_head",
}  # fmt: skip


@dataclass(frozen=True)
class MtpOptions:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain."""

    tree: Any = None


@dataclass(frozen=True)
class StateFirst:
    """A source whose matrix has the columns for a state before those for an embedding; they change places."""

    source: WeightSource

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self.source.shape(name)

    def kind(self, name: str) -> str:
        """See `WeightSource.kind`."""
        return self.source.kind(name)

    def read(self, name: str) -> Any:
        """See `WeightSource.read`."""
        if name != MATRIX:
            return self.source.read(name)
        return torch.cat(read_plain(self.source, name).chunk(2, dim=1)[::-1], dim=1)


def build(context: DrafterContext) -> HiddenDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, MtpOptions)
    target = require_target(context.target)
    model = load(HeadFolder.open(str(context.model), KIND, among=True), target)
    return make_head_drafter(context, model, (target.num_layers + 1,), newest, options.tree)


def load(folder: HeadFolder, target: CausalLM) -> CausalLM:
    """Read the head from its own folder or from the target's."""
    behind, weights = f"layers.{target.num_layers}.", renamed(folder, lambda name: rename(name, target.num_layers))
    names = weights.names()
    if MATRIX not in names:
        raise ModelError(
            f"{folder.folder} has no head for multi-token prediction: no mtp_layers.0, mtp or {behind}eh_proj",
            "name the folder of a checkpoint that has one.",
        )
    sizes = read_sizes(folder.config, names, target)
    config = HeadConfig(
        _with_offset(sizes) if weights.stored[MATRIX].startswith(QWEN) else sizes,
        StateEntry.NORMED,
        norm_output=not any(name.startswith(behind) for name in weights.stored.values()),
        own_head="lm_head.weight" in names,
    )
    return load_layers(config, weights, target, KIND, around=StateFirst if _state_first(folder, weights) else None)


def _with_offset(sizes: DecoderConfig) -> DecoderConfig:
    """Return the sizes with norms whose stored scales are those minus one."""
    norm = replace(sizes.norm, offset=1.0)
    layers = [
        replace(
            layer,
            attention=replace(layer.attention, qk_norm=layer.attention.qk_norm and norm),
            before_attention=norm,
            before_mlp=norm,
        )
        for layer in sizes.layers
    ]
    return replace(sizes, norm=norm, layers=tuple(layers))


def _state_first(folder: HeadFolder, weights: Renamed) -> bool:
    return weights.stored[MATRIX].startswith("mtp_layers.") and SPECULATORS not in folder.config


def rename(name: str, num_layers: int) -> str | None:
    """Return the model's name of a tensor, for a target of `num_layers` layers; None = it is not the head's."""
    found = re.fullmatch(rf"(?:mtp_layers\.0|mtp|layers\.{num_layers})\.(?:layers\.0\.)?(.+?)(\.weight|\.bias)", name)
    if found is None:
        return None
    part, kind = found.groups()
    within = name.startswith(f"{QWEN}layers.")
    if part in PARTS and not within:
        return f"{PARTS[part]}{kind}"
    return None if part == "embed_tokens" else f"layers.0.{part}{kind}"
