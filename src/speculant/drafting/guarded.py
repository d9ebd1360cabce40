"""A drafter whose errors cost drafts: they are counted, and the sequences that they concern begin anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import index

from speculant.drafting.base import Drafter, DrafterNeeds, complete, listens
from speculant.drafting.checks import Proposals, checked_drafts
from speculant.errors import Guard
from speculant.types import CommittedRows, Request


class GuardedDrafter:
    """Calls a drafter for the sequences that have begun; no call raises what the drafter raises.

    name: for the log. count: receives the number of errors after each call in which there were any, those within the
    drafter included.
    """

    def __init__(self, name: str, drafter: Drafter, guard: Guard, count: Callable[[int], None]) -> None:
        self.drafter = complete(drafter)
        self._described = f"drafter {name!r}"
        self._guard, self._count = guard, count
        self._begun: set[int] = set()
        self.listens = listens(self.drafter)  # to `observe`

    @property
    def needs(self) -> DrafterNeeds:
        """What the drafter announces."""
        return self.drafter.needs

    def has_begun(self, request: Request) -> bool:
        """Whether a sequence has begun and not ended."""
        return request.seq_id in self._begun

    def begin(self, request: Request) -> None:
        """Begin a sequence that has not begun."""
        if not self.has_begun(request) and self._succeeds(partial(self.drafter.begin, request)):
            self._begun.add(request.seq_id)

    def propose(self, pairs: Sequence[tuple[Request, int]], vocab_size: int) -> Proposals:
        """Return checked drafts for pairs (request, limit); a sequence without one has not begun or failed.

        If the drafter fails for several sequences, it is called for each alone, so that the others keep their drafts.
        """
        asked, proposals = [pair for pair in pairs if self.has_begun(pair[0])], Proposals()
        if not asked or self._succeeds(lambda: proposals.update(checked_drafts(self.drafter, asked, vocab_size))):
            return proposals
        if len(asked) == 1:
            self.end(asked[0][0])
            return {}
        alone = [self.propose([pair], vocab_size) for pair in asked]
        return {seq_id: tree for each in alone for seq_id, tree in each.items()}

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`; after an error for each sequence alone, so that only those at fault begin anew."""
        begun = [request for request in requests if self.has_begun(request)]
        if not begun or self._succeeds(partial(self.drafter.catch_up, begun)):
            return
        if len(begun) == 1:
            self.end(begun[0])
            return
        for request in begun:
            self.catch_up([request])

    def observe(self, request: Request, rows: Callable[[], CommittedRows], layers: Sequence[int]) -> None:
        """Pass on committed rows whose hidden states are those of `layers`: the drafter gets its own of them.

        rows: makes them; it is called if the sequence has begun.
        """
        if request.seq_id in self._begun and not self._succeeds(
            lambda: self.drafter.observe(request, self._own(rows(), layers))
        ):
            self.end(request)

    def _own(self, rows: CommittedRows, layers: Sequence[int]) -> CommittedRows:
        """Return rows with the hidden states and the successors that the drafter announces."""
        needs = self.drafter.needs
        if layers != needs.hidden_layers and rows.hidden:
            rows = rows._replace(hidden=tuple(rows.hidden[layers.index(layer)] for layer in needs.hidden_layers))
        if rows.successors and len(rows.successors[0][1]) != needs.target_top_k:
            count = needs.target_top_k
            own_successors = [(token, best[:count]) for token, best in rows.successors] if count else ()
            rows = rows._replace(successors=own_successors)
        return rows

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`."""
        if self.has_begun(request) and not self._succeeds(partial(self.drafter.roll_back, request, dropped)):
            self.end(request)

    def match_prefix(self, request: Request) -> int:
        """See `Drafter.match_prefix`; from 0 to the number of tokens."""
        matched = [len(request.tokens)]
        self._succeeds(lambda: matched.append(max(0, index(self.drafter.match_prefix(request)))))
        return min(matched)

    def end(self, request: Request) -> None:
        """End a sequence if it has begun."""
        if self.has_begun(request):
            self._begun.remove(request.seq_id)
            self._succeeds(partial(self.drafter.end, request))

    def _succeeds(self, call: Callable[[], object]) -> bool:
        """Make a call of the drafter; count its errors and say whether it raised nothing."""
        before = self.drafter.errors
        succeeds = self._guard.succeeds(self._described, call)
        if errors := self.drafter.errors - before + (not succeeds):
            self._count(errors)
        return succeeds
