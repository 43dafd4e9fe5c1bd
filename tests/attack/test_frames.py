"""Invalid HTTP/2 and floods of it at the ports of real services, while a client uses them."""

from __future__ import annotations

import pytest

from tests.attack.floods import (
    FLOODS,
    HEADER_BOMBS,
    end_of_bomb,
    endless_headers,
    flood_of,
    header_bomb,
    nonsense,
    rapid_resets,
)
from tests.attack.stack import HEALTH, HTTP, MIB, SERVICES, Attacked, unharmed
from tests.fakes.http2 import field_of, number, text


@pytest.mark.parametrize("service", [*SERVICES, HEALTH, HTTP])
async def test_invalid_http2_harms_no_other(stack: Attacked, service: str) -> None:
    async with unharmed(stack):
        await nonsense(stack.addresses[service])


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_of_frames_is_borne_or_cut_off(stack: Attacked, name: str) -> None:
    async with unharmed(stack):
        await flood_of(stack.gateway, name, 20_000)


async def test_rapid_resets_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack):
        await rapid_resets(stack.gateway, 4, 2_500)


@pytest.mark.parametrize("name", HEADER_BOMBS)
async def test_a_header_bomb_is_refused_or_its_connection_cut(stack: Attacked, name: str) -> None:
    stack.forget_peak()
    async with unharmed(stack) as before:
        for _ in range(2):
            assert await header_bomb(stack.gateway, name) == end_of_bomb(name)
    assert stack.peak_rss() - before.rss < 64 * MIB


async def test_headers_that_never_end_are_not_kept(stack: Attacked) -> None:
    stack.forget_peak()
    async with unharmed(stack) as before:
        await endless_headers(stack.gateway, 65_536)
    # gRPC holds up to 180 MiB of what it reads, however much is sent.
    assert stack.peak_rss() - before.rss < 512 * MIB


def test_the_attackers_tools_write_hpack() -> None:
    """Compare with the examples of RFC 7541, C.1 and C.2.1."""
    assert number(10, 5) == b"\x0a"
    assert number(1337, 5) == b"\x1f\x9a\x0a"
    assert field_of("custom-key", "custom-header", indexed=True) == b"\x40\x0acustom-key\x0dcustom-header"
    assert text(b"") == b"\x00"
