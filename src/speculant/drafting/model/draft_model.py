"""A small model that drafts a chain token by token (arXiv 2211.17192), or a tree level by level (arXiv 2305.09781).

A model that was trained to read masks drafts in one pass instead: see drafting/model/drafter.py.

For a beam search it drafts continuations of the target's beams, with a wider beam (arXiv 2211.17192, A.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.short import read_head_tokens
from speculant.drafting.model.drafter import ModelDrafter, make_drafter, make_one_pass
from speculant.drafting.topology import growing_tree_option
from speculant.errors import ConfigError

ENCODERS = OWN, TARGET = "own", "target"
METHOD = Method(default_length=5, uses_model=True)  # docs/references.md, configuration


@dataclass(frozen=True)
class DraftModelOptions:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain.

    It may also be "dynamic", or {"topk": 3, "depth": 6} with other numbers: see drafting/growth.py.
    head_tokens: the file of a short head, see drafting/heads/short.py; None = all tokens can be drawn.
    parallel: False = a model that could draft in one pass drafts token by token. encoder: "own", or "target" = an
    encoder-decoder draft model reads the results of the target's encoder, and its own encoder does not run.
    """

    tree: Any = None
    head_tokens: Any = None
    parallel: bool = True
    encoder: str = OWN

    def __post_init__(self) -> None:
        if self.encoder not in ENCODERS:
            raise ConfigError(f"encoder={self.encoder!r} is unknown", f"use {' or '.join(map(repr, ENCODERS))}.")


def build(context: DrafterContext) -> ModelDrafter:
    """Load the draft checkpoint and give it a cache of its own."""
    options = read_options(context, DraftModelOptions)
    topology = growing_tree_option(context, options.tree)
    model = context.models.load(str(context.model), read_head_tokens(options.head_tokens))
    make = make_one_pass if options.parallel else make_drafter
    drafter = make(context, model, topology)
    if options.encoder == TARGET:
        drafter.read_encoder(context.target.model)
    return drafter
