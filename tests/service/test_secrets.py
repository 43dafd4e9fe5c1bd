"""What is secret stands nowhere: in no log, however talkative, no trace, no status, no command line."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest

from services.client.client import NO_RETRIES, GalleyClient, GalleyRpcError
from tests.gateway.issuers import AUDIENCE, ISSUER, TokenIssuer, write_jwks
from tests.service.callers import ALICE, KeyFile
from tests.service.collector import Collector
from tests.service.process import gateway_process
from tests.service.truth import SEED
from tests.service.waiting import PATIENCE_S
from tests.service.world import MAX_TOKENS, PROMPT, World, hear, must_be_true

if TYPE_CHECKING:
    from tests.gateway.servers import Server

PASSWORD, ID_SECRET, UNKNOWN_KEY = "canary-password-71f0", "canary-secret-22ab", "canary-key-90de"
EC = TokenIssuer()
STRANGER = TokenIssuer()


@dataclass
class Shown:
    """All that anybody else may read of what ran."""

    texts: list[bytes] = field(default_factory=list)

    def command_lines(self) -> None:
        """Of our children."""
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


def flags_of(world: World, store: Server) -> dict[str, str]:
    """With every secret that a gateway can have, each in its file."""
    return {
        "redis-url": "",
        "redis-url-file": secret_file(world.directory, "url", url_of(store)),
        "id-secret-file": secret_file(world.directory, "id", ID_SECRET),
        "api-keys-file": KeyFile().write(world),
        "jwt-issuer": ISSUER,
        "jwt-audience": AUDIENCE,
        "jwt-jwks-file": str(write_jwks(world.directory / "jwks.json", EC)),
        "store-timeout-s": "0.3",
        "log-level": "debug",
    }


async def ask(address: str, shown: str) -> str:
    """How a call ends; empty if all went well."""
    async with GalleyClient(address, retries=NO_RETRIES, api_key=shown) as client:
        try:
            stream = client.generate(PROMPT, max_tokens=MAX_TOKENS, seed=SEED, ignore_eos=True)
            must_be_true(await hear(stream))
        except GalleyRpcError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("own_store", ["valkey"], indirect=True)
async def test_a_gateway_shows_none_of_its_secrets_whatever_fails(
    frail_world: World, own_store: Server, tmp_path: Path
) -> None:
    # Made now, as they expire: a whole run of the tests takes longer than they last.
    good, bad = EC.token(sub="carol"), STRANGER.token(sub="canary-mallory-3a")
    world, log, shown = frail_world, tmp_path / "log", Shown()
    await allow(own_store)
    async with Collector(world.directory) as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        async with gateway_process(world, log, environment, flags_of(world, own_store)) as address:
            shown.command_lines()
            for known in (ALICE, good):
                assert await ask(address, known) == ""
            for unknown in (UNKNOWN_KEY, bad, good[:-2]):
                refused = await ask(address, unknown)
                assert refused.startswith("UNAUTHENTICATED")
                shown.texts.append(refused.encode())
            own_store.kill()
            own_store.start()  # and knows its users no more
            for known in (ALICE, good):
                failed = await ask(address, known)
                assert failed.startswith("UNAVAILABLE")
                shown.texts.append(failed.encode())
            await collector.has("text_completion tiny")
        shown.texts += [collector.exported, log.read_bytes()]
    assert b"text_completion" in collector.exported
    assert b"WRONGPASS" in log.read_bytes() or b"password" in log.read_bytes()
    shown.holds_no(PASSWORD, ID_SECRET, UNKNOWN_KEY, ALICE, *bad.split("."), *good.split(".")[1:])


async def run(module: str, *flags: str, until: bytes = b"") -> tuple[int, bytes]:
    """The exit status of a process, and all that it said; it is ended once it has said `until`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--die-with-parent", "--log-level", "debug", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ},
    )
    said = b""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for line in process.stdout:
                said += line
                if until and until in said:
                    process.terminate()
                    until = b""
            return await process.wait(), said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_store_that_refuses_the_password_is_told_without_it(
    world: World, shared_store: Server
) -> None:
    url = secret_file(world.directory, "url", url_of(shared_store, PASSWORD))
    flags = ("--target", world.target.address, "--draft", "none", "--model", str(world.tokenizer))
    status, said = await run(
        "services.gateway", *flags, "--redis-url-file", url, "--startup-timeout-s", "0.5"
    )
    assert status == 1
    assert b"cannot start" in said
    assert PASSWORD.encode() not in said


async def test_a_replica_that_cannot_register_says_so_without_its_password(
    world: World, shared_store: Server
) -> None:
    url = secret_file(world.directory, "url", url_of(shared_store, PASSWORD))
    flags = ("--tokenizer", str(world.tokenizer), "--redis-url-file", url)
    status, said = await run("services.draft", *flags, until=b"not registered")
    assert status == 0
    assert b"not registered" in said
    assert PASSWORD.encode() not in said


async def test_a_bearer_of_any_shape_is_refused_in_the_same_words(world: World) -> None:
    """Or gRPC itself refuses it, which knows no words of ours."""
    gateway = await world.gateway(
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        jwt_jwks_file=str(write_jwks(world.directory / "jwks.json", EC)),
    )
    told = set()
    for shown in ("canary", "a.b.c", "." * 8000, "eyJ" + "A" * 9000, STRANGER.token(sub="canary-mallory-3a")):
        async with GalleyClient(gateway.address, api_key=shown) as client:
            with pytest.raises(GalleyRpcError) as caught:
                await client.model_info()
        assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
        told.add(caught.value.message)
    assert len(told) == 1
