"""A place where a token is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from speculant.params import SamplingParams
from speculant.types import Request


class Node(NamedTuple):
    """A place where a token is chosen: a request's last token followed by `drafted` ancestors.

    softened: a greedy request's distribution is that at temperature 1, so that tokens can be ranked. A beam search's
    always is.
    """

    request: Request
    drafted: Sequence[int] = ()
    softened: bool = False

    @property
    def params(self) -> SamplingParams:
        """The settings that make the distribution."""
        softened = self.softened or self.request.search is not None
        return self.request.params.softened if softened else self.request.params

    @property
    def edited(self) -> bool:
        """Whether the logits of single tokens change before the distribution is made."""
        if self.request.constraint is not None:
            return True
        params = self.request.params
        return params.edits and (bool(params.logit_bias) or params.penalised or self.ends_banned)

    @property
    def ends_banned(self) -> bool:
        """Whether fewer than min_tokens output tokens precede it, so that end tokens are banned."""
        return self.request.num_output + len(self.drafted) < self.params.min_tokens
