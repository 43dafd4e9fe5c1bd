"""The prompt of several choices is read once: a real target counts its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from galley.common.metrics import catalogue
from tests.fakes.http_client import http_client
from tests.fakes.redis_servers import Server
from tests.fakes.tiny_model import CONTEXT
from tests.integration.services.gateway.real import Real

PROMPT = [5, 9, 2, 33] * (CONTEXT // 8)
TOKENS = 8
BLOCK = 16
"""Positions of a KV block: a choice reads what the prompt has beyond whole blocks by itself."""


@pytest.mark.parametrize("stream", [False, True])
async def test_the_choices_of_a_prompt_read_it_once(
    tmp_path: Path, tiny: Path, shared_store: Server, stream: bool
) -> None:
    async with (
        Real(tmp_path, tiny, shared_store.url, http_port=0) as real,
        http_client(real.gateway.http) as client,
    ):
        body = {"prompt": PROMPT, "n": 4, "seed": 1, "max_tokens": TOKENS, "ignore_eos": True}
        if stream:
            events = await client.stream("/v1/completions", body)
            texts = [events.text(index) for index in range(4)]
        else:
            answer = await client.complete(**body)
            texts = [choice["text"] for choice in answer["choices"]]
            assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        assert len(set(texts)) == 4
        read = real.total(catalogue.BATCH_PREFILL_ROWS)
        assert len(PROMPT) - 1 <= read < len(PROMPT) + 3 * BLOCK < 2 * len(PROMPT)
