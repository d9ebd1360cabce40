"""The time that the work of a step's sequences may take (speculant/work.py), which clients share by weight.

A sequence whose work does not fit waits for the next step. A prompt with log-probabilities or a beam search uses fewer
rows instead. Each client gets the work of one sequence per step in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from speculant.scheduling.fairness import Accounts
from speculant.types import Request
from speculant.work import NO_WORK, StepWork

STEP_S = 0.05  # while several clients have sequences
ALONE_S = 0.1  # while one client has: fewer passes are split, and a newcomer waits for one step at most


class WorkBudget:
    """The time of one step's work that is left for each client. weights: of the clients whose sequences have any."""

    def __init__(self, seconds: float, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._left = {name: seconds * weight / total for name, weight in weights.items()}
        self._firsts = set(weights)  # clients that have taken nothing

    @classmethod
    def of(cls, running: Sequence[Request], accounts: Accounts) -> WorkBudget | None:
        """Return the time for the work of a step; None if no running sequence has any."""
        busy = {request.client.name: request.client for request in running if request.work is not NO_WORK}
        if not busy:
            return None
        weights = {name: accounts.of(client).weight for name, client in busy.items()}
        return cls(ALONE_S if accounts.few else STEP_S, weights)

    def rows(self, request: Request, budget: int, backlog: int, least: int) -> int:
        """Return how many of `budget` rows there is time for, and take that time; 0 = the request waits.

        Rows whose results are used have work: those of newest tokens and of live hypotheses, and all rows of a prompt
        whose log-probabilities are wanted. least: the fewest rows that a beam search can use.
        """
        name, own, search = request.client.name, request.work, request.search
        if request.wants_prompt_logits:
            return self.take(name, own, min(backlog, budget))
        if own is NO_WORK or budget < backlog:
            return budget
        wanted = 1 if search is None else len(search.beams.unscored)
        taken = self.take(name, own, wanted)
        if search is None or taken in (0, wanted):
            return budget if taken else 0
        return min(budget, max(least, backlog + search.beams.live_tree.size * taken // wanted))

    def take(self, client: str, work: StepWork, rows: int, least: int = 1, more_s: float = 0.0) -> int:
        """Take time for up to `rows` rows with results; return for how many, 0 if it does not last for `least`.

        more_s: the time of each row beside its own work.
        """
        row_s = work.row_s + more_s
        if not work.row_s or not rows:
            return rows
        fits = min(rows, max(0, int(self._left[client] / row_s + 1e-6)))
        if client in self._firsts:
            fits = max(fits, min(rows, least))
        if fits < least:
            return 0
        self._firsts.discard(client)
        self._left[client] -= fits * row_s
        return fits
