"""Services that the attacks share: state that one attack leaves reaches the next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.stack import Attacked, attacked, warmed_up
from tests.fakes import tokenizer_files
from tests.fakes.redis_servers import VALKEY, running


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    tokenizer: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(tokenizer)
    with running(VALKEY) as store, attacked(store.url, tokenizer) as stack:
        asyncio.run(warmed_up(stack))
        yield stack
        outcome = stack.stop()
    assert outcome == {"tasks": 0, "errors": []}
