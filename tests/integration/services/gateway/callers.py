"""Gateways that tell callers apart by keys, and clients that bring one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from galley.client.client import NO_RETRIES, AsyncClient

if TYPE_CHECKING:
    from tests.fakes.world import Gateway, World

ALICE, BOB = "alice-4f1d6a", "bob-90c2e7"


@dataclass(frozen=True)
class KeyFile:
    alice: str = ""
    bob: str = ""

    def write(self, world: World) -> str:
        return self.write_to(world.directory)

    def write_to(self, directory: Path) -> str:
        path = directory / "keys.toml"
        text = "".join(_entry(name, key) for name, key in (("alice", ALICE), ("bob", BOB)))
        limits = f"[principals.alice]\n{self.alice}\n[principals.bob]\n{self.bob}\n"
        path.write_text(text + limits)
        return str(path)


def _entry(name: str, key: str) -> str:
    return f'[[keys]]\nprincipal = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n'


@asynccontextmanager
async def calling(gateway: Gateway, key: str) -> AsyncIterator[Gateway]:
    async with AsyncClient(gateway.address, api_key=key, retries=NO_RETRIES) as client:
        yield replace(gateway, client=client)
