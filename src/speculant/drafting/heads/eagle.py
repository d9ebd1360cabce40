"""EAGLE: a decoder layer that continues the target's hidden states (arXiv 2401.15077).

Each row of the layer takes the state of one token and the embedding of the next. Its output approximates the state of
that next token, from which the target's output head predicts. Drafts are chains, static trees or dynamic trees.

The head's folder has config.json and safetensors, as on the hub or as the `speculators` package or vLLM's conversion
writes them. Embedding and output head are the target's.

Memory: the layer's weights, and a KV cache of as many layers. Cost: a pass of the layer and of the target's output head
for each drafted token; a chain or tree is one native call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.folder import HeadFolder, Renamed, require_target
from speculant.drafting.heads.hidden_drafter import HiddenDrafter, make_head_drafter, newest
from speculant.drafting.heads.layers import load_layers, read_sizes, renamed
from speculant.drafting.heads.parts import LAYER_PARTS, HeadParts, Part, Role
from speculant.drafting.heads.short import WithRows, output_cap, output_rows, short_tokens
from speculant.models.base import CausalLM
from speculant.models.description import Head
from speculant.models.heads import HeadConfig, StateEntry, attach, head_shapes

KIND = "eagle"
METHOD = Method(default_length=4, uses_model=True, uses_head=True)
SHARED = ("embed_tokens.weight", "lm_head.weight")  # the target's, which some files repeat
TOKEN_MAP = "token_map"  # of vLLM's form: the target's id of each row of its short output head
NORMS = {"layers.0.input_layernorm.weight": "skip_prenorm", "norm.weight": "skip_output_norm"}


@dataclass(frozen=True)
class EagleOptions:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain.

    It may also be "dynamic", or {"topk": 3, "depth": 6} with other numbers: see drafting/growth.py.
    head_tokens: the file of a short output head, see drafting/heads/short.py; None = the folder's, or all tokens.
    """

    tree: Any = None
    head_tokens: Any = None


def build(context: DrafterContext) -> HiddenDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, EagleOptions)
    target = require_target(context.target)
    folder = HeadFolder.open(str(context.model), KIND)
    model = load(folder, target, short_tokens(options.head_tokens, folder, target))
    return make_head_drafter(context, model, (target.num_layers + 1,), newest, options.tree)


def load(folder: HeadFolder, target: CausalLM, tokens: tuple[int, ...] = ()) -> CausalLM:
    """Read the head; tokens: those that it predicts, () = all."""
    weights = _without_unused_norms(renamed(folder, rename))
    tokens = tokens or tuple(sorted(_mapped_tokens(folder, target)))
    sizes = read_sizes(folder.config, weights.names(), target)
    folder.check_size(sizes.hidden_size, target.hidden_size, "hidden states of")
    folder.check_size(folder.config.get("vocab_size"), target.vocab_size, "a vocabulary of")
    config = HeadConfig(sizes, StateEntry.INPUT, fc_bias="fc.bias" in weights.names())
    if not tokens:
        return load_layers(config, weights, target, KIND)
    weights.check(head_shapes(config, target), KIND)
    own = Head(tokens=tokens, softcap=output_cap(target))
    short = replace(config, decoder=replace(sizes, head=own), own_head=True)
    return attach(target, short, WithRows(weights, output_rows(target, tokens)))


def _without_unused_norms(weights: Renamed) -> Renamed:
    """Leave out the norms that the head skips; vLLM's files have them because their layer is a complete one.

    In this form, config.json has the layer's config under `model`. There, the key of a norm that is used is False.
    """
    inner = weights.source.config.get("model")
    if not isinstance(inner, dict):
        return weights
    unused = {name for name, key in NORMS.items() if inner.get(key) is not False}
    return replace(weights, stored={name: own for name, own in weights.stored.items() if name not in unused})


def _mapped_tokens(folder: HeadFolder, target: CausalLM) -> list[int]:
    """Return the tokens that a file in vLLM's form predicts; [] = all. Raises PairError."""
    if TOKEN_MAP not in folder.names():
        return []
    tokens: list[int] = folder.read(TOKEN_MAP).flatten().long().tolist()
    folder.check_tokens(TOKEN_MAP, tokens, target)
    return tokens


def rename(name: str) -> str | None:
    """Return the model's name of a tensor."""
    if name in (*SHARED, TOKEN_MAP):
        return None
    if name.startswith("fusion_fc."):  # of the `speculators` package
        return name.removeprefix("fusion_")
    return f"layers.0.{name.removeprefix('transformer.')}" if name.startswith("transformer.") else name


HEAD = HeadParts({r"fc\.weight": Part(Role.BETWEEN, streams=2), r"fc\.bias": Part(Role.STATE), **LAYER_PARTS}, rename)
