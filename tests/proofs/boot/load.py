"""A client of the gateways, run in a pod of its own: the same questions again and again, a line an answer.

It is handed to its pod as a file, and has nothing but the services' own packages. On SIGTERM what streams is
read to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import signal
import ssl
import sys
import time
from typing import Any

import grpc.aio

from galley.client.client import AsyncClient, GalleyRpcError
from galley.client.options import GenerateOptions, Retries, Tls

PROMPTS = (
    "The ship's cook looked into the pot and output",
    "red, green, blue, yellow, red, green, blue, yellow, red, green,",
    "There are three things that a sailor should never forget. The first",
    "def total(numbers):\n    ",
)
TEMPERATURES = (0.0, 0.8)
_BRIEF_PAUSE_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, default=1, help="asked at once")
    parser.add_argument("--answers", type=int, default=0, help="of each stream; 0: until SIGTERM")
    parser.add_argument("--brief", type=int, default=0, help="asked at once besides, for one token each")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--patience-s", type=float, default=60.0, help="for a stream to go on after it broke")
    parser.add_argument("--pause-s", type=float, default=0.0, help="between the answers of a stream")
    parser.add_argument("--http", default="", help="address of the HTTP API, called once at the end")
    given = parser.parse_args()
    asyncio.run(_run(given))
    return _call_http(given.http) if given.http else 0


def _call_http(address: str) -> int:
    """List the models over HTTP; return 1 if that fails."""
    host, _, port = address.rpartition(":")
    headers = {"Authorization": f"Bearer {os.environ.get('GALLEY_API_KEY', 'nobody')}"}
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    if (tls := _tls()) is not None:
        # The name in the certificate is that of the Service, by which the gateway is called here.
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        host = tls.server_name
        connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=context)
    connection.request("GET", "/v1/models", headers=headers)
    response = connection.getresponse()
    sys.stderr.write(f"HTTP {response.status}: {response.read()[:200]!r}\n")
    return 0 if response.status == http.HTTPStatus.OK else 1


async def _run(given: argparse.Namespace) -> None:
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with asyncio.TaskGroup() as group:
        for first in range(given.streams):
            group.create_task(_stream(given, first, over))
        briefly = argparse.Namespace(**{**vars(given), "max_tokens": 1, "pause_s": _BRIEF_PAUSE_S})
        for first in range(given.brief):
            group.create_task(_stream(briefly, first, over))


async def _stream(given: argparse.Namespace, first: int, over: asyncio.Event) -> None:
    number = first
    request = 0
    while not over.is_set() and (not given.answers or request < given.answers):
        _say(await _answer(given, number % (len(PROMPTS) * len(TEMPERATURES))))
        request += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), given.pause_s)
        number += given.streams


async def _answer(given: argparse.Namespace, question: int) -> dict[str, Any]:
    calls = _Calls()
    retries = Retries(given.patience_s, given.patience_s)
    options = GenerateOptions(
        temperature=TEMPERATURES[question % len(TEMPERATURES)],
        seed=question,
        max_tokens=given.max_tokens,
        ignore_eos=True,
    )
    data: dict[str, Any] = {"question": question, "began_s": time.monotonic(), "first_s": None, "error": ""}
    longest_s, last_s, changed = 0.0, time.monotonic(), 0
    async with AsyncClient(given.address, retries=retries, tls=_tls(), interceptors=[calls]) as client:
        stream = client.stream(PROMPTS[question // len(TEMPERATURES)], **options)
        try:
            async for event in stream:
                now = time.monotonic()
                data["first_s"] = data["first_s"] or now
                longest_s, last_s = max(longest_s, now - last_s), now
                changed += event.WhichOneof("event") == "numerics_changed"
        except GalleyRpcError as error:
            data["error"] = str(error)
    return {
        **data,
        "ended_s": time.monotonic(),
        "max_tokens": given.max_tokens,
        "tokens": stream.tokens,
        "calls": calls.count,
        "longest_pause_s": round(longest_s, 3),
        "numerics_changed": changed,
        "finished": stream.finished is not None,
    }


def _tls() -> Tls | None:
    names = ("ca_file", "cert_file", "key_file", "server_name")
    data = {name: os.environ.get(f"GALLEY_TLS_{name.upper()}", "") for name in names}
    return Tls(**data) if any(data.values()) else None


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class _Calls(grpc.aio.UnaryStreamClientInterceptor):
    """Count the calls to gateways for one answer: one, unless the stream broke."""

    def __init__(self) -> None:
        self.count = 0

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self.count += 1
        return await continuation(client_call_details, request)


if __name__ == "__main__":
    sys.exit(main())
