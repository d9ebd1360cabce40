"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass (arXiv 2602.01469).

The tokens whose states the target has computed have the same rows as in EAGLE-3. After them come mask rows, each with
the embedding of a mask token and a trained state, `mask_hidden`, which is mapped like the target's three states. Mask
row t, counted from 1, predicts the token t places after the next one. See drafting/model/drafter.py for the draws and
the cache.

The head's folder is a folder of EAGLE-3 in the form of the `speculators` package or of vLLM. It also has the tensor
`mask_hidden` [1, 1, 3 * hidden], and config.json names the mask token as `mask_token_id` or `ptd_token_id`.

Memory: the head's weights, and a KV cache of its layers. Cost: one pass of the layers, with a row for each drafted
token, and the output head for these rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.heads.folder import MASK_STATE, MASK_TOKEN, HeadFolder, require_target
from speculant.drafting.heads.hidden import Encode, HiddenDrafter, HiddenStateRunner
from speculant.drafting.heads.page import NUM_STATES, load_head, three_states
from speculant.drafting.model.drafter import USUAL_LENGTH, Mask, OnePass
from speculant.drafting.topology import StaticTree, tree_option
from speculant.models import CausalLM

METHOD = Method(default_length=USUAL_LENGTH, uses_model=True, uses_head=True)
PAGE = three_states("peagle")
TOKENS = ("mask_token_id", MASK_TOKEN)  # keys of config.json


@dataclass(frozen=True)
class ParallelHeadOptions:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain."""

    tree: Any = None


class ParallelHeadDrafter(OnePass, HiddenDrafter):
    """Drafts with the head of `runner`; layers: those whose states it reads."""

    def __init__(
        self,
        runner: HiddenStateRunner,
        layers: tuple[int, ...],
        mask: Mask,
        context: DrafterContext,
        shape: StaticTree | None,
    ) -> None:
        HiddenDrafter.__init__(self, runner, layers, context.target.vocab_size, context.target.sampler, shape)
        self.needs = replace(self.needs, usual_nodes=self.needs.usual_nodes or USUAL_LENGTH)
        self.mask, self.shape = mask, shape


def build(context: DrafterContext) -> ParallelHeadDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, ParallelHeadOptions)
    target, shape = require_target(context.target.model), tree_option(context, options.tree)
    folder = HeadFolder.open(str(context.model), PAGE.kind)
    layers = PAGE.layers(folder, target)
    model, encode = load_head(PAGE, folder, target, {MASK_STATE: (1, 1, NUM_STATES * target.hidden_size)})
    mask = Mask(read_token(folder, target), mask_state(folder, target, encode))
    runner = HiddenStateRunner.of(context, model, encode=encode)
    return ParallelHeadDrafter(runner, layers, mask, context, shape)


def read_token(folder: HeadFolder, target: CausalLM) -> int:
    """Return the mask's token. Raises ModelError for one that the target does not have."""
    token = next((folder.config[key] for key in TOKENS if folder.config.get(key) is not None), None)
    return folder.check_mask(token, TOKENS[0], target)


def mask_state(folder: HeadFolder, target: CausalLM, encode: Encode) -> Tensor:
    """Return the state [1, hidden] that masks take in."""
    of = target.cache_shape
    return encode(folder.read(MASK_STATE)[0].to(of.device, of.dtype).chunk(NUM_STATES, dim=-1))
