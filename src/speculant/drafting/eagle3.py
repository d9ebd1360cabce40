"""EAGLE-3: a decoder layer over the states of three of the target's layers (arXiv 2503.01840).

The three states of a token are mapped to one, g. The layer attends over [norm(embedding of the next token); norm(g)];
behind the first drafted token it takes its own output in g's place. Its output head knows `draft_vocab_size` tokens
where the file has d2t, an offset for each of them: token i of the head is token i + d2t[i] of the target.

The head's folder has config.json and safetensors, as on the hub or as the `speculators` package writes them. Embedding
and output head are the target's where the file has none.

Memory: the head's weights, and a KV cache of its layers. Cost: a pass of the layer and of its output head for each
drafted token; a chain is one native call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.growth.hidden_drafter import HiddenDrafter
from speculant.drafting.growth.hidden_runner import Encode
from speculant.drafting.heads.folder import HeadFolder, Renamed, require_target
from speculant.drafting.heads.layers import load_layers, make_drafter, read_sizes, renamed
from speculant.drafting.heads.parts import LAYER_PARTS, HeadParts, Part, Role
from speculant.errors import ModelError, PairError
from speculant.models.base import CausalLM
from speculant.models.fields import flag, is_whole, show
from speculant.models.heads import Entry, HeadConfig, usual_taps

KIND = "eagle3"
METHOD = Method(default_length=4, uses_model=True)
ENCODER = "encoder.weight"  # fc in the files
NUM_STATES = 3
LAYERS = "eagle_aux_hidden_state_layer_ids"
TOKEN_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class Options:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain."""

    tree: Any = None


def build(context: DrafterContext) -> HiddenDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, Options)
    target = require_target(context.target)
    folder = HeadFolder.open(str(context.model), KIND)
    layers = read_layers(folder, target)
    model, encode = load(folder, target)
    return make_drafter(context, model, layers, encode, options.tree)


def read_layers(folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the target's layers whose inputs the head takes in: those of config.json, else 2, L // 2 and L - 3."""
    named, size = named_layers(folder), target.num_layers
    layers = list(usual_taps(size)) if named is None else named
    if (
        not isinstance(layers, list)
        or len(layers) != NUM_STATES
        or not all(is_whole(layer) and 0 <= layer <= size for layer in layers)
    ):
        raise PairError(
            f"the head in {folder.folder} takes in the layers {show(layers)}, and the target has 0 to {size}",
            f"use a head of this target, or name its three layers as {LAYERS} in config.json.",
        )
    return tuple(layers)


def named_layers(folder: HeadFolder) -> Any:
    """Return the layers that config.json names; None = it names none."""
    eagle, named = folder.config.get("eagle_config"), folder.config.get(LAYERS)
    return eagle.get(LAYERS) if named is None and isinstance(eagle, dict) else named


def require_named_layers(folder: HeadFolder) -> None:
    """Check that the layers do not depend on how many the target has. Raises ModelError."""
    if named_layers(folder) is None:
        raise ModelError(
            f"config.json in {folder.folder} does not name the target's layers whose inputs the head takes in",
            f"add them as {LAYERS}: 2, L // 2 and L - 3 of the L layers of its target.",
        )


def load(folder: HeadFolder, target: CausalLM) -> tuple[CausalLM, Encode]:
    """Read the head, and what maps three states to one."""
    weights = renamed(folder, rename)
    names = weights.names()
    sizes = replace(read_sizes(folder.config, names, target), head_tokens=read_tokens(folder, target))
    if flag(folder.config, "norm_before_fc"):
        raise ModelError(
            f"config.json in {folder.folder} has norm_before_fc, which is not supported", "use another head."
        )
    config = HeadConfig(
        sizes,
        Entry.ATTENTION,
        norm_before_residual=flag(folder.config, "norm_before_residual"),
        norm_output=flag(folder.config, "norm_output"),
        own_table="embed_tokens" in names,
        own_head="lm_head.weight" in names,
    )
    check_shared(folder, config, target)
    if not config.own_head:
        config = replace(config, decoder=replace(sizes, head_tokens=()))
    shape = (sizes.hidden_size, NUM_STATES * target.hidden_size)
    model = load_layers(config, weights, target, KIND, encoder_weight=shape)
    return model, encoder(weights, target)


def check_shared(folder: HeadFolder, config: HeadConfig, target: CausalLM) -> None:
    """Check that a head that uses the target's embedding or output head has states of their width."""
    size = config.decoder.hidden_size
    if size != target.hidden_size and not (config.own_table and config.own_head):
        raise PairError(
            f"the head in {folder.folder} has states of {size} and no embedding or output head of its own,"
            f" and the target's are of {target.hidden_size}",
            "use a head that was trained for this target.",
        )


def encoder(weights: Renamed, target: CausalLM) -> Encode:
    """Return what maps the states of three layers, [n, hidden] each, to one."""
    of = target.cache_shape
    matrix = weights.read(ENCODER).to(of.device, of.dtype)

    def encode(hidden: Sequence[Tensor]) -> Tensor:
        return functional.linear(torch.cat(tuple(hidden), dim=-1).to(of.dtype), matrix)

    return encode


def read_tokens(folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the target's id of each token of the head's output head; () = it knows all, in order. Raises PairError."""
    if "d2t" not in folder.names():
        return ()
    offsets = folder.read("d2t").long()
    tokens = (offsets + torch.arange(len(offsets))).tolist()
    if min(tokens) < 0 or max(tokens) >= target.vocab_size or len(set(tokens)) < len(tokens):
        raise PairError(
            f"d2t in {folder.folder} maps to the tokens {min(tokens)} to {max(tokens)}, {len(set(tokens))} of them"
            f" different, and the target has {target.vocab_size}",
            "use a head that was trained for this target.",
        )
    return tuple(tokens)


RENAMED: Mapping[str, str | None] = {
    "fc.weight": ENCODER, "embed_tokens.weight": "embed_tokens", **dict.fromkeys(TOKEN_MAPS),
    "midlayer.hidden_norm.weight": "hidden_norm.weight", "layers.0.hidden_norm.weight": "hidden_norm.weight",
}  # fmt: skip


def rename(name: str) -> str | None:
    """Return the model's name of a tensor."""
    if name in RENAMED:
        return RENAMED[name]
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


HEAD = HeadParts(
    {
        r"encoder\.weight": Part(Role.BETWEEN, NUM_STATES),
        r"layers\.0\.self_attn\.[qkv]_proj\.weight": Part(Role.READER, streams=2),
        r"embed_tokens": Part(Role.TABLE),
        r"lm_head\.weight": Part(Role.OUTPUT),
        r"(hidden_)?norm\.weight": Part(Role.STATE),
        "|".join(TOKEN_MAPS): Part(Role.TOKENS),
        **LAYER_PARTS,
    },
    lambda name: name if name in TOKEN_MAPS else rename(name),
    require_named_layers,
)
