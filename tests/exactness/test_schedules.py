"""In any order of events, every request gets its own tokens and gives back its memory.

A schedule is a walk of a state machine (admit, step, abort, finish, preempt, evict, fork, out of memory)
on the real engine, scheduler, drafter and caches, over a model that checks every slot which it reads.
`make soak` walks more of them, and other ones each time.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, seed, settings, strategies as st

from speculant.cache import BlockPool, KVCache, Source, Sources, paged_cache
from speculant.drafting import ModelDrafter
from speculant.models import SequenceInput, build_batch
from speculant.scheduling import Schedule
from speculant.types import DraftTree, Request
from tests.exactness.selection import slow_but
from tests.machine import run_schedule
from tests.oracle import Mismatch, OracleModel, V
from tests.schedules import Kind, size_of

ACTIONS = 200
SCHEDULES = 100  # of each shard
FEWER = 6  # of each kind, in `make test`; with fewer, some kinds of events are missing
SOAK = int(os.environ.get("SPECULANT_SOAK", "0"))  # how many times as many; 0 = the usual ones
SHARDS = (
    *(Kind("paged", "model"),) * 3,
    *(Kind("paged", "tree"),) * 2,
    *(Kind("paged", "chain"),) * 2,
    Kind("paged", "none"),
    Kind("slotted", "model"),
    Kind("slotted", "tree"),
    Kind("paged", "tree", sources=True),
    Kind("slotted", "chain", sources=True),
)
# In `make test`: both caches, each drafter, with sources and without.
FEW = (
    Kind("paged", "model"),
    Kind("paged", "none"),
    Kind("paged", "tree", sources=True),
    Kind("slotted", "chain", sources=True),
)
EVERYWHERE = ("steps", "interrupts", "refused", *(f"ended by {end}" for end in ("stop", "length", "abort", "error")))
PAGED = ("preemptions", "evictions", "prefix hits", "forks", "copies on write")


def test_the_shards_make_a_thousand_schedules_of_200_actions() -> None:
    assert len(SHARDS) * SCHEDULES >= 1000
    assert ACTIONS >= 200


def walks() -> list[object]:
    """Return shards with the number of schedules; whole shards are slow."""
    few = [pytest.param(SHARDS.index(kind), FEWER, id=f"few-{kind}") for kind in FEW]
    whole = [
        pytest.param(shard, SCHEDULES, id=f"{shard}-{kind}", marks=pytest.mark.slow)
        for shard, kind in enumerate(SHARDS)
    ]
    return [*few, *whole]


@pytest.mark.parametrize(("shard", "schedules"), walks())
def test_nothing_is_lost_leaked_or_mixed_up(shard: int, schedules: int) -> None:
    kind, tally, size = SHARDS[shard], Counter[str](), size_of(ACTIONS)

    @settings(max_examples=schedules * max(SOAK, 1), database=None, phases=[Phase.generate, Phase.shrink])
    @given(st.binary(min_size=size, max_size=size))
    def walk(data: bytes) -> None:
        run_schedule(kind, data, tally)

    (walk if SOAK else seed(shard)(walk))()
    assert tally["schedules"] >= schedules
    assert tally["actions"] >= schedules * ACTIONS
    expected = (*EVERYWHERE, *(PAGED if kind.cache == "paged" else ()))
    for happening in expected if kind.sources or kind.cache != "paged" else (*expected, "blocks given back"):
        assert tally[happening] >= schedules // 4, f"hardly any {happening}: a weak test"
    if kind.cache == "paged" and not kind.sources:
        assert tally["parts prepared"] >= schedules // 4
        assert tally["prepared tokens used"] >= schedules // 16
    if kind.cache == "paged" and kind.drafter == "tree":
        assert tally["compactions"] >= schedules


# --- the machine notices what it is there for


def keep_one_too_many(cache: KVCache, seq_id: int, n: int, original: Callable[..., None]) -> None:
    original(cache, seq_id, min(n + 1, cache.length(seq_id)))


def give_back_too_early(cache: KVCache, seq_id: int, original: Callable[..., None]) -> None:
    held = cache._held.get(seq_id)
    if held is not None:
        held.length += 1
        original(cache, seq_id)
        held.length -= 1


def never_copy(pool: BlockPool, block: int, *others: int, original: Callable[..., bool]) -> bool:
    return True


def never_free(pool: BlockPool, block: int, original: Callable[..., None]) -> None:
    pass


def free_twice(pool: BlockPool, block: int, original: Callable[..., None]) -> None:
    original(pool, block)
    original(pool, block)


def move_nothing(cache: KVCache, seq_id: int, base: int, path: Sequence[int], original: Callable[..., None]) -> None:
    cache.truncate_to(seq_id, base + len(path))


def share_across_salts(
    cache: KVCache,
    seq_id: int,
    tokens: Sequence[int],
    cache_salt: str,
    limit: int | None,
    original: Callable[..., int],
) -> int:
    return original(cache, seq_id, tokens, "", limit)


def keep_drafts_of_the_preempted(drafter: ModelDrafter, request: Request, original: Callable[..., None]) -> None:
    if request.finished:
        original(drafter, request)


def keep_released_sources(sources: Sources, seq_id: int, original: Callable[..., None]) -> None:
    pass


def share_sources_by_first_token(
    sources: Sources, seq_id: int, tokens: Sequence[int], cache_salt: str, original: Callable[..., Source]
) -> Source:
    known = next((known for _, known in sources._by_key if known[0] == tokens[0]), tokens)
    return original(sources, seq_id, known, cache_salt)


def keep_sources_of_a_failed_step(schedule: Schedule, cache: KVCache, original: Callable[..., None]) -> None:
    original(replace(schedule, sources=()), cache)


FAULTS: list[tuple[type, str, Callable[..., object], Kind]] = [
    (KVCache, "truncate_to", keep_one_too_many, Kind("paged", "chain")),
    (KVCache, "compact", move_nothing, Kind("paged", "tree")),
    (KVCache, "drop_unseen", give_back_too_early, Kind("paged", "none")),
    (KVCache, "match_prefix", share_across_salts, Kind("paged", "none")),
    (BlockPool, "is_writable", never_copy, Kind("paged", "tree")),
    (BlockPool, "free", never_free, Kind("paged", "none")),
    (BlockPool, "free", free_twice, Kind("paged", "none")),
    (ModelDrafter, "end", keep_drafts_of_the_preempted, Kind("paged", "model")),
    (Sources, "release", keep_released_sources, Kind("paged", "none", sources=True)),
    (Sources, "hold", share_sources_by_first_token, Kind("paged", "none", sources=True)),
    (Schedule, "roll_back", keep_sources_of_a_failed_step, Kind("paged", "none", sources=True)),
]
RARE = (share_across_salts, never_copy, keep_sources_of_a_failed_step)  # it takes many schedules to find these


@pytest.mark.parametrize(
    ("owner", "name", "fault", "kind"),
    slow_but([fault for fault in FAULTS if fault[2] not in RARE], FAULTS),
    ids=[fault.__name__ for _, _, fault, _ in FAULTS],
)
def test_a_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Callable[..., object], kind: Kind
) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: fault(*args, original=original))
    with pytest.raises((AssertionError, ValueError)):
        run_some_schedules(kind)


def run_some_schedules(kind: Kind) -> None:
    rng = random.Random(0)
    for _ in range(SCHEDULES):
        run_schedule(kind, rng.randbytes(size_of(ACTIONS)), Counter())


@pytest.mark.parametrize("part", ["token", "position", "prefix", "value"])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_the_oracle_objects_to_a_wrong_slot(part: str, place: int) -> None:
    model = OracleModel(max_positions=16)
    cache: Any = paged_cache(model.cache_shape, 8, 4)
    device = torch.device("cpu")
    model.forward(build_batch([SequenceInput(1, [1, 2, 3, 4, 5, 6], DraftTree.empty())], cache, device), cache.storage)
    keys, values = cache.storage.layer(0)
    row = cache.table(1)[place // 4] * 4 + place % 4
    (values if part == "value" else keys)[row, 0, ("token", "position", "prefix", "value").index(part) % 3] += 1
    with pytest.raises(Mismatch):
        model.forward(build_batch([SequenceInput(1, [7 % V], DraftTree.empty())], cache, device), cache.storage)
