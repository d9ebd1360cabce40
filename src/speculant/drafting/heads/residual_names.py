"""The names of residual heads' tensors, in the forms of the files.

    {head}.{layer}.linear.{weight, bias}, {head}.{layers}.weight     ours and the hub's, possibly below medusa_head.
    blocks.{head}.layers.{layer}.{weight, bias}, lm_heads.{head}.weight, lm_head.weight, token_map     vLLM's

vLLM's `lm_head` is the target's output head, which all heads share. So is the only one of `lm_heads` where config.json
has `original_lm_head`. `token_map` has the target's id of each row of the heads' own output heads.
"""

from __future__ import annotations

import re

from speculant.drafting.heads.folder import HeadFolder
from speculant.models.base import CausalLM

TOKEN_MAP = "token_map"
_WITHIN = re.compile(r"medusa_heads?\.(?=\d|blocks\.|lm_head|token_map)")
_BLOCK = re.compile(r"blocks\.(\d{1,4})\.layers\.(\d{1,4})\.(weight|bias)")
_OUTPUT = re.compile(r"lm_heads\.(\d{1,4})\.weight")


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
