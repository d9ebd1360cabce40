"""An endpoint picker as those of the Gateway API inference extension and llm-d: it reads vLLM's metrics, and scores.

It stands for the gateways that the tests can't run. Each score is from 0 to 1, and the endpoint with the largest
weighted sum gets the request:

    queue    1 for the shortest queue of waiting sequences, 0 for the longest
    cache    the free share of the cache
    prefix   the share of the prompt's blocks that the endpoint was sent before
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

WEIGHTS = {"queue": 2.0, "cache": 2.0, "prefix": 3.0}
_GAUGES = {
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_running": "running",
    "vllm:kv_cache_usage_perc": "usage",
}


@dataclass(frozen=True)
class Load:
    """What an endpoint's metrics say. block_size: tokens of a block; num_blocks: of the whole cache."""

    waiting: float
    running: float
    usage: float
    block_size: int
    num_blocks: int


def read_load(page: str) -> Load:
    """Read a page of /metrics. Raises KeyError if a metric or a label is missing, and TypeError for another kind."""
    names = (*_GAUGES, "vllm:cache_config_info")
    lines = [line for line in page.splitlines(keepends=True) if any(name in line for name in names)]
    families = {family.name: family for family in text_string_to_metric_families("".join(lines))}
    for name in names:
        if families[name].type != "gauge":
            raise TypeError(f"{name} is a {families[name].type}")
    values = {field: families[name].samples[-1].value for name, field in _GAUGES.items()}
    cache = families["vllm:cache_config_info"].samples[-1].labels
    return Load(**values, block_size=int(cache["block_size"]), num_blocks=int(cache["num_gpu_blocks"]))


class Endpoint:
    """A server, its load, and the prefixes that it was sent. `url` is its address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.load: Load | None = None
        self._blocks: OrderedDict[int, None] = OrderedDict()  # hashes of prefixes, the least recently used first

    def refresh(self) -> bool:
        """Read the load. Return False if the server is not ready."""
        try:
            if httpx.get(f"{self.url}/health", trust_env=False, verify=False).status_code != 200:
                return False
            self.load = read_load(
                httpx.get(f"{self.url}/metrics", trust_env=False, verify=False).raise_for_status().text
            )
        except httpx.TransportError:
            return False
        return True

    def known_share(self, tokens: Sequence[int]) -> float:
        """Return the share of a prompt's blocks, from its beginning, that the server was sent."""
        hashes = list(self._hashes(tokens))
        known = next((index for index, each in enumerate(hashes) if each not in self._blocks), len(hashes))
        return known / len(hashes) if hashes else 0.0

    def note(self, tokens: Sequence[int]) -> None:
        """Record that the server gets this prompt, as far as its cache has room."""
        assert self.load is not None
        for each in self._hashes(tokens):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while len(self._blocks) > self.load.num_blocks:
            self._blocks.popitem(last=False)

    def _hashes(self, tokens: Sequence[int]) -> Iterable[int]:
        """Yield a hash for each whole block of a prompt, of the block and all before it."""
        assert self.load is not None
        size, before = self.load.block_size, 0
        for start in range(0, len(tokens) - size + 1, size):
            before = hash((before, *tokens[start : start + size]))
            yield before


class EndpointPicker:
    """Picks the endpoint of each request. weights: of the scores."""

    def __init__(self, urls: Iterable[str], weights: Mapping[str, float] = WEIGHTS) -> None:
        self.endpoints, self.weights = [Endpoint(url) for url in urls], weights

    def pick(self, tokens: Sequence[int]) -> Endpoint:
        """Return the endpoint for a prompt, and record that it gets it. Raises ValueError if none is ready."""
        ready = [endpoint for endpoint in self.endpoints if endpoint.refresh()]
        picked = max(ready, key=lambda endpoint: self._score(endpoint, ready, tokens))
        picked.note(tokens)
        return picked

    def _score(self, endpoint: Endpoint, ready: Sequence[Endpoint], tokens: Sequence[int]) -> float:
        assert endpoint.load is not None
        queues = [each.load.waiting for each in ready if each.load is not None]
        shortest, longest = min(queues), max(queues)
        scores = {
            "queue": (longest - endpoint.load.waiting) / (longest - shortest) if longest > shortest else 1.0,
            "cache": 1.0 - endpoint.load.usage,
            "prefix": endpoint.known_share(tokens),
        }
        return sum(self.weights.get(name, 0.0) * score for name, score in scores.items())
