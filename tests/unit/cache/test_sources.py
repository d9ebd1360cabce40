"""Sources are shared by content and salt, and released with the last text that holds them."""

from __future__ import annotations

import pytest
import torch

from speculant.cache import MEASURED, CacheShape, KVCache, Sources, paged_cache

SHAPE = CacheShape(1, 1, 1, torch.float32, torch.device("cpu"))


@pytest.fixture
def cache() -> KVCache:
    return paged_cache(SHAPE, 8, 4)


def test_texts_with_the_same_source_and_salt_share_it(cache: KVCache) -> None:
    sources = Sources(cache)
    first, second, salted, other = (
        sources.hold(1, [5, 6]), sources.hold(2, (5, 6)), sources.hold(3, [5, 6], "salt"), sources.hold(4, [5, 7]),
    )  # fmt: skip
    assert first is second
    assert len({first.seq_id, salted.seq_id, other.seq_id}) == 3
    assert max(each.seq_id for each in (first, salted, other)) < MEASURED, "the ids of other sequences are above"
    assert sources.hold(1, [5, 6]) is first
    assert first.holders == {1, 2}
    assert (sources.of(2), sources.of(9)) == (first, None)
    sources.check()


def test_a_source_is_released_with_its_last_text(cache: KVCache) -> None:
    sources = Sources(cache)
    source = sources.hold(1, [5, 6, 7])
    sources.hold(2, [5, 6, 7])
    assert [*sources.missing()] == [source]
    cache.reserve(source.seq_id, 3)
    assert (sources.is_encoded(source), [*sources.missing()]) == (True, [])
    sources.release(1)
    sources.release(1)
    assert (cache.length(source.seq_id), sources.of(1)) == (3, None)
    sources.check()
    sources.release(2)
    assert cache.free_tokens() == 32
    assert sources.hold(3, [5, 6, 7]).seq_id != source.seq_id, "another stay of the same source has another id"
    sources.check()


def test_the_check_finds_a_part_of_a_source_and_a_lost_text(cache: KVCache) -> None:
    sources = Sources(cache)
    source = sources.hold(1, [5, 6, 7])
    cache.reserve(source.seq_id, 2)
    with pytest.raises(AssertionError, match="in part"):
        sources.check()
    cache.reserve(source.seq_id, 1)
    sources.check()
    source.holders.clear()
    with pytest.raises(AssertionError, match="another source"):
        sources.check()
    del sources._held[1]
    with pytest.raises(AssertionError, match="without a text"):
        sources.check()
