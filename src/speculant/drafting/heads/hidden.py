"""A head with a KV cache of its own, which follows the hidden states that the target computed.

Row i of the cache is computed from token i + 1 and the target's state of token i (arXiv 2401.15077, section 3.1):

    tokens     t0 t1 t2 t3 t4         t4 = the newest token, not in the target's cache yet
    states     h0 h1 h2 h3            observed from the target's passes
    rows       (t1, h0) (t2, h1) (t3, h2) (t4, h3)         the last one predicts the token after t4

Rows of drafted tokens are made of the head's own states. They are dropped after each draft, and their tokens, if they
were accepted, get rows of the target's states.

The target computes no states of a prefix that it takes over. Rows of other sequences stand in, as far as there are any;
the next row is that of the first observed state. Rotary positions are relative, so this changes drafts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import KVCache
from speculant.drafting.model.drafter import DraftModelRunner, ModelDrafter
from speculant.drafting.topology import DynamicTree, TreeTopology
from speculant.kernels import REFERENCE, Sampler
from speculant.models import CausalLM, SequenceInput, known
from speculant.sampling import Chances
from speculant.types import CommittedRows, DraftTree, LayerStates, Request, state_rows

MOST_PENDING = 512  # states of a sequence that wait for its next draft


Encode = Callable[[Sequence[Tensor]], Tensor]  # states of layers, [n, hidden] each -> the head's input states


class Pending:
    """The states of a sequence's next rows, which are joined and encoded only when they are read."""

    def __init__(self, encode: Encode) -> None:
        self._encode, self._new = encode, list[Sequence[Tensor]]()
        self._last: LayerStates | None = None  # of `_new`
        self._encoded: Tensor | None = None
        self.count = 0

    def add(self, layers: Sequence[Tensor], count: int) -> None:
        """Append states, [count, hidden] of each layer."""
        self.count += count
        last = self._last
        if last is not None and isinstance(layers, LayerStates) and last.grow(layers):
            return
        self._last = layers.part(0, count) if isinstance(layers, LayerStates) else None  # one of its own, which grows
        self._new.append(self._last or layers)

    def read(self) -> Tensor:
        """Return all states [count, hidden]; there is at least one."""
        parts = [] if self._encoded is None else [self._encoded]
        if self._new:
            parts.append(
                self._encode([torch.cat(own) if len(own) > 1 else own[0] for own in zip(*self._new, strict=True)])
            )
            self._new, self._last = [], None
        self._encoded = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self._encoded

    def drop(self, count: int) -> None:
        """Drop the first states."""
        if count:
            self._encoded = self.read()[count:]
            self.count -= count

    def keep(self, count: int) -> None:
        """Drop all but the first states."""
        if count < self.count:
            self._encoded, self.count = self.read()[:count], count


@dataclass
class _Followed:
    """The state of one sequence.

    first: how many of the target's positions have no row here. length: rows in the cache that are made of the target's
    states; the first `taken` of them come from other sequences.
    pending: the states of the next rows; the newest row's stays here, so that it can be computed again. None = no state
    has been observed.
    salt: see `ModelNeeds.salt`.
    """

    request: Request
    salt: str
    first: int = 0
    length: int = 0
    taken: int = 0
    pending: Pending | None = None

    @property
    def num_pending(self) -> int:
        """The number of states that have no row yet."""
        return 0 if self.pending is None else self.pending.count

    @property
    def end(self) -> int:
        """The target's position after the last one whose state is known."""
        return self.first + self.length + self.num_pending


class HiddenStateRunner(DraftModelRunner):
    """See the module's docstring. `encode` maps the states that `observe` receives to the head's input states.

    shift: the places from a row's state to its token.
    """

    takes_more = True  # whether a new sequence may take over rows of positions whose states it observes

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        chances: Chances,
        max_num_batched_tokens: int,
        stop_below: float,
        encode: Encode,
        shift: int = 1,
    ) -> None:
        super().__init__(model, cache, chances, max_num_batched_tokens, stop_below)
        self._encode, self._shift = encode, shift
        self._followed: dict[int, _Followed] = {}

    def begin(self, request: Request) -> None:
        """Start a new sequence."""
        self._followed[request.seq_id] = _Followed(request, self._salt(request))

    def end(self, request: Request) -> None:
        """Forget a sequence and release its blocks."""
        self._followed.pop(request.seq_id, None)
        self.cache.release(request.seq_id)

    def has_drafted(self, request: Request) -> bool:
        """Whether a sequence has rows of its own."""
        followed = self._followed[request.seq_id]
        return followed.length > followed.taken

    def index(self, request: Request) -> None:
        """Add a sequence's rows to the prefix index, unless some are missing."""
        if not self._followed[request.seq_id].first:
            self.cache.insert_prefix(request.seq_id, request.tokens[self._shift :])

    def observe(self, request: Request, rows: CommittedRows) -> int:
        """Take the states of committed tokens. Returns how many observed states have no row yet."""
        followed, start, count = self._followed[request.seq_id], rows.start, len(rows.tokens)
        if self._follow_salt(followed):
            return 0
        pending = followed.pending
        if pending is not None and start == followed.first + followed.length + pending.count:  # as nearly always
            pending.add(rows.hidden, count)
            return pending.count
        if followed.pending is None:
            self._take_prefix(followed, start)
        elif start > followed.end:
            self._restart(followed, start)
        known = followed.end - start
        if known < count:
            followed.pending = followed.pending or Pending(self._encode)
            followed.pending.add(state_rows(rows.hidden, known, count) if known else rows.hidden, count - known)
        return followed.num_pending

    def num_pending(self, request: Request) -> int:
        """Return how many observed states have no row yet."""
        return self._followed[request.seq_id].num_pending

    def ahead_of(self, request: Request) -> list[Request]:
        """Return a sequence whose pending rows, a block at least, a new one can take over; [] = there is none."""
        size = self.cache.block_size
        for other in self._followed.values():
            end = other.length + self._shift + size
            if other.num_pending >= size and not other.first and other.request.tokens[:end] == request.tokens[:end]:
                return [other.request]
        return []

    @override
    def note(self, request: Request, tokens: Sequence[int]) -> None:
        """Keep the rows of the target's states, except the newest one."""
        followed = self._followed[request.seq_id]
        assert followed.pending is not None
        done = min(len(tokens), followed.pending.count - 1)
        followed.length += done
        followed.pending.drop(done)

    @override
    def finish(self, request: Request) -> None:
        self.cache.truncate_to(request.seq_id, self._followed[request.seq_id].length)

    def tree_input(self, request: Request, tree: DraftTree, carried: Tensor | None) -> SequenceInput:
        """Give each node the state that its parent handed on."""
        followed, size = self._followed[request.seq_id], self.model.vocab_size
        assert followed.pending is not None
        assert carried is not None, "the model hands nothing on"
        self.cache.truncate_to(request.seq_id, followed.length)
        handed_on = carried[[1 + parent for parent in tree.parent_list]]
        states = torch.cat((followed.pending.read().to(handed_on.dtype), handed_on))
        own = DraftTree.of(known(tree.token_list, size), tree.parent_list)
        return SequenceInput(request.seq_id, request.tokens[-1:], own, hidden=states, length=request.num_positions)

    def _roll_back(self, request: Request) -> tuple[int, list[int]]:
        """Return the place of the first token that has no row of the target's state, and the text."""
        followed = self._followed[request.seq_id]
        self._follow_salt(followed)
        if followed.length < self.cache.length(request.seq_id):
            self.cache.truncate_to(request.seq_id, followed.length)
        self.index(request)
        self.cache.drop_unseen(request.seq_id)
        return followed.first + followed.length + self._shift, self.text(request)

    def _missing(self, request: Request, text: list[int], start: int, most: int) -> tuple[list[int], Tensor | None]:
        pending = self._followed[request.seq_id].pending
        count = 0 if pending is None else min(most, pending.count, len(text) - start)
        if pending is None or count <= 0:
            return [], None
        return text[start : start + count], pending.read()[:count]

    def _take_prefix(self, followed: _Followed, start: int) -> None:
        """Take over rows of other sequences for a new one, whose first observed state is that of position `start`."""
        request = followed.request
        self.cache.release(request.seq_id)
        most = None if self.takes_more else start
        self.cache.match_prefix(request.seq_id, request.tokens[self._shift :], followed.salt, most)
        followed.length = followed.taken = self.cache.length(request.seq_id)
        followed.first = max(0, start - followed.length)

    def _follow_salt(self, followed: _Followed) -> bool:
        """Drop the rows of a sequence whose salt has changed, whose states the target computes again.

        Returns whether it has changed.
        """
        salt = self._salt(followed.request)
        if followed.salt == salt:
            return False
        followed.salt = salt
        self._restart(followed, 0)
        return True

    def _salt(self, request: Request) -> str:
        """Add the first tokens, on which the first row depends, and which are not among the keys."""
        return f"{' '.join(map(str, request.tokens[: self._shift]))} {self.model.needs.salt(request)}"

    def _restart(self, followed: _Followed, start: int) -> None:
        self.cache.release(followed.request.seq_id)
        followed.first, followed.length, followed.taken, followed.pending = start, 0, 0, None


class HiddenDrafter(ModelDrafter):
    """Drafts with the head of `runner`; layers: those whose states it reads.

    Beam searches get no drafts. The length of a sequence is not bounded: see drafting/heads/page.py.
    """

    _runner: HiddenStateRunner

    def __init__(
        self,
        runner: HiddenStateRunner,
        layers: Sequence[int],
        vocab_size: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | DynamicTree | None = None,
    ) -> None:
        super().__init__(runner, vocab_size, sampler, topology)
        self._modules: Sequence[HiddenStateRunner] = (runner,)
        self.needs = replace(self.needs, hidden_layers=tuple(layers), nodes_per_beam=None, max_positions=None)

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        if request.search is not None:
            return
        if self._runner.observe(request, rows) > MOST_PENDING:
            self.catch_up([request])

    @override
    def end(self, request: Request) -> None:
        """Let later requests know all rows of a text that the head drafted for."""
        if self._runner.num_pending(request) and not request.num_drafted and self._runner.has_drafted(request):
            with torch.inference_mode():
                super().catch_up([request])
            for module in self._modules:
                module.index(request)
        for module in self._modules:
            module.end(request)

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Draft nothing after drafted tokens, whose states are not known."""
        known = zip(requests, limits, strict=True)
        return super().propose(requests, [0 if request.num_drafted else limit for request, limit in known])

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        committed = [request for request in requests if not request.num_drafted]
        super().catch_up([request for request in committed if self._runner.num_pending(request) > 1])

    @override
    def match_prefix(self, request: Request) -> int:
        """Return all positions, since missing rows cost less than the target's work; compute rows to take over."""
        if request.search is None:
            with torch.inference_mode():
                self.catch_up(self._runner.ahead_of(request))
        return super().match_prefix(request)

    @override
    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """Keep the states: only committed tokens' states were observed."""
