"""Statistics of the soak."""

from __future__ import annotations

import mmap
import os

import pytest

from bench.soak.clients import NEVER, UNREAD, Arrival, Heard, Refusal
from bench.soak.memory import growth, held
from bench.soak.outcome import Block, Overload, Span, back_after_s, harm

PAIRS = 7
BLOCK_S = 10.0


def test_growth_is_of_the_windows_medians() -> None:
    values = [100.0, 900.0, 100.0, 100.0, 100.0] + [100.0] * 15 + [104.0, 104.0, 1.0, 104.0, 104.0]
    assert growth(values).share == pytest.approx(0.04)
    with pytest.raises(ValueError, match="windows"):
        growth(values[:9])


def test_growth_of_a_process_is_measured() -> None:
    before = held(os.getpid())
    size = 64 << 20
    # Fresh from the system: an allocator may have as much left over.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept.write(b"\1" * size)
        grown = held(os.getpid()).anonymous - before.anonymous
    assert grown >= 0.9 * size


def arrivals(span: Span, gap_s: float, *, counted: bool = True) -> list[Arrival]:
    count = round(span.seconds / gap_s)
    return [Arrival(span.first_s + (at + 0.5) * gap_s, 1, gap_s, counted) for at in range(count)]


def blocks() -> list[Block]:
    def block(at: int) -> Block:
        return Block(at // 2, at % 2 == 1, Span(at * BLOCK_S, (at + 1) * BLOCK_S))

    return [block(at) for at in range(2 * PAIRS)]


def heard(slower: float = 1.0) -> Heard:
    came = [
        one
        for block in blocks()
        for one in arrivals(block.span, 0.1 * (slower if block.misread else 1.0))
        + arrivals(block.span, 5.0, counted=False)
    ]
    return Heard(came, ended={"read": 5, f"{NEVER}: {UNREAD}": 2})


def test_harm_is_what_misreaders_cost_the_others() -> None:
    pace, gaps = harm(heard(slower=1.5), blocks())
    assert pace.median == pytest.approx(1.5, rel=0.01)
    assert gaps.median == pytest.approx(1.5, rel=0.01)
    assert pace.count == PAIRS


def overload(slump_s: float = 0.0, refused_ms: float = 5.0) -> Overload:
    before, during, after = Span(0, 60), Span(60, 120), Span(120, 220)
    came = [
        one for one in arrivals(Span(0, 220), 0.1) if not during.last_s < one.at_s < during.last_s + slump_s
    ]
    refusals = [Refusal(61 + 0.01 * at, refused_ms / 1000, 1.0) for at in range(100)]
    return Overload(before, during, after, Heard(came), Heard(refusals=refusals), [0.001])


def test_back_is_when_the_next_half_minute_is_as_before() -> None:
    assert back_after_s(overload()) == 0
    assert back_after_s(overload(slump_s=20)) == pytest.approx(19, abs=1)
    assert back_after_s(overload(slump_s=90)) is None
