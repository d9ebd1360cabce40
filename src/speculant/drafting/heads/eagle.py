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
from speculant.drafting.heads.folder import (
    LAYER_PARTS,
    HeadFolder,
    HeadParts,
    Part,
    Renamed,
    Role,
    renamed,
    require_target,
)
from speculant.drafting.heads.hidden import HiddenDrafter
from speculant.drafting.heads.page import HeadPage, last_state, load_head, make_head_drafter, newest
from speculant.drafting.heads.short import ROWS, output_cap, output_rows, short_tokens
from speculant.models import CausalLM, DecoderConfig, Head, StateEntry

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
    target = require_target(context.target.model)
    folder = HeadFolder.open(str(context.model), KIND)
    model = load(folder, target, short_tokens(options.head_tokens, folder, target))
    return make_head_drafter(context, model, last_state(folder, target), newest, options.tree)


def load(folder: HeadFolder, target: CausalLM, tokens: tuple[int, ...] = ()) -> CausalLM:
    """Read the head; tokens: the predicted ones, () = all."""
    weights, head = _without_unused_norms(renamed(folder, rename)), None
    if tokens := tokens or tuple(sorted(_mapped_tokens(folder, target))):
        weights, head = (
            replace(weights, made={ROWS: output_rows(target, tokens)}),
            Head(tokens=tokens, softcap=output_cap(target)),
        )
    return load_head(PAGE, folder, target, weights=weights, head=head)[0]


def _checked(sizes: DecoderConfig, weights: Renamed, target: CausalLM) -> DecoderConfig:
    weights.source.check_size(sizes.hidden_size, target.hidden_size, "hidden states of")
    weights.source.check_size(weights.source.config.get("vocab_size"), target.vocab_size, "a vocabulary of")
    return sizes


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


PAGE = HeadPage(KIND, StateEntry.INPUT, rename, describe=_checked)
HEAD = HeadParts({r"fc\.weight": Part(Role.BETWEEN, streams=2), r"fc\.bias": Part(Role.STATE), **LAYER_PARTS}, rename)
