"""A gateway that dies during a stream, and a client by reflection: `buf curl`."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from galley.client.client import AsyncClient, AsyncStream
from galley.client.options import GenerateOptions, Message, Speculation
from galley.core.names import NGRAM
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.e2e.stacks import Clients

pytestmark = [
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

PROMPT = [Message("user", "Repeat this list twice: red, green, blue, yellow, purple, orange, brown, black.")]
OPTIONS = GenerateOptions(
    temperature=0.7, seed=5, max_tokens=40, logprobs=2, speculation=Speculation(k=4, strategy=NGRAM)
)


@dataclass
class Seen:
    """The tokens of a stream and their facts."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    origins: list[bool] = field(default_factory=list)
    logprobs: list[pb.PositionLogprobs] = field(default_factory=list)
    finished: pb.Finished | None = None

    def take(self, event: pb.StreamEvent) -> None:
        if event.WhichOneof("event") == "chunk":
            assert event.chunk.index == len(self.tokens), "an index is repeated or skipped"
            self.tokens += event.chunk.token_ids
            self.text += event.chunk.text
            self.origins += event.chunk.from_draft
            self.logprobs += event.chunk.logprobs
        elif event.WhichOneof("event") == "finished":
            self.finished = event.finished


async def read(stream: AsyncStream, seen: Seen, until: int | None = None) -> None:
    async for event in stream:
        seen.take(event)
        if until is not None and len(seen.tokens) >= until:
            return


async def test_killed_gateway_is_a_pause(clients: Clients) -> None:
    whole = Seen()
    await read(clients.main.stream(PROMPT, **OPTIONS), whole)
    assert whole.finished is not None

    cut = Seen()
    addresses = [clients.stack.address(name) for name in ("gateway-2", "gateway")]
    async with AsyncClient(addresses) as client:
        stream = client.stream(PROMPT, **OPTIONS)
        await read(stream, cut, until=len(whole.tokens) // 2)
        await clients.stack.kill("gateway-2")
        try:
            await read(stream, cut)
        finally:
            await clients.stack.restart("gateway-2")

    assert cut.tokens == whole.tokens
    assert cut.text == whole.text
    for ours, theirs in zip(cut.logprobs, whole.logprobs, strict=True):
        assert [top.token_id for top in ours.top] == [top.token_id for top in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert cut.finished is not None
    assert cut.finished.reason == whole.finished.reason

    # The origins of tokens differ from run to run, but not within one session.
    again = Seen()
    await read(clients.main.resume(stream.session_id, 0), again)
    assert again.tokens == cut.tokens
    assert again.origins == cut.origins
    assert any(cut.origins)
    assert not all(cut.origins)


async def test_buf_curl_streams_by_reflection(clients: Clients) -> None:
    request = {
        "messages": {"messages": [{"role": "user", "content": "Name three colours."}]},
        "sampling": {"temperature": 0},
        "maxTokens": 8,
    }
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("buf")),
        *("curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(request)),
        f"http://{clients.stack.address('gateway')}/galley.v1.Generation/Generate",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    events = [message["event"] for message in _json_objects(output.decode())]
    assert "started" in events[0]
    assert "finished" in events[-1]
    tokens = [token for event in events for token in event.get("chunk", {}).get("tokenIds", [])]
    assert 0 < len(tokens) <= 8

    ours = clients.main.stream([Message("user", "Name three colours.")], temperature=0.0, max_tokens=8)
    async for _ in ours:
        pass
    assert tokens == ours.tokens


def _json_objects(text: str) -> list[dict[str, Any]]:
    decoder = json.JSONDecoder()
    objects = []
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        objects.append(value)
        text = text[end:].strip()
    return objects
