"""`galley audit` on answers of real processes."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from redis.asyncio import Redis

from galley.client.options import GenerateOptions, Message, Speculation
from galley.core.names import NGRAM
from tests.e2e.stacks import Clients

pytestmark = [
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

PROMPT = [Message("user", "Repeat this list twice: red, green, blue, yellow, purple, orange, brown, black.")]
OPTIONS = GenerateOptions(
    temperature=0.7, seed=9, max_tokens=32, ignore_eos=True, speculation=Speculation(k=4, strategy=NGRAM)
)


async def galley_audit(clients: Clients, *args: str) -> tuple[int | None, str]:
    """Return the exit code and the output of the command, at the gateway that served none of the answers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "galley.cli", "audit", *args),
        *("--endpoint", clients.stack.address("gateway-2")),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_an_answer_is_the_same_and_one_changed_in_the_store_is_damaged(clients: Clients) -> None:
    before = await clients.main.audit_counts()
    session_id = (await clients.main.generate(PROMPT, **OPTIONS)).session_id
    code, output = await galley_audit(clients, session_id, "--json")
    assert code == 0
    report = json.loads(output)
    assert (report["verdict"], report["output_tokens"], report["compared"]) == ("same", 32, 32)
    assert report["deterministic"] == (await clients.main.model_info()).deterministic

    log = f"galley:sessions:default:{{{session_id}}}:log"
    async with Redis.from_url(f"unix://{clients.stack.address('valkey')}") as store:
        await store.setbit(log, 39, 1 - await store.getbit(log, 39))
    code, output = await galley_audit(clients, session_id)
    assert code == 1
    assert output.startswith("damaged: the stored session does not agree with its hash")

    after = await clients.main.audit_counts()
    assert after.sessions - before.sessions == 2
    assert after.damaged - before.damaged == 1
    assert after.tokens + after.loose_tokens - before.tokens - before.loose_tokens == 32
    assert after.differing == before.differing
    code, output = await galley_audit(clients)
    assert code == 0
    assert output.startswith(f"audited sessions: {after.sessions}, damaged in the store: {after.damaged}\n")
