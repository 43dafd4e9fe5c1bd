"""The images as a stack beside an embedded store: start, probe, call and stop them (for prove_images.py)."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galley.client.client import AsyncClient
from galley.client.options import Speculation
from galley.core.names import NGRAM
from galley.stack.ports import free_ports
from tests.fakes.redis_clusters import TcpServer, serving
from tests.fakes.redis_servers import VALKEY

if TYPE_CHECKING:
    from scripts.images.container import Container, Running

PROMPT, LENGTH, DRAFTED = "One, two, three, four. One, two, three, four. One, two,", 48, 4
_HOST = "127.0.0.1"
_START_S, _STOP_S = 240.0, 60.0
_LOG_END = 1500


class Stack:
    """Containers of the images by role, on free ports of the loopback; they end when `held` is closed."""

    def __init__(self, containers: Mapping[str, Container], store: str, logs: Path, held: ExitStack) -> None:
        self._containers, self._logs, self._held = containers, logs, held
        self._running: dict[str, Running] = {}
        self.ports = {role: free_ports(1)[0] for role in containers}
        self._environments = {role: self._environment(role, store) for role in containers}

    def _environment(self, role: str, store: str) -> dict[str, str]:
        prefix = f"GALLEY_{role.upper()}"
        environment = {f"{prefix}_PORT": str(self.ports[role]), f"{prefix}_REDIS_URL": store}
        environment[f"{prefix}_HEALTH_PORT"] = str(free_ports(1)[0])
        if role == "gateway":
            # No supervisor starts it again if the target loads slowly on a busy machine.
            environment[f"{prefix}_STARTUP_TIMEOUT_S"] = str(3 * _START_S)
        else:
            environment[f"{prefix}_ADVERTISE"] = f"{_HOST}:{self.ports[role]}"
        if role == "draft":
            environment[f"{prefix}_TOKENIZER"] = "/models/default"
        return environment

    def start(self, role: str) -> None:
        """Run the image's entrypoint in a container."""
        container = self._containers[role]
        run = container.running(self._environments[role], self._logs / role)
        self._running[role] = self._held.enter_context(run)

    def probe(self, role: str) -> tuple[int, str]:
        """Return the exit status of the image's HEALTHCHECK, and its error output."""
        container = self._containers[role]
        done = container.run(container.probe, self._environments[role])
        return done.returncode, done.stderr.strip()

    def until(self, role: str, status: int, message: str = "") -> tuple[float, str]:
        """Probe until status and message match; return seconds and message. Raises TimeoutError."""
        began = time.monotonic()
        while (found := self.probe(role))[0] != status or message not in found[1]:
            if time.monotonic() - began > _START_S:
                raise TimeoutError(f"{role}: probe: {found}; log: {self._log_end(role)}")
        return round(time.monotonic() - began, 1), found[1]

    def stop(self, role: str) -> int | None:
        """Return the exit status after SIGTERM; None if it did not end in time."""
        try:
            return self._running[role].stop(_STOP_S)
        except subprocess.TimeoutExpired:
            return None

    def _log_end(self, role: str) -> str:
        return (self._logs / role).read_text()[-_LOG_END:]


def serve(containers: Mapping[str, Container]) -> tuple[dict[str, Any], list[str]]:
    """Run the images together; return what was measured, and what of it is wrong."""
    with (
        tempfile.TemporaryDirectory(prefix="galley-images-") as logs,
        serving(lambda folder: TcpServer(VALKEY, folder, free_ports(1)[0])) as store,
        ExitStack() as held,
    ):
        stack = Stack(containers, f"redis://{store.address}/0", Path(logs), held)
        try:
            found = _together(stack)
        except TimeoutError as error:
            return {}, [str(error)]
    return found, _wrong(found)


def _together(stack: Stack) -> dict[str, Any]:
    stack.start("gateway")
    _, refused = stack.until("gateway", 1, "NOT_SERVING")
    ready_s = {}
    for role, after in (("target", "gateway"), ("draft", "draft")):
        stack.start(role)
        ready_s[role], _ = stack.until(role, 0)
        stack.until(after, 0)
    plain, drafted = asyncio.run(_answers(f"{_HOST}:{stack.ports['gateway']}"))
    return {
        "probe_of_the_gateway_without_a_target": refused,
        "ready_s": ready_s,
        "plain": plain,
        "drafted": drafted,
        "exit_statuses": {role: stack.stop(role) for role in ("gateway", "draft", "target")},
    }


async def _answers(gateway: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answers to one request, decoded plainly and with the draft."""
    async with AsyncClient(gateway) as client:
        async with asyncio.timeout(_START_S):
            while not (await client.model_info()).strategies:  # noqa: ASYNC110  # nobody calls back
                await asyncio.sleep(0.1)
        plain = await _answer(client, Speculation(off=True))
        return plain, await _answer(client, Speculation(k=DRAFTED, strategy=NGRAM))


async def _answer(client: AsyncClient, speculation: Speculation) -> dict[str, Any]:
    tokens: list[int] = []
    text, drafted, accepted = "", 0, 0
    async for event in client.stream(
        PROMPT, max_tokens=LENGTH, temperature=0.0, ignore_eos=True, speculation=speculation
    ):
        tokens += event.chunk.token_ids
        text += event.chunk.text
        drafted += event.finished.speculation.drafted
        accepted += event.finished.speculation.accepted
    return {"tokens": tokens, "text": text, "drafted": drafted, "accepted": accepted}


def _wrong(found: Mapping[str, Any]) -> list[str]:
    plain, drafted = found["plain"], found["drafted"]
    checks = {
        "an answer of another length": len(plain["tokens"]) == LENGTH,
        "other tokens with a draft": plain["tokens"] == drafted["tokens"],
        "no draft token accepted": 0 < drafted["accepted"] <= drafted["drafted"],
        "drafted where nothing was to be": plain["drafted"] == 0,
        f"exit statuses {found['exit_statuses']}": set(found["exit_statuses"].values()) == {0},
    }
    return [name for name, holds in checks.items() if not holds]
