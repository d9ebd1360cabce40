"""A small model that drafts all tokens in one pass, because it was trained to read masks: PARD (arXiv 2504.18583).

Its config.json names the mask token as `pard_token`, as in AMD's checkpoints. `speculant train draft --parallel` makes
such a model from a draft model. See drafting/model/drafter.py for the pass.

Memory: a KV cache, as for any draft model. Cost: one pass of the model, with a row for each drafted token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.short import read_head_tokens
from speculant.drafting.model.drafter import USUAL_LENGTH, ModelDrafter, make_one_pass, mask_of
from speculant.drafting.topology import tree_option
from speculant.errors import PairError
from speculant.models import MASK

METHOD = Method(default_length=USUAL_LENGTH, uses_model=True, reads_masks=True)


@dataclass(frozen=True)
class ParallelOptions:
    """tree, head_tokens: as of a draft model."""

    tree: Any = None
    head_tokens: Any = None


def build(context: DrafterContext) -> ModelDrafter:
    """Load the draft checkpoint and give it a cache of its own. Raises PairError for one without a mask token."""
    options = read_options(context, ParallelOptions)
    topology = tree_option(context, options.tree)
    model = context.models.load(str(context.model), read_head_tokens(options.head_tokens))
    if mask_of(model) is None:
        raise PairError(
            f"the draft model {context.model} has no mask token: its config.json has no {MASK!r}",
            'use a PARD model (`speculant train draft --parallel` makes one), or the method "draft_model".',
        )
    return make_one_pass(context, model, topology)
