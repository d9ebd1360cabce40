"""How the rows of a step are divided among the running sequences, with the rules of fairness.py.

A source is encoded as a whole, in a step that has rows and memory for all of it. The sources of one client are encoded
in the order of its requests: none waits for those of later requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from speculant.cache import ReservationPlan, Source
from speculant.config import Limits
from speculant.scheduling.fairness import by_client, divide
from speculant.scheduling.order import Standings
from speculant.scheduling.schedule import STEP_S, Encoding, Scheduled, WorkBudget
from speculant.types import Request


class RowDivision:
    """Divides the rows of each step among the running sequences, and their room in the target's cache."""

    def __init__(self, limits: Limits, standings: Standings) -> None:
        self._budget, self._standings = limits.max_num_batched_tokens, standings
        self.late = dict[int, int]()  # of running sequences: the last steps whose time did not last for their work

    def divide(
        self, plan: ReservationPlan, waited: Mapping[int, int]
    ) -> tuple[list[Scheduled], list[Encoding], WorkBudget | None] | None:
        """Divide the rows among the running requests, in order; None if one that is not the last finds no memory.

        waited: the steps in a row, by sequence, that had no time for its work.
        """
        standings, running, few = self._standings, self._standings.running, self._standings.accounts.few
        budgets, items, encoded, late = self._budgets(few), list[Scheduled](), dict[Source, Encoding](), set[str]()
        alone = len(running) == 1
        parts = {} if alone else self._parts(budgets)
        work, self.late = WorkBudget.of(running, standings.accounts), {}
        order = running if alone else sorted(running, key=standings.turn if few else standings.place)
        if waited:
            order = sorted(order, key=lambda request: -waited.get(request.seq_id, 0))
        for request in order:
            name, source = request.client.name, standings.sources.of(request.seq_id) if request.source else None
            if source is not None and source not in encoded and not standings.sources.is_encoded(source):
                encoding = self._encoding(source, request)
                if name in late or encoding.num_rows > budgets[name]:
                    late.add(name)
                    continue
                if not plan.take(source.seq_id, encoding.num_rows):
                    if request is standings.last():
                        continue
                    return None
                encoded[source] = encoding
                budgets[name] -= encoding.num_rows
            budget = min(budgets[name], parts.get(request.call, budgets[name]))
            if work is not None:
                budget = work.rows(request, budget, standings.backlog(request), self._least(request))
                if not budget:
                    self.late[request.seq_id] = waited.get(request.seq_id, 0) + 1
                    continue
            item = self._item(request, source, budget, plan)
            if item is not None:
                items.append(item)
                budgets[name] -= item.count + item.tree.size
                if request.call in parts:
                    parts[request.call] -= item.num_rows
            elif self._least(request) <= budget and request is not standings.last():
                return None
        return items, [*encoded.values()], work

    def _encoding(self, source: Source, first: Request) -> Encoding:
        others = [other for other in self._standings.running if other.seq_id in source.holders and other is not first]
        return Encoding(source, [first, *others])

    def _budgets(self, few: bool) -> dict[str, int]:
        """Return the rows of this step that each client with running requests may use; few: there is one at most.

        The client with the lowest counter gets at least the rows that its widest beam search needs, or its longest
        source beside its other requests, so that each client gets them in its turn.
        """
        standings, budget = self._standings, self._budget
        if few:
            return {standings.running[0].client.name: budget} if standings.running else {}
        needs, least, weights = Counter[str](), Counter[str](), dict[str, float]()
        longest, counts = Counter[str](), Counter[str]()  # the longest source, and the requests
        for request in sorted(standings.running, key=standings.place, reverse=True):
            name, fewest, unencoded = request.client.name, self._least(request), standings.unencoded(request)
            needs[name] += max(fewest, self._wanted(request)) + unencoded
            least[name] = max(least[name], fewest)
            longest[name], counts[name] = max(longest[name], unencoded), counts[name] + 1
            weights[name] = standings.accounts.of(request.client).weight
        first = next(reversed(needs), "")
        if longest[first]:
            least[first] = max(least[first], longest[first] + counts[first] - 1)
        parts = divide(budget, needs, weights)
        if parts.get(first, 0) < least[first]:
            del needs[first]
            parts = {first: least[first], **divide(budget - least[first], needs, weights)}
        return parts

    def _parts(self, budgets: Mapping[str, int]) -> dict[tuple[str, ...], int]:
        """Return the most rows that requests with several running sequences, or beams, may use of their client's.

        The requests of one sequence use the rest in their order.
        """
        running = self._standings.running
        counts = Counter(request.call for request in running)
        wide = {each.call for each in running if counts[each.call] > 1 or each.search is not None}
        parts = dict[tuple[str, ...], int]()
        if not wide or len(counts) < 2:
            return parts
        for name, own in by_client(running).items():
            needs, least = Counter[tuple[str, ...]](), dict[tuple[str, ...], int]()
            for request in own:
                least[request.call] = self._least(request)
                needs[request.call] += max(self._least(request), self._wanted(request))
            divided = divide(budgets[name], needs, dict.fromkeys(needs, 1.0))
            parts.update((each, max(least[each], rows)) for each, rows in divided.items() if each in wide)
        return parts

    def _wanted(self, request: Request) -> int:
        """Return how many rows a request would use."""
        backlog = self._standings.backlog(request)
        if request.params.prompt_logprobs is not None and request.wants_prompt_logits and request.work.row_s:
            return min(backlog, 1 + int(STEP_S / request.work.row_s))
        return backlog if request.search is None else backlog + request.search.beams.live_tree.size

    def _item(self, request: Request, source: Source | None, budget: int, plan: ReservationPlan) -> Scheduled | None:
        """Take a request's work within budget and room from the plan, and return it if there is any.

        Where no hypothesis fits after it, the newest token is left for a later step.
        """
        start, search = self._standings.target.length(request.seq_id), request.search
        count = len(request.tokens) - start
        if search is None and 0 < count <= budget and plan.take(request.seq_id, count):  # the usual case
            return Scheduled(request, start, count, source=source)
        most = min(budget, plan.room(request.seq_id))
        item = Scheduled(request, start, min(count, most), source=source)
        if item.completes and search is not None:
            item = replace(item, tree=search.beams.waiting_tree(most - item.count))
            if not item.tree.size and request.num_positions > len(request.tokens):
                item = replace(item, count=item.count - 1)
        plan.take(request.seq_id, item.num_rows)
        return item if item.count else None

    def _least(self, request: Request) -> int:
        """Return the fewest rows that a request can use: its newest token needs one hypothesis after it."""
        return 1 if self._standings.backlog(request) > 1 else 1 + request.num_positions - len(request.tokens)
