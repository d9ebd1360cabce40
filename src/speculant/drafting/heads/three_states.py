"""Heads that read the states of three of the target's layers (arXiv 2503.01840): files, and the map to one state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from speculant.drafting.heads.folder import HeadFolder, Renamed
from speculant.drafting.heads.hidden_runner import Encode
from speculant.drafting.heads.layers import load_layers, read_sizes, renamed
from speculant.errors import ModelError, PairError
from speculant.kernels import rms_norm
from speculant.models import CausalLM, HeadConfig, StateEntry, flag, is_whole, linears_of, show, usual_taps

ENCODER = "encoder.weight"  # fc in the files
ENCODER_NORM = "encoder.norm"  # input_norm in the files, or fc_norm.0 and so on
NUM_STATES = 3
LAYERS = "eagle_aux_hidden_state_layer_ids"
TOKEN_MAPS = ("d2t", "t2d")


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


def load_head(
    folder: HeadFolder, target: CausalLM, kind: str, beside: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> tuple[CausalLM, Encode]:
    """Read a head of a kind, and its map from three states to one. beside: names and shapes of its other tensors."""
    weights = renamed(folder, rename)
    names = weights.names()
    sizes = read_sizes(folder.config, names, target).with_head(read_tokens(folder, target))
    config = HeadConfig(
        sizes,
        StateEntry.ATTENTION,
        norm_before_residual=flag(folder.config, "norm_before_residual"),
        norm_output=flag(folder.config, "norm_output"),
        own_table="embed_tokens" in names,
        own_head="lm_head.weight" in names,
    )
    check_shared(folder, config, target)
    if not config.own_head:
        config = replace(config, decoder=sizes.with_head(()))
    norms = encoder_norms(folder, target)
    matrix = (sizes.hidden_size, NUM_STATES * target.hidden_size)
    model = load_layers(config, weights, target, kind, {ENCODER: matrix, **norms, **beside})
    return model, encoder(weights, target, [*norms], sizes.norm.eps)


def encoder_norms(folder: HeadFolder, target: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the norms before the three states are mapped. Raises ModelError for both kinds."""
    of_all, of_each = (flag(folder.config, key) for key in ("norm_before_fc", "fc_norm"))
    if of_all and of_each:
        raise ModelError(
            f"config.json in {folder.folder} has norm_before_fc and fc_norm, which exclude one another",
            "set the one that the head was trained with.",
        )
    if of_all:
        return {f"{ENCODER_NORM}.weight": (NUM_STATES * target.hidden_size,)}
    return {f"{ENCODER_NORM}.{place}.weight": (target.hidden_size,) for place in range(NUM_STATES * of_each)}


def check_shared(folder: HeadFolder, config: HeadConfig, target: CausalLM) -> None:
    """Check that a head that uses the target's embedding or output head has states of their width."""
    size = config.decoder.hidden_size
    if size != target.hidden_size and not (config.own_table and config.own_head):
        raise PairError(
            f"the head in {folder.folder} has states of {size} and no embedding or output head of its own,"
            f" and the target's are of {target.hidden_size}",
            "use a head that was trained for this target.",
        )


def encoder(weights: Renamed, target: CausalLM, norms: Sequence[str], eps: float) -> Encode:
    """Return the map from the states of three layers, [n, hidden] each, to one; norms: none, one of all, or of each."""
    of = target.cache_shape
    matrix, *scales = (weights.read(name).to(of.device, of.dtype) for name in (ENCODER, *norms))
    multiply = linears_of(target, [matrix])

    def encode(hidden: Sequence[Tensor]) -> Tensor:
        states = torch.cat(tuple(hidden), dim=-1)
        if scales:
            parts = states.chunk(len(scales), dim=-1)
            states = torch.cat([rms_norm(*pair, eps) for pair in zip(parts, scales, strict=True)], dim=-1)
        return multiply(states[None])[0]

    return encode


def read_tokens(folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the target's id of each token of the head's output head; () = all, in order. Raises PairError."""
    if "d2t" not in folder.names():
        return ()
    offsets = folder.read("d2t").long()
    tokens = (offsets + torch.arange(len(offsets))).tolist()
    folder.check_tokens("d2t", tokens, target)
    return tuple(tokens)


RENAMED: Mapping[str, str | None] = {
    "fc.weight": ENCODER, "input_norm.weight": f"{ENCODER_NORM}.weight",
    **{f"fc_norm.{place}.weight": f"{ENCODER_NORM}.{place}.weight" for place in range(NUM_STATES)},
    "embed_tokens.weight": "embed_tokens", **dict.fromkeys(TOKEN_MAPS),
    "midlayer.hidden_norm.weight": "hidden_norm.weight", "layers.0.hidden_norm.weight": "hidden_norm.weight",
}  # fmt: skip


def rename(name: str) -> str | None:
    """Return the model's name of a tensor."""
    if name in RENAMED:
        return RENAMED[name]
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
