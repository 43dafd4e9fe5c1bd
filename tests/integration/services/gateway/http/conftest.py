"""A gateway with an HTTP port, and a client of it."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.fakes.http_client import HttpClient, http_client
from tests.fakes.world import Gateway, World


@pytest.fixture
async def gateway(world: World) -> Gateway:
    return await world.gateway(http_port=0)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[HttpClient]:
    async with http_client(gateway.http) as client:
        yield client


@pytest.fixture
async def openai_client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="session")
def clients() -> Path:
    """The environment of clients that others wrote, which is made where it is missing."""
    root = Path(__file__).resolve().parents[5]
    subprocess.run([root / "scripts" / "clients.sh"], check=True, cwd=root)
    return root / ".galley" / "clients"
