"""Random clients with random requests, in scarce memory and in plenty: nobody waits beyond the bound."""

from __future__ import annotations

from collections import Counter

import pytest

from speculant.scheduling import scheduler as scheduler_module
from tests.unit.scheduling.client_worlds import World

STEPS = 40  # in which clients come and leave
FEW, MANY = 20, 400  # worlds of a shard
SHARDS = 10
TURNS = (64, 8)  # a short one, so that turns are taken often


def shards() -> list[object]:
    few = [pytest.param(shard, FEW, id=f"few-{shard}") for shard in range(len(TURNS))]  # they are among the many
    return [*few, *(pytest.param(shard, MANY, id=str(shard), marks=pytest.mark.slow) for shard in range(SHARDS))]


@pytest.mark.parametrize(("shard", "count"), shards())
def test_no_client_waits_beyond_the_bound(shard: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "TURN", TURNS[shard % 2])
    worst, tally = Counter[str](), Counter[str]()
    for number in range(count):
        world = World(MANY * shard + number)
        world.run(STEPS)
        tally["steps"] += len(world.rows)
        tally["preemptions"] += sum(request.metrics.num_preemptions for request in world.driver.requests)
        tally["requests"] += len(world.driver.requests)
        worst = worst | world.worst
    print(f"{count} schedules: {dict(tally)}; the longest waits: {dict(worst)}")
    assert tally["preemptions"] > count // 4
    assert tally["steps"] > STEPS * count
