"""What is secret stands nowhere: in no log, however talkative, no trace, no status, no command line."""

from __future__ import annotations

import asyncio
import tempfile
import urllib.request
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest

from galley.client.client import NO_RETRIES, AsyncClient, GalleyRpcError
from galley.client.options import Tls
from tests.fakes.certificates import Authority, mounted
from tests.fakes.collector import Collector
from tests.fakes.issuers import AUDIENCE, ISSUER, TokenIssuer, write_jwks
from tests.fakes.processes import service_process
from tests.fakes.redis_servers import Server
from tests.fakes.tiny_model import save_tiny_model
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import World, receive
from tests.integration.services.gateway.callers import ALICE, KeyFile

PASSWORD, ID_SECRET, UNKNOWN_KEY = "canary-password-71f0", "canary-secret-22ab", "canary-key-90de"
OTLP_TOKEN = "canary-otlp-5e01"
EC = TokenIssuer()
OTHER = TokenIssuer()


@dataclass
class Outputs:
    texts: list[bytes] = field(default_factory=list)

    def command_lines(self) -> None:
        children = psutil.Process().children(recursive=True)
        self.texts += [" ".join(child.cmdline()).encode() for child in children]

    def holds_no(self, *secrets: str) -> None:
        everything = b"\n".join(self.texts)
        assert [secret for secret in secrets if secret.encode() in everything] == []


def secret_file(directory: Path, name: str, content: str) -> str:
    path = directory / name
    path.write_text(content + "\n")
    return str(path)


def url_of(store: Server, password: str = PASSWORD) -> str:
    return store.url.replace("unix://", f"unix://galley:{password}@")


async def allow(store: Server) -> None:
    await store.command("ACL", "SETUSER", "galley", "reset", "on", f">{PASSWORD}", "~*", "+@all")


class Mesh:
    def __init__(self, directory: Path, store: Server, model: Path, opened: AsyncExitStack) -> None:
        authority = Authority(directory, "authority")
        self._files = mounted(directory / "files", authority.ca, authority.issue("all"))
        self.tls = Tls(self._files.ca, self._files.cert, self._files.key)
        self.private = Path(self._files.key).read_text().splitlines()[1]
        self.model = str(model)
        self.logs: dict[str, Path] = {}
        self.metrics: list[str] = []
        self._directory = directory
        self._opened = opened
        self._store = {"redis-url-file": secret_file(directory, "url", url_of(store))}
        self._served = {
            "metrics-port": "0",
            "log-level": "debug",
            "tls-cert-file": self._files.cert,
            "tls-key-file": self._files.key,
            "tls-client-ca-file": self._files.ca,
        }

    def sent_to_peers(self) -> dict[str, str]:
        files = self._files
        return {"peer-ca-file": files.ca, "peer-cert-file": files.cert, "peer-key-file": files.key}

    async def start(self, role: str, collector: Collector, flags: Mapping[str, str]) -> str:
        self.logs[role] = self._directory / f"{role}.log"
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={OTLP_TOKEN}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        all_flags = {**self._served, **self._store, **flags}
        response = await self._opened.enter_async_context(
            service_process(f"services.{role}", self.logs[role], environment, all_flags)
        )
        self.metrics.append(f"http://{response['metrics']}/metrics")
        return response["address"]

    async def generate(self, gateway: str, key: str) -> str:
        async with AsyncClient(gateway, retries=NO_RETRIES, api_key=key, tls=self.tls) as client:
            try:
                await receive(client.stream([5, 9, 2, 33], max_tokens=8, temperature=0, ignore_eos=True))
            except GalleyRpcError as error:
                return str(error)
        return ""

    async def scraped(self) -> list[bytes]:
        return [await asyncio.to_thread(_get, url) for url in self.metrics]

    async def have_missed_the_store(self) -> None:
        logs = [self.logs[role] for role in ("target", "draft")]
        async with asyncio.timeout(PATIENCE_S):
            while not all(b"registration failed" in log.read_bytes() for log in logs):  # noqa: ASYNC110  # a file
                await asyncio.sleep(0.05)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        content: bytes = answer.read()
    return content


async def test_no_service_shows_a_secret(own_store: Server, tmp_path: Path) -> None:
    # Made now, as they expire: a whole run of the tests takes longer than they last.
    good, bad = EC.token(sub="carol"), OTHER.token(sub="canary-mallory-3a")
    output = Outputs()
    await allow(own_store)
    with tempfile.TemporaryDirectory(prefix="galley-") as folder:
        async with Collector(Path(folder)) as collector, AsyncExitStack() as opened:
            mesh = Mesh(tmp_path, own_store, save_tiny_model(tmp_path / "tiny"), opened)
            target = await mesh.start("target", collector, {"model": mesh.model, "dtype": "float32"})
            draft = await mesh.start("draft", collector, {"tokenizer": mesh.model})
            gateway = await mesh.start(
                "gateway",
                collector,
                {
                    "model": mesh.model,
                    "target": target,
                    "draft": draft,
                    "id-secret-file": secret_file(tmp_path, "id", ID_SECRET),
                    "api-keys-file": KeyFile().write_to(tmp_path),
                    "jwt-issuer": ISSUER,
                    "jwt-audience": AUDIENCE,
                    "jwt-jwks-file": str(write_jwks(tmp_path / "jwks.json", EC)),
                    "store-timeout-s": "0.3",
                    **mesh.sent_to_peers(),
                },
            )
            output.command_lines()
            for key in (ALICE, good):
                assert await mesh.generate(gateway, key) == ""
            for key in (UNKNOWN_KEY, bad, good[:-2]):
                error = await mesh.generate(gateway, key)
                assert error.startswith("UNAUTHENTICATED")
                output.texts.append(error.encode())
            output.texts += await mesh.scraped()
            own_store.kill()
            own_store.start()
            for key in (ALICE, good):
                error = await mesh.generate(gateway, key)
                assert error.startswith("UNAVAILABLE")
                output.texts.append(error.encode())
            await mesh.have_missed_the_store()
            output.texts += await mesh.scraped()
        for role, log in mesh.logs.items():
            assert f"galley-{role}".encode() in collector.exported
            assert any(f'service="{role}"'.encode() in text for text in output.texts), "its metrics"
            assert any(f"services.{role}".encode() in text for text in output.texts), "its command line"
            assert b"WRONGPASS" in log.read_bytes() or b"password" in log.read_bytes()
            output.texts.append(log.read_bytes())
        output.texts.append(collector.exported)
    output.holds_no(PASSWORD, ID_SECRET, ALICE, UNKNOWN_KEY, OTLP_TOKEN, mesh.private)
    output.holds_no(*bad.split("."), *good.split(".")[1:])


async def test_every_bad_bearer_gets_the_same_error(world: World) -> None:
    gateway = await world.gateway(
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        jwt_jwks_file=str(write_jwks(world.directory / "jwks.json", EC)),
    )
    reported = set()
    for output in ("canary", "a.b.c", "." * 8000, "eyJ" + "A" * 9000, OTHER.token(sub="canary-mallory-3a")):
        async with AsyncClient(gateway.address, api_key=output) as client:
            with pytest.raises(GalleyRpcError) as caught:
                await client.model_info()
        assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
        reported.add(caught.value.message)
    assert len(reported) == 1
