"""The world that the tests of the whole gateway live in."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes import tokenizer_files
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.world import Gateway, World


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(directory)
    return directory


@pytest.fixture(scope="session")
def shared_store() -> Iterator[Server]:
    with running(VALKEY) as server:
        yield server


@pytest.fixture
def own_store() -> Iterator[Server]:
    with running(VALKEY) as server:
        yield server


@pytest.fixture
def credit() -> int:
    return 0


@pytest.fixture
async def world(shared_store: Server, tokenizer: Path, credit: int) -> AsyncIterator[World]:
    async with a_world(shared_store, tokenizer, credit) as world:
        yield world


@pytest.fixture
async def gateway(world: World) -> Gateway:
    return await world.gateway()


@pytest.fixture
async def frail_world(own_store: Server, tokenizer: Path, credit: int) -> AsyncIterator[World]:
    async with a_world(own_store, tokenizer, credit) as world:
        yield world


@asynccontextmanager
async def a_world(store: Server, tokenizer: Path, credit: int) -> AsyncIterator[World]:
    # The path of a unix socket is limited to 107 bytes, which pytest's tmp_path can exceed.
    with tempfile.TemporaryDirectory(prefix="galley-") as directory:
        async with World(Path(directory), tokenizer, store.url, credit) as world:
            yield world
