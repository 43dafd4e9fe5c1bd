"""The gateway between its client, a target and a draft, over TLS: who is trusted, and files that change."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from galley.client.client import NO_RETRIES, AsyncClient
from galley.client.options import Speculation, Tls
from galley.common.metrics.catalogue import PEER_CERTIFICATE_EXPIRY, SERVED_CERTIFICATE_EXPIRY
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from galley.common.tls.files import CHECK_INTERVAL_S
from galley.core.errors import TargetUnavailable
from services.gateway.settings import GatewaySettings
from tests.fakes.certificates import DAY, Authority, Mounted, mounted
from tests.fakes.issuers import AUDIENCE, ISSUER, TokenIssuer, write_jwks
from tests.fakes.mounts import hanging, require_mounts
from tests.fakes.readings import number, total
from tests.fakes.replicas import Replica
from tests.fakes.tls_servers import credentials_of, tls_settings
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import Gateway, Received, World, any_credit, must_be_true, receive, refused
from tests.integration.services.gateway.callers import ALICE, KeyFile

LONG = 400
"""Tokens of an answer that takes as long as it takes to replace files."""
PARTIES = ("target", "draft", "gateway", "peer", "client")
"""`peer` is the gateway as targets and drafts see it."""


class Mesh:
    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.authority = Authority(directory, "authority")
        self.other = Authority(directory, "other")
        self._parts = {
            name: mounted(directory / name, self.authority.ca, self.authority.issue(name)) for name in PARTIES
        }

    def __getitem__(self, name: str) -> Mounted:
        return self._parts[name]

    async def secure(self, replica: Replica, name: str, *, mutual: bool = True) -> None:
        await replica.stop()
        replica.credentials = credentials_of(self[name], mutual=mutual)
        await replica.start()

    async def secure_both(self) -> None:
        await self.secure(self.world.target, "target")
        await self.secure(self.world.draft, "draft")

    def peers(self, **given: str) -> dict[str, str]:
        files = self["peer"]
        fields = {"peer_ca_file": files.ca, "peer_cert_file": files.cert, "peer_key_file": files.key}
        return {**fields, "target_tls_name": "target", "draft_tls_name": "draft", **given}

    async def start_gateway(self, **given: object) -> Gateway:
        return await self.world.gateway(**self.peers(), **tls_settings(self["gateway"], mutual=True), **given)

    @asynccontextmanager
    async def calling(
        self, gateway: Gateway, name: str = "client", api_key: str = ""
    ) -> AsyncIterator[Gateway]:
        files = self[name]
        tls = Tls(files.ca, files.cert, files.key)
        async with AsyncClient(gateway.address, retries=NO_RETRIES, tls=tls, api_key=api_key) as client:
            yield replace(gateway, client=client)

    def put(self, ca: bytes, issuer: Authority, suffix: str) -> None:
        for name in PARTIES:
            pair = issuer.issue(f"{name}{suffix}" if name in {"peer", "client"} else name)
            self[name].put(ca=ca, cert=pair.cert, key=pair.key)


@pytest.fixture
def mesh(world: World, tmp_path: Path) -> Mesh:
    return Mesh(world, tmp_path)


@any_credit
async def test_an_answer_comes_over_tls_on_every_hop(mesh: Mesh) -> None:
    await mesh.secure_both()
    gateway = await mesh.start_gateway()
    async with mesh.calling(gateway) as seen:
        received = await receive(seen.generate())
    must_be_true(received)
    assert mesh.world.draft.answered
    assert (mesh.world.target.streams, mesh.world.draft.streams) == (["peer"], ["peer"])


async def test_the_expiry_of_the_peer_certificate_is_reported(mesh: Mesh) -> None:
    await mesh.secure_both()
    registry = Registry(GATEWAY)
    await mesh.world.gateway_of(Parts(metrics=registry), **mesh.peers())
    left_s = number(registry, PEER_CERTIFICATE_EXPIRY) - dt.datetime.now(dt.UTC).timestamp()
    assert left_s == pytest.approx(DAY.total_seconds(), abs=60)
    assert total(registry, SERVED_CERTIFICATE_EXPIRY) == 0, "it serves in plain text"


async def _wrong_authority(mesh: Mesh) -> dict[str, str]:
    await mesh.secure(mesh.world.target, "target")
    return mesh.peers(peer_ca_file=str(mesh.other.ca))


async def _wrong_name(mesh: Mesh) -> dict[str, str]:
    await mesh.secure(mesh.world.target, "target")
    return mesh.peers(target_tls_name="another")


async def _foreign_certificate(mesh: Mesh) -> dict[str, str]:
    await mesh.secure(mesh.world.target, "target")
    mesh["peer"].put_pair(mesh.authority.ca, mesh.other.issue("peer"))
    return mesh.peers()


async def _plain_target(mesh: Mesh) -> dict[str, str]:
    return mesh.peers()


@pytest.mark.parametrize(
    ("arrange", "why"),
    [
        (_wrong_authority, "CERTIFICATE_VERIFY_FAILED"),
        (_wrong_name, "Hostname Verification Check failed"),
        (_foreign_certificate, "failed to connect"),
        (_plain_target, "WRONG_VERSION_NUMBER"),
    ],
)
async def test_a_target_that_is_not_trusted_is_refused(mesh: Mesh, arrange: Any, why: str) -> None:
    given = await arrange(mesh)
    with pytest.raises(TargetUnavailable, match=why):
        await mesh.world.gateway(startup_timeout_s=0.5, **given)
    assert not mesh.world.target.calls


async def test_a_draft_that_is_not_trusted_is_not_used(mesh: Mesh) -> None:
    await mesh.secure_both()
    mesh["draft"].put_pair(mesh.authority.ca, mesh.other.issue("draft"))
    gateway = await mesh.start_gateway()
    async with mesh.calling(gateway) as seen:
        received = await receive(seen.generate())
    must_be_true(received)
    assert not any(received.from_draft)
    assert not mesh.world.draft.calls


async def test_a_client_needs_a_certificate(mesh: Mesh) -> None:
    await mesh.secure_both()
    gateway = await mesh.start_gateway()
    ours, foreign = mesh["client"], mounted(mesh.directory / "x", mesh.authority.ca, mesh.other.issue("x"))
    for tls in (None, Tls(ours.ca), Tls(foreign.ca, foreign.cert, foreign.key)):
        async with AsyncClient(gateway.address, retries=NO_RETRIES, tls=tls) as client:
            assert (
                await refused(receive(replace(gateway, client=client).generate()))
            ).code.name == "UNAVAILABLE"
    assert not mesh.world.target.calls


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"peer_ca_file": "/ca", "peer_cert_file": "/c"}, "must be set together with --peer-key-file"),
        ({"peer_cert_file": "/c", "peer_key_file": "/k"}, "peer-cert-file: must be empty without"),
        ({"target_tls_name": "target"}, "--target-tls-name: must be empty without --peer-ca-file"),
        ({"draft_tls_name": "draft"}, "--draft-tls-name: must be empty without --peer-ca-file"),
    ],
)
def test_incomplete_peer_tls_settings_are_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GatewaySettings.model_validate(given)


class Answering:
    def __init__(self, mesh: Mesh, gateway: Gateway) -> None:
        self._gate = mesh.world.target.gate
        self._gate.close()
        self._stream = gateway.generate(max_tokens=LONG, speculation=Speculation(k=1))
        self._received = Received()

    async def goes_on(self) -> None:
        self._gate.permit()
        await self._received.listen(self._stream, until=len(self._received.tokens) + 1)
        assert self._received.finished is None

    async def ends_as_it_must(self) -> None:
        self._gate.open()
        must_be_true(await self._received.listen(self._stream), max_tokens=LONG)

    async def until_spoken_to_by(self, mesh: Mesh, caller: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while {*mesh.world.target.streams, *mesh.world.draft.streams} != {caller}:
                await self.goes_on()
                await asyncio.sleep(0.05)


async def test_authorities_and_certificates_are_replaced_under_a_stream(mesh: Mesh) -> None:
    old, new = mesh.authority.ca.read_bytes(), mesh.other.ca.read_bytes()
    await mesh.secure_both()
    gateway = await mesh.start_gateway(client_timeout_s=PATIENCE_S)
    async with mesh.calling(gateway) as seen:
        answering = Answering(mesh, seen)
        await answering.goes_on()
        mesh.put(old + new, mesh.authority, "-2")
        await answering.until_spoken_to_by(mesh, "peer-2")
        mesh.put(old + new, mesh.other, "-3")
        await answering.until_spoken_to_by(mesh, "peer-3")
        mesh.put(new, mesh.other, "-4")
        await answering.until_spoken_to_by(mesh, "peer-4")
        await answering.ends_as_it_must()
    async with mesh.calling(gateway) as newer:
        must_be_true(await receive(newer.generate()))
    mesh["client"].put_pair(mesh.authority.ca, mesh.authority.issue("client"))
    async with mesh.calling(gateway) as older:
        assert (await refused(receive(older.generate()))).code.name == "UNAVAILABLE"


async def test_new_connections_and_calls_go_on_while_the_mounts_of_all_files_hang(mesh: Mesh) -> None:
    require_mounts()
    await mesh.secure_both()
    issuer, auth = TokenIssuer(), mesh.directory / "auth"
    auth.mkdir()
    gateway = await mesh.start_gateway(
        api_keys_file=KeyFile().write_to(auth),
        jwt_jwks_file=str(write_jwks(auth / "jwks", issuer)),
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
    )
    with ExitStack() as mounts:
        for name in ("target", "draft", "gateway", "peer", "auth"):
            mounts.enter_context(hanging(mesh.directory / name))
        until_s = time.monotonic() + 2 * CHECK_INTERVAL_S
        while time.monotonic() < until_s:
            for key in (ALICE, issuer.token()):
                async with mesh.calling(gateway, api_key=key) as seen:
                    must_be_true(await receive(seen.generate()))
