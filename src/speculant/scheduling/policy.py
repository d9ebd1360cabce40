"""In which order sequences are served: a policy is a sort key, and the smallest comes first.

A request's *level* is its priority, and falls by one for every PATIENCE steps that it has been here. So
whatever the policy prefers, nobody is overtaken for ever: a request that has waited long enough stands
before everyone who came PATIENCE steps later with the same priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

PATIENCE = 64  # steps

Key = tuple[int, ...]


@dataclass(frozen=True)
class Standing:
    """What a policy knows of a request; `arrival` counts requests, `age` steps. Of its tokens `held` were fed."""

    arrival: int
    priority: int
    age: int
    held: int
    backlog: int

    @property
    def level(self) -> int:
        """Lower is served sooner."""
        return self.priority - self.age // PATIENCE


def first_come(standing: Standing) -> Key:
    """Serve whoever came first, prompts and all."""
    return standing.level, standing.arrival


def decode_first(standing: Standing) -> Key:
    """Serve those who miss just their newest token, so that no prompt delays a running text; then who came first.

    A prompt of one token is still a prompt: else a stream of those would keep everybody else out.
    """
    return int(standing.backlog > 1 or not standing.held), standing.level, standing.arrival


def shortest_prompt(standing: Standing) -> Key:
    """Serve whoever has the least left to feed."""
    return standing.level, standing.backlog, standing.arrival


Policy = Callable[[Standing], Key]
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"first-come": first_come, "decode-first": decode_first, "shortest-prompt": shortest_prompt}
)
