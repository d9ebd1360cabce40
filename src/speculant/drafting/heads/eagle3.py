"""EAGLE-3: a decoder layer over the states of three of the target's layers (arXiv 2503.01840).

A matrix maps the three states of a token to one, g. Some files have norms before it: one of all three, or one of each.
The layer attends over [norm(embedding of the next token); norm(g)]; after the first drafted token it takes its own
output in place of g. If the file has d2t, the output head predicts `draft_vocab_size` tokens: token i of the head is
token i + d2t[i] of the target.

The head's folder has config.json and safetensors, as on the hub or as the `speculators` package writes them. Embedding
and output head are the target's where the file has none.

Memory: the head's weights, and a KV cache of its layers. Cost: a pass of the layer and of its output head for each
drafted token; a chain or tree is one native call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.folder import LAYER_PARTS, HeadFolder, HeadParts, Part, Role
from speculant.drafting.heads.hidden import Encode, HiddenDrafter
from speculant.drafting.heads.page import (
    NUM_STATES,
    TOKEN_MAPS,
    build_head,
    load_head,
    rename_three,
    require_named_layers,
    three_states,
)
from speculant.models import CausalLM

METHOD = Method(default_length=4, uses_model=True, uses_head=True)
PAGE = three_states("eagle3")


@dataclass(frozen=True)
class Eagle3Options:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain.

    It may also be "dynamic", or {"topk": 3, "depth": 6} with other numbers: see drafting/growth.py.
    """

    tree: Any = None


def build(context: DrafterContext) -> HiddenDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    return build_head(PAGE, context, read_options(context, Eagle3Options).tree)


def load(folder: HeadFolder, target: CausalLM) -> tuple[CausalLM, Encode]:
    """Read the head, and its map from three states to one."""
    return load_head(PAGE, folder, target)


HEAD = HeadParts(
    {
        r"encoder\.weight": Part(Role.BETWEEN, NUM_STATES),
        r"encoder\.norm\.weight": Part(Role.STATE, NUM_STATES),
        r"encoder\.norm\.\d\.weight": Part(Role.STATE),
        r"layers\.0\.self_attn\.[qkv]_proj\.weight": Part(Role.READER, streams=2),
        r"embed_tokens": Part(Role.TABLE),
        r"lm_head\.weight": Part(Role.OUTPUT),
        r"(hidden_)?norm\.weight": Part(Role.STATE),
        "|".join(TOKEN_MAPS): Part(Role.TOKENS),
        **LAYER_PARTS,
    },
    lambda name: name if name in TOKEN_MAPS else rename_three(name),
    require_named_layers,
)
