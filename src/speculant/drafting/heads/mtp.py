"""Multi-token prediction: a head that was trained with its target (arXiv 2412.19437, section 2.2).

A matrix maps a token's normalized embedding and the target's normalized state before it to the input of a decoder
layer, and a final norm follows the layer. After the first drafted token the head reads its own output in place of the
target's state, as EAGLE does.

If there are several modules, each drafts one token: see drafting/heads/chained.py. Trees are drawn by the first module.

The folder may be the target's own. Names of the tensors of module m, possibly with the prefix `model.`:

    mtp_layers.m.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}      the `speculators` package, MiMo
    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.m            Qwen: modules share the rest
    layers.L+m.{enorm, hnorm, eh_proj, shared_head.norm, shared_head.head}             DeepSeek; the target has L layers

The columns of the matrix for the embedding come first; in MiMo's files they come last. Qwen's norms add one to the
stored scales. For each further token, DeepSeek's head reads its own state before the final norm, and the other heads
read their state after it. The embedding is the target's. So is the output head, unless the file has `shared_head.head`.

Memory: the weights, and a KV cache for each module. Cost: a pass of the layer and of the output head for each drafted
token; a chain or tree of one module is one native call.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import override

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.chained import ChainedDrafter, ModuleRunner
from speculant.drafting.heads.folder import SPECULATORS, HeadFolder, Renamed, require_target
from speculant.drafting.heads.hidden_drafter import HiddenDrafter, make_head_drafter, newest
from speculant.drafting.heads.layers import load_layers, read_sizes, renamed
from speculant.errors import ModelError
from speculant.models.base import CausalLM
from speculant.models.description import DecoderConfig
from speculant.models.entries import count, text_config
from speculant.models.heads import HeadConfig, StateEntry
from speculant.models.weights.source import WeightSource, read_plain

KIND = "mtp"
METHOD = Method(default_length=3, uses_model=True, uses_head=True)
MATRIX, LAYER, QWEN = "fc.weight", "layers.0.self_attn.o_proj.weight", "mtp."
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # keys of config.json
PARTS = {
    "token_layernorm": "token_norm", "pre_fc_norm_embedding": "token_norm", "enorm": "token_norm",
    "hidden_layernorm": "hidden_norm", "pre_fc_norm_hidden": "hidden_norm", "hnorm": "hidden_norm",
    "input_proj": "fc", "fc": "fc", "eh_proj": "fc",
    "final_layernorm": "norm", "norm": "norm", "shared_head.norm": "norm", "shared_head.head": "lm_head",
}  # fmt: skip


@dataclass(frozen=True)
class MtpOptions:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain.

    It may also be "dynamic", or {"topk": 3, "depth": 6} with other numbers: see drafting/growth.py.
    """

    tree: Any = None


@dataclass(frozen=True)
class StateFirst(WeightSource):
    """A source whose matrix has the columns for a state before those for an embedding; they change places."""

    source: WeightSource

    @override
    def names(self) -> Collection[str]:
        return self.source.names()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    @override
    def kind(self, name: str) -> str:
        return self.source.kind(name)

    @override
    def read(self, name: str) -> Any:
        if name != MATRIX:
            return self.source.read(name)
        return torch.cat(read_plain(self.source, name).chunk(2, dim=1)[::-1], dim=1)


def build(context: DrafterContext) -> HiddenDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, MtpOptions)
    target = require_target(context.target)
    folder, layers = HeadFolder.open(str(context.model), KIND, among=True), (target.num_layers + 1,)
    number = count_modules(folder, target.num_layers)
    if number == 1 or options.tree is not None:
        return make_head_drafter(context, load(folder, target), layers, newest, options.tree)
    modules = [
        ModuleRunner.of(context, load(folder, target, module), encode=newest, shift=1 + module)
        for module in range(number)
    ]
    return ChainedDrafter(modules, layers, context.vocab_size, context.sampler)


def count_modules(folder: HeadFolder, num_layers: int) -> int:
    """Return how many modules are stored for a target of `num_layers` layers, at most those that config.json names."""
    entries, stored = text_config(folder.config), 1  # the first one is checked when it is read
    while LAYER in {rename(name, num_layers, stored) for name in folder.names()}:
        stored += 1
    return min([stored, *(count(entries, key) for key in COUNTS if entries.get(key))])


def load(folder: HeadFolder, target: CausalLM, module: int = 0) -> CausalLM:
    """Read a module from its own folder or from the target's. Raises ModelError if there is none."""
    behind = f"layers.{target.num_layers + module}."
    weights = renamed(folder, lambda name: rename(name, target.num_layers, module))
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


def rename(name: str, num_layers: int, module: int = 0) -> str | None:
    """Return the model's name of a tensor of a module, for a target of `num_layers` layers; None = it is not of it."""
    outer = rf"mtp_layers\.{module}|layers\.{num_layers + module}|mtp(?:\.layers\.{module})?"
    found = re.fullmatch(rf"(?:{outer})\.(.+?)(\.weight|\.bias)", name)
    if found is None or found[1].startswith("layers."):  # the layer of another module
        return None
    part, kind = found.groups()
    if part in PARTS and not name.startswith(f"{QWEN}layers."):
        return f"{PARTS[part]}{kind}"
    return None if part == "embed_tokens" else f"layers.0.{part}{kind}"
