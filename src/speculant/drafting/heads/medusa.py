"""Medusa: residual blocks on the target's last hidden state, one head for each further token (arXiv 2401.10774).

A draft is a tree: the product of the heads' likeliest tokens, whose shape follows how often each rank was right in
training, or a configured one. Sampled requests draw its nodes from the heads' distributions.

The head's folder has config.json and safetensors, in our own form, in Medusa's form on the hub, or in vLLM's:

    {head}.{layer}.linear.{weight, bias}, {head}.{layers}.weight     ours and the hub's, possibly below medusa_head.
    blocks.{head}.layers.{layer}.{weight, bias}, lm_heads.{head}.weight, lm_head.weight, token_map     vLLM's

Each head may have an output head of its own; else the target's serves all heads. vLLM's `lm_head` is the target's. So
is the only one of `lm_heads` where config.json has `original_lm_head`. `token_map` has the target's id of each row of
the heads' own output heads.

Memory: one state per sequence, and the heads' weights. Cost: the blocks, and the output heads, of one row per head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from speculant.drafting.base import DrafterContext, Method, read_options, require_no_stop
from speculant.drafting.heads.folder import HeadFolder, HeadParts, Part, Renamed, Role, require_target
from speculant.drafting.heads.future import MOST_HEADS, UNKNOWN, FutureDrafter, OwnHeads, bounded, product_tree
from speculant.drafting.heads.short import short_heads, short_tokens, spread_heads
from speculant.drafting.topology import StaticTree, read_tree
from speculant.errors import ConfigError, ModelError
from speculant.models import CausalLM, FutureShape, PlacedHeads, ResidualHeads, is_whole, linears_of, show

KIND = "medusa"
CHAIN = "chain"
TOKEN_MAP = "token_map"
_WITHIN = re.compile(r"medusa_heads?\.(?=\d|blocks\.|lm_head|token_map)")
_BLOCK = re.compile(r"blocks\.(\d{1,4})\.layers\.(\d{1,4})\.(weight|bias)")
_OUTPUT = re.compile(r"lm_heads\.(\d{1,4})\.weight")
METHOD = Method(default_length=8, uses_model=True, uses_head=True)
HEAD = HeadParts({
    r"\d+\.\d+\.linear\.weight": Part(Role.BETWEEN),
    r"\d+\.\d+\.linear\.bias": Part(Role.STATE),
    r"\d+\.\d+\.weight": Part(Role.OUTPUT),
})  # fmt: skip


@dataclass(frozen=True)
class MedusaOptions:
    """tree: "chain", children per node at each depth as [3, 2, 1], or the ranks on the way to every node.

    None = the nodes that were right most often in training.
    head_tokens: the file of a short output head, see drafting/heads/short.py; None = the folder's, or all tokens.
    """

    tree: Any = None
    head_tokens: Any = None


def build(context: DrafterContext) -> FutureDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, MedusaOptions)
    require_no_stop(context)
    target = require_target(context.target.model)
    folder = HeadFolder.open(str(context.model), KIND)
    heads, own_heads = load(folder, target)
    if tokens := short_tokens(options.head_tokens, folder, target):
        if own_heads is not None:
            raise ConfigError("head_tokens is given, and these heads have output heads of their own", "leave it out.")
        own_heads = short_heads(target, tokens)
    tree = choose_tree(options.tree, folder.config, heads.shape.num_heads)
    topology = bounded(tree, heads.shape.num_heads, context.target.vocab_size)
    nodes = METHOD.default_length
    return FutureDrafter(heads, target, context.chances, topology, context.target.sampler, own_heads, nodes)


def load(folder: HeadFolder, target: CausalLM) -> tuple[PlacedHeads, OwnHeads | None]:
    """Read the heads, and their own output heads if they have some."""
    folder.check_sizes(target)
    weights = Renamed(folder, residual_names(folder))
    tokens = read_token_map(folder, target)
    with torch.device("meta"):  # heads that do not fit take no memory
        found = ResidualHeads(_shape_in(weights, target, tokens))
    weights.check(found.stored(), KIND)
    shape = found.shape
    own = [f"{head}.{shape.num_layers}.weight" for head in range(shape.num_heads)] if shape.vocab_size else []
    found.to_empty(device="cpu")
    found.load({name: weights.read(name) for name in weights.names() if name not in own})
    return found.on(target), _own_heads(weights, own, target, tokens)


def _own_heads(weights: Renamed, own: Sequence[str], target: CausalLM, tokens: tuple[int, ...]) -> OwnHeads | None:
    """Return the function of the heads' own output heads; tokens: of a short head, or of the target's rows."""
    if not own:
        return short_heads(target, sorted(tokens)) if tokens else None
    of = target.cache_shape
    multiply = linears_of(target, [weights.read(name).to(of.device, of.dtype) for name in own])
    if not tokens:
        return multiply
    index = torch.tensor(tokens, device=of.device)
    return lambda states: spread_heads(multiply(states), index, target.vocab_size)


def _shape_in(weights: Renamed, target: CausalLM, tokens: tuple[int, ...]) -> FutureShape:
    """Return the sizes by the tensors' names. Raises ModelError for no head, or fewer than in config.json.

    Published configs name fewer heads than their files have.
    """
    places = [re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.linear\.weight", name) for name in weights.names()]
    pairs = [(int(hit[1]), int(hit[2])) for hit in places if hit]
    folder = weights.source
    if not pairs:
        raise ModelError(
            f"{folder.folder} has no tensors such as 0.0.linear.weight, but {show(sorted(folder.names())[:6])}",
            f"name the method that it was trained for; it is no head of the kind {KIND!r}.",
        )
    num_heads, num_layers = 1 + max(head for head, _ in pairs), 1 + max(layer for _, layer in pairs)
    if max(num_heads, num_layers) > MOST_HEADS:
        raise ModelError(
            f"the weights in {folder.folder} are named as {num_heads} heads of {num_layers} layers, and the most is"
            f" {MOST_HEADS}",
            "download them again, or train a head.",
        )
    _check_said(folder, "medusa_num_heads", num_heads, most=True)
    _check_said(folder, "medusa_num_layers", num_layers)
    return FutureShape(
        num_heads, target.hidden_size, num_layers,
        vocab_size=_rows(weights, f"0.{num_layers}.weight", target, tokens),
        biased=any(name.endswith(".bias") for name in weights.names()),
    )  # fmt: skip


def _check_said(folder: HeadFolder, key: str, number: int, most: bool = False) -> None:
    """Check a number in config.json, if there is one; most: it may also be lower. Raises ModelError."""
    said = folder.config.get(key, number)
    if said != number and not (most and is_whole(said) and 0 < said < number):
        raise ModelError(
            f"config.json in {folder.folder} says {key} = {show(said)}, and the weights are of {number}",
            "use the config.json that belongs to these weights, or download them again.",
        )


def _rows(weights: Renamed, name: str, target: CausalLM, tokens: Sequence[int]) -> int | None:
    """Return how many rows an own output head must have: one per token, or per entry of `tokens`; None = no head."""
    if name not in weights.names():
        return None
    return len(tokens) or target.vocab_size


def choose_tree(given: Any, config: dict[str, Any], num_heads: int) -> StaticTree:
    """Return the configured tree, a chain, or the product of the ranks' measured shares."""
    if given == CHAIN:
        return StaticTree.of_widths([1] * num_heads)
    tree = read_tree(given)
    if tree is not None:
        return tree
    shares = config.get("rank_shares") or [UNKNOWN] * num_heads
    if not _are_shares(shares):
        raise ModelError(
            f"config.json has rank_shares = {show(shares)}, not a list of shares from 0 to 1 for each head",
            "remove rank_shares, or train the head again.",
        )
    return product_tree(shares[:num_heads])


def _are_shares(shares: object) -> bool:
    if not isinstance(shares, list) or not shares:
        return False
    return all(
        isinstance(own, list | tuple)
        and len(own) > 0
        and all(isinstance(share, int | float) and 0 <= share <= 1 for share in own)
        for own in shares
    )


def residual_names(folder: HeadFolder) -> dict[str, str]:
    """Return the folder's name of each tensor, by our name; in a file of a whole model, of the heads' tensors alone."""
    found = {_WITHIN.sub("", name, count=1): name for name in _own_names(folder)}
    layers = [int(hit[2]) for hit in map(_BLOCK.fullmatch, found) if hit]
    if not layers:
        return found
    names = {_renamed(name, 1 + max(layers)): stored for name, stored in found.items()}
    shared = bool(folder.config.get("original_lm_head"))
    dropped = {"lm_head.weight", TOKEN_MAP, *([f"0.{1 + max(layers)}.weight"] if shared else [])}
    return {name: stored for name, stored in names.items() if name not in dropped}


def read_token_map(folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the target's id of each row of the heads' own output heads; () = all, in order. Raises PairError."""
    stored = next((name for name in folder.names() if _WITHIN.sub("", name, count=1) == TOKEN_MAP), None)
    if stored is None:
        return ()
    tokens: list[int] = folder.read(stored).flatten().long().tolist()
    folder.check_tokens(stored, tokens, target)
    return tuple(tokens)


def _own_names(folder: HeadFolder) -> list[str]:
    """Return the names below `medusa_head.` if there are some, else all."""
    below = [name for name in folder.names() if _WITHIN.match(name)]
    return below or list(folder.names())


def _renamed(name: str, num_layers: int) -> str:
    if block := _BLOCK.fullmatch(name):
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    if output := _OUTPUT.fullmatch(name):
        return f"{output[1]}.{num_layers}.weight"
    return name
