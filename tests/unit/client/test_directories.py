from __future__ import annotations

from typing import Any, cast

from tqclient.directories import LAYOUT_BYTES, DirectoryCache

LAYOUT = cast(Any, object())


def test_small_directories_are_charged_what_their_objects_need() -> None:
    cache = DirectoryCache(10 * LAYOUT_BYTES)
    for block_id in range(100):
        cache.put(block_id, LAYOUT, 0)
    assert len(cache) == 10
    assert cache.get(89) is None
    assert cache.get(90) is LAYOUT


def test_the_least_recently_used_goes_first() -> None:
    cache = DirectoryCache(3 * (LAYOUT_BYTES + 100))
    for block_id in (1, 2, 3):
        cache.put(block_id, LAYOUT, 100)
    cache.get(1)
    cache.put(1, LAYOUT, 10_000_000)  # known already: charged once
    cache.put(4, LAYOUT, 100)
    assert [cache.get(block_id) is not None for block_id in (1, 2, 3, 4)] == [True, False, True, True]


def test_another_layout_of_the_same_block_takes_the_place_of_the_first() -> None:
    cache = DirectoryCache(2 * LAYOUT_BYTES)
    other = cast(Any, object())
    cache.replace(1, other)
    assert cache.get(1) is None
    cache.put(1, LAYOUT, 0)
    cache.replace(1, other)
    assert cache.get(1) is other
    cache.put(2, LAYOUT, 0)
    assert len(cache) == 2
