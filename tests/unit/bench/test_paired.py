"""Alternating blocks: who is timed how often, and in which order."""

from __future__ import annotations

from collections import Counter

from bench.paired import alternate, fastest


def test_everything_is_timed_once_a_pair_and_the_first_place_rotates() -> None:
    calls: list[str] = []
    times = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4, min_block_s=0.0)
    assert calls == ["a", "a", "b", "b", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(timed.wall_s) for timed in times.values()] == [4, 4]


def test_fast_calls_are_repeated_and_averaged() -> None:
    calls: Counter[str] = Counter()

    def quick() -> None:
        calls["quick"] += 1

    times = alternate({"quick": quick}, 1, min_block_s=0.001)
    assert calls["quick"] > 10
    assert times["quick"].wall_s[0] < 0.001


def test_the_fastest_is_found() -> None:
    assert fastest({"slow": lambda: sum(range(100_000)), "fast": lambda: None}) == "fast"
