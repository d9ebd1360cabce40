"""The order in which one client's sequences are served: a sort key, of which the smallest comes first.

A request's *level* is its priority plus one for every PATIENCE steps that passed before it was queued. So no policy
starves a request: it is served before every request that came PATIENCE steps later with the same priority. Nothing that
a key depends on changes while a request waits, so the queue can be a heap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

PATIENCE = 64  # steps

Key = tuple[int, ...]


class Standing(NamedTuple):
    """The facts about a request that a policy may use.

    arrival: number of earlier requests. queued_at: number of steps before it was queued. held: positions in the cache.
    backlog: tokens that are not in the cache.
    """

    arrival: int
    priority: int
    queued_at: int
    held: int
    backlog: int

    @property
    def level(self) -> int:
        """Lower is served sooner."""
        return self.priority + self.queued_at // PATIENCE


def first_come(standing: Standing) -> Key:
    """Serve in order of arrival, prompts and decodes alike."""
    return standing.level, standing.arrival


def decode_first(standing: Standing) -> Key:
    """Serve sequences that lack only their newest token first, so that no prompt delays them; then by arrival.

    A prompt of one token counts as a prompt. Otherwise an endless series of such prompts would delay all others.
    """
    return int(standing.backlog > 1 or not standing.held), standing.level, standing.arrival


def shortest_prompt(standing: Standing) -> Key:
    """Serve the shortest backlog first."""
    return standing.level, standing.backlog, standing.arrival


Policy = Callable[[Standing], Key]
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"first-come": first_come, "decode-first": decode_first, "shortest-prompt": shortest_prompt}
)
