# ruff: noqa: N999 - the method's name
"""PaSS: look-ahead embeddings draft in the target's own pass, which also verifies (arXiv 2311.13581).

Below the root and below each drafted node the pass has a chain of rows whose inputs are trained embeddings instead of
tokens:

    pass i          root - d1 - d2              d1 is accepted, d2 is not: the token c is committed after d1
                    |     |     |
                    A     A     A    A = a1 - a2 - a3, the look-ahead rows
    pass i + 1      c - e1 - e2                 e1 is drawn from the state of a1 below d1, e2 from a2

So drafting takes no pass of its own. State t of a chain, from t = 1, predicts the token t + 1 places after the row
above the chain; the target predicts the next token. Look-ahead rows are dropped with the rejected drafts. If the last
pass had none, as after a prompt, a pass has look-ahead rows and no draft.

The head's folder has config.json and one tensor, look_ahead.weight [T, hidden].

Memory: T states per sequence. Cost: with n drafted tokens, n + (n + 1) min(n, T) more rows of the target's pass, and
the output head of n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from speculant.drafting.base import DrafterContext, Method, no_options, require_no_stop
from speculant.drafting.heads.folder import HeadFolder, HeadParts, Part, Role, renamed, require_target
from speculant.drafting.heads.future import FutureDrafter
from speculant.drafting.heads.look_ahead import LookAheadTree
from speculant.drafting.topology import StaticTree
from speculant.kernels import REFERENCE, Sampler
from speculant.models import CausalLM, FutureHeads, count
from speculant.sampling import Chances
from speculant.types import CommittedRows, DraftTree, Request

KIND = "pass"
TENSOR = "look_ahead.weight"
METHOD = Method(default_length=2, uses_model=True)
HEAD = HeadParts({r"look_ahead\.weight": Part(Role.TABLE)})


class LookAheadStates(FutureHeads):
    """`FutureHeads` whose input [r, T, hidden] already is a state for each further token."""

    @override
    def states(self, hidden: Tensor, count: int) -> Tensor:
        return hidden[:, :count].transpose(0, 1)


class LookAheadDrafter(FutureDrafter):
    """Drafts chains from the states of its look-ahead rows; `inputs` [T, hidden] are their input embeddings."""

    def __init__(self, inputs: Tensor, target: CausalLM, chances: Chances, sampler: Sampler = REFERENCE) -> None:
        chain = StaticTree.of_widths([1] * len(inputs))
        super().__init__(LookAheadStates(), target, chances, chain, sampler, usual_nodes=METHOD.default_length)
        self.needs = replace(self.needs, target_inputs=len(inputs))
        self.inputs = inputs
        self._counts: dict[int, int] = {}  # of known states by sequence; the others are zero

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        """Keep the states of look-ahead rows, if the pass had some."""
        ahead = rows.hidden[0][len(rows.tokens) :]
        if not len(ahead):
            self.end(request)
            return
        states = ahead.new_zeros(self.inputs.shape)
        states[: len(ahead)] = ahead
        self._states[request.seq_id] = rows.start + len(rows.tokens) - 1, states[None]
        self._counts[request.seq_id] = len(ahead)

    @override
    def end(self, request: Request) -> None:
        super().end(request)
        self._counts.pop(request.seq_id, None)

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Draft at most as many tokens as there are states, and add `limit` look-ahead rows."""
        known = [
            min(limit, self._counts.get(request.seq_id, 0)) for request, limit in zip(requests, limits, strict=True)
        ]
        trees = super().propose(requests, known)
        return [
            LookAheadTree.around(tree, self.inputs[:limit]) if limit > 0 else tree
            for tree, limit in zip(trees, limits, strict=True)
        ]


def build(context: DrafterContext) -> LookAheadDrafter:
    """Load the embeddings; raises SpeculantError for another target's embeddings."""
    no_options(context)
    require_no_stop(context)
    target = require_target(context.target.model)
    inputs = load(HeadFolder.open(str(context.model), KIND), target)
    return LookAheadDrafter(inputs, target, context.chances, context.target.sampler)


def load(folder: HeadFolder, target: CausalLM) -> Tensor:
    """Read the embeddings [T, hidden]."""
    folder.check_sizes(target)
    shape = (count(folder.config, "num_look_ahead"), target.hidden_size)
    renamed(folder).check({TENSOR: shape}, KIND)
    of = target.cache_shape
    return folder.read(TENSOR).to(of.device, of.dtype)
