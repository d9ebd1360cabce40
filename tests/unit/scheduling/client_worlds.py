"""Random worlds of clients on the real scheduler and caches, and the longest waits that they may have.

The bounds, for a client that has nothing in the engine and sends something:

    enough memory, no more clients than places     its first token comes at most EXTRA steps after the steps that its
                                                   prompts take at its share of each step's rows
    otherwise                                      it gains a token at least once in 2 N (L + TURN) W steps

N sequences are present, L is the longest text, and W is the largest weight divided by the smallest. A counter is at
most L + TURN above the lowest one. While a client waits, others have rows computed until their counters pass its own,
and then for at most a text and a turn more; each step computes a row at least.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from speculant.config import POLICIES
from speculant.scheduling import scheduler as scheduler_module
from speculant.types import Client, Ending, Request
from tests.unit.scheduling.driver import BLOCK, Driver, blocks, slots

LONGEST = 100  # tokens of a text: the driver's context
EXTRA = 3  # steps
WEIGHTS = (1.0, 1.0, 1.0, 2.0, 0.5)
PRIORITIES = (0, 0, 0, 1, -1, -1_000_000, 1_000_000)


class FastDriver(Driver):
    """A driver that checks the parts now and then: sorting all that wait in each step takes most of the time."""

    num_steps = 0

    def check(self) -> None:
        """See `Driver.check`."""
        self.num_steps += 1
        if self.num_steps % 16 == 0:
            super().check()


@dataclass
class Wait:
    """A client's wait for its first token. rows: of the prompts that it sent meanwhile."""

    rows: int = 0
    earned: int = 0  # rows of its share
    extra: int = 0  # steps after it had earned all
    bounded: bool = True  # there was memory, and there were places for all clients


@dataclass
class Sender:
    """One client and its unfinished requests. silent: steps without a token for it since it has some."""

    client: Client
    requests: list[Request] = field(default_factory=list)
    wait: Wait | None = None
    silent: int = 0
    most: float = 0.0  # steps that it may be silent


class World:
    """A scheduler and its clients, drawn from a seed."""

    def __init__(self, seed: int, num_clients: int | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.places = rng.choice((1, 2, 3, 4, 8))
        self.budget = self.places + rng.choice((0, 1, 4, 16, 60))
        whole = -(-LONGEST // BLOCK)
        self.ample = rng.random() < 0.6
        num_blocks = whole * self.places if self.ample else whole + rng.randrange(1, 2 * whole)
        in_slots = self.ample and rng.random() < 0.2
        cache = slots(self.places, LONGEST) if in_slots else blocks(num_blocks, keep_prefixes=rng.random() < 0.5)
        policy = rng.choice(POLICIES)
        self.driver = FastDriver(cache, self.places, self.budget, policy, max_waiting=100_000)
        count = num_clients or rng.randint(1, self.places + rng.choice((0, 0, 3)))
        self.senders = [Sender(Client(str(number), rng.choice(WEIGHTS))) for number in range(count)]
        self.rate = rng.choice((0.02, 0.1, 0.4))
        self.rows: list[int] = []  # of each step
        self.worst = Counter[str]()

    def run(self, steps: int) -> None:
        """Let clients come and leave for some steps, then serve the rest, or abort it."""
        for _ in range(steps):
            for sender in self.senders:
                if self.rng.random() < self.rate:
                    self._send(sender)
                if sender.requests and self.rng.random() < 0.01:
                    self._abort(sender, self.rng.choice(sender.requests).request_id)
            self.step()
        drains = self.rng.random() < 0.3
        for sender in self.senders:
            while sender.requests:
                self.step() if drains else self._abort(sender, sender.requests[0].request_id)
        cache = self.driver.cache
        assert cache.free_tokens() == cache.num_blocks * cache.block_size, "memory was not given back"

    def _send(self, sender: Sender) -> None:
        rng = self.rng
        if len(sender.requests) > 12:
            return
        num_prompt = rng.choice((1, 3, 8, 20, 60))
        samples = rng.choice((1, 1, 1, 1, 1, 2, 2 * self.places))
        request_id, priority, most = (
            str(len(self.driver.requests)),
            rng.choice(PRIORITIES),
            rng.choice((1, 2, 5, 12, 39)),
        )
        if not sender.requests:
            sender.wait, sender.silent, sender.most = Wait(), 0, 0.0
        if sender.wait is not None:
            sender.wait.rows += num_prompt + samples - 1
        for _ in range(samples):
            sender.requests.append(
                self.driver.add(num_prompt, most, request_id, int(request_id), priority, client=sender.client)
            )

    def _abort(self, sender: Sender, request_id: str) -> None:
        for request in [each for each in sender.requests if each.request_id == request_id]:
            request.ending = Ending("abort")
            self.driver.scheduler.remove(request)
            sender.requests.remove(request)
        if not sender.requests:
            sender.wait = None

    def step(self) -> None:
        """Take a step and check who waited how long."""
        present = [sender for sender in self.senders if sender.requests]
        total = sum(sender.client.weight for sender in present)
        self._earn(present, total)
        before = {request.seq_id: request.num_output for sender in present for request in sender.requests}
        waiting = self.driver.scheduler.waiting.firsts_of_others()
        schedule = self.driver.step()
        self._check_requests([each for each in self.driver.scheduler.waiting.firsts_of_others() if each in waiting])
        assert len(self.driver.scheduler.running) <= self.places
        self.rows.append(sum(item.num_rows for item in schedule.items))
        assert 0 < self.rows[-1] <= self.budget or not present
        weights = [sender.client.weight for sender in present] or [1.0]
        most = 2 * len(before) * (LONGEST + scheduler_module.TURN) * max(weights) / min(weights)
        for sender in present:
            gained = any(request.num_output > before[request.seq_id] for request in sender.requests)
            sender.requests = [request for request in sender.requests if not request.finished]
            self._check(sender, gained, most)

    def _check_requests(self, firsts: list[Request]) -> None:
        """Assert that no request of several running sequences keeps the first of its client's others from beginning."""
        if not self.ample:
            return
        running = Counter(request.call for request in self.driver.scheduler.running)
        for wide in (request for request in self.driver.scheduler.running if running[request.call] > 1):
            for other in firsts:
                urgent = (
                    wide.sender.client.name != other.sender.client.name or wide.sender.priority < other.sender.priority
                )
                assert urgent, f"{other.call} waits and {wide.call} has {running[wide.call]} sequences"

    def _earn(self, present: list[Sender], total: float) -> None:
        """Count the step for each client that waits for its first token: its share, or a step after all of that."""
        for sender in present:
            if (wait := sender.wait) is None:
                continue
            wait.bounded &= self.ample and len(present) <= self.places
            wait.extra += wait.earned >= wait.rows
            wait.earned += 1 + int((self.budget - len(present)) * sender.client.weight / total)

    def _check(self, sender: Sender, gained: bool, most: float) -> None:
        sender.silent, sender.most = (0, 0.0) if gained else (sender.silent + 1, max(sender.most, most))
        assert sender.silent <= sender.most, f"{sender.client} waits for {sender.silent} steps"
        self.worst["silent"] = max(self.worst["silent"], sender.silent)
        if sender.wait is not None:
            if sender.wait.bounded:
                assert sender.wait.extra <= EXTRA, f"{sender.client} waits: {sender.wait}"
                self.worst["extra"] = max(self.worst["extra"], sender.wait.extra)
            if gained:
                sender.wait = None
