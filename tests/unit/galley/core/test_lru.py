"""The cache by last use, and the keys of a time window."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.lru import LruCache, RecentKeys

WINDOW = 10
STEPS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6), st.booleans()), max_size=30)


@settings(max_examples=50)
@given(steps=STEPS)
def test_each_key_counts_once_within_the_window(steps: list[tuple[str, int, bool]]) -> None:
    recent, last, now = RecentKeys(WINDOW), dict[str, int](), 0
    for key, passed, drops in steps:
        now += passed
        if drops:
            recent.remove(key)
            last.pop(key, None)
        else:
            recent.add(key, now)
            last[key] = now
        assert recent.count(now) == sum(now - noted < WINDOW for noted in last.values())


def test_the_least_recently_used_value_is_dropped() -> None:
    cache: LruCache[str, list[str]] = LruCache(list, 2)
    cache.get("a").append("1")
    cache.get("b")
    assert cache.get("a") == ["1"]
    cache.get("c")
    assert len(cache) == 2
    assert cache.get("a") == ["1"]
