"""The world that the tests of the whole gateway live in."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fakes import tokenizer_files
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.world import Gateway, World


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(directory)
    return directory


@pytest.fixture(scope="session")
def spelling(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer whose tokens are the bytes of ASCII, but for the end token."""
    from tests.fakes.tiny_model import STOP, VOCAB  # noqa: PLC0415  # transformers takes seconds

    directory = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("spelling") / "model"))
    printable = range(33, 127)
    letters = [chr(byte if byte in printable else 256 + min(byte, 33)) for byte in range(VOCAB)]
    letters[STOP] = "<end>"
    fast = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    fast.save(str(directory / "tokenizer.json"))
    assert json.loads((directory / "tokenizer.json").read_text())["added_tokens"][0]["id"] == STOP
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
