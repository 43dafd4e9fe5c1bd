"""Callers with signed tokens at a whole gateway: served, told apart, and refused before anything is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from galley.client.client import AsyncClient
from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from services.gateway.auth.jwks import MIN_FETCH_INTERVAL_S
from services.gateway.auth.jwt import JWT_EXPIRED, JWT_REFUSED
from tests.fakes.http2 import opening, wire
from tests.fakes.http_client import BODY, http_client
from tests.fakes.issuers import AUDIENCE, ISSUER, IssuerServer, TokenIssuer, issuer_server, jwks, write_jwks
from tests.fakes.readings import number, total
from tests.fakes.world import MAX_TOKENS, World, must_be_true, receive, refused
from tests.integration.services.gateway.callers import ALICE, KeyFile, calling

EC = TokenIssuer()
GENERATE = "/galley.v1.Generation/Generate"


@pytest.fixture
async def issuer(tmp_path: Path) -> AsyncIterator[IssuerServer]:
    async with issuer_server(tmp_path) as serving:
        yield serving


def tokens(world: World, **more: object) -> dict[str, object]:
    path = write_jwks(world.directory / "jwks.json", EC)
    return {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_jwks_file": str(path), **more}


async def test_a_token_names_a_principal_of_its_own(world: World) -> None:
    gateway = await world.gateway(**tokens(world, api_keys_file=KeyFile().write(world)))
    idempotent = f"key-{world.id}"
    ids = []
    for output in (ALICE, EC.token(sub="alice"), EC.token(sub="alice", exp=int(time.time()) + 60)):
        async with calling(gateway, output) as caller:
            stream = caller.generate(idempotency_key=idempotent)
            must_be_true(await receive(stream))
            ids.append(stream.session_id)
    assert ids[0] != ids[1] == ids[2]
    async with calling(gateway, EC.token(sub="alice")) as caller:
        assert (await refused(receive(caller.client.resume(ids[0], 0)))).code is grpc.StatusCode.NOT_FOUND
        must_be_true(await receive(caller.client.resume(ids[1], 0)))


async def test_a_bad_token_is_refused_before_any_work(world: World) -> None:
    gateway = await world.gateway(**tokens(world))
    for output, reported in (
        (TokenIssuer().token(), JWT_REFUSED),
        (EC.token(aud="other"), JWT_REFUSED),
        (EC.token(exp=int(time.time()) - 60), JWT_EXPIRED),
        ("", "needed"),
    ):
        async with calling(gateway, output) as caller:
            client = caller.client
            for call in (
                receive(caller.generate()),
                receive(client.resume("0" * 32, 0)),
                client.model_info(),
            ):
                error = await refused(call)
                assert error.code is grpc.StatusCode.UNAUTHENTICATED
                assert reported in error.message
    assert not world.target.calls
    assert not world.draft.calls


async def test_an_unauthenticated_request_is_not_read(world: World) -> None:
    gateway = await world.gateway(**tokens(world))
    async with wire(gateway.address) as stranger:
        await stranger.begin()
        await stranger.send(opening(1, GENERATE))
        assert await stranger.status(1) == "16"


async def test_a_stream_outlives_its_token(world: World) -> None:
    gateway = await world.gateway(**tokens(world, jwt_leeway_s=0))
    world.target.gate.close_after(1)
    expires = int(time.time()) + 2
    async with calling(gateway, EC.token(exp=expires)) as caller:
        stream = caller.generate()
        received = await receive(stream, until=1)
        await asyncio.sleep(expires + 0.1 - time.time())
        assert JWT_EXPIRED in (await refused(caller.client.model_info())).message
        world.target.gate.open()
        must_be_true(await received.listen(stream))
    async with calling(gateway, EC.token()) as caller:
        must_be_true(await receive(caller.client.resume(stream.session_id, 0)))


async def test_a_client_brings_a_fresh_token_with_each_call(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await world.gateway(**tokens(world))
    output = [EC.token(), "stale", EC.token()]
    async with AsyncClient(gateway.address, api_key=lambda: output.pop(0)) as client:
        await client.model_info()
        assert (await refused(client.model_info())).code is grpc.StatusCode.UNAUTHENTICATED
        await client.model_info()
    file = tmp_path / "token"
    file.write_text("stale")
    monkeypatch.setenv("GALLEY_API_KEY_FILE", str(file))
    async with AsyncClient(gateway.address) as client:
        assert (await refused(client.model_info())).code is grpc.StatusCode.UNAUTHENTICATED
        file.write_text(EC.token() + "\n")
        await client.model_info()
        file.unlink()
        with pytest.raises(ValueError, match="No such file"):
            await client.model_info()


async def test_unknown_key_ids_do_not_flood_the_issuer(world: World, issuer: IssuerServer) -> None:
    issuer.publish("/keys", jwks(EC))
    began_s = time.monotonic()
    gateway = await world.gateway(
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        jwt_jwks_url=issuer.url + "/keys",
        jwt_ca_file=issuer.ca_file,
    )
    async with calling(gateway, EC.token()) as caller:
        must_be_true(await receive(caller.generate()))
    assert issuer.requests == ["/keys"]
    for made_up in range(50):
        async with calling(gateway, EC.token({"kid": f"made-up-{made_up}"})) as caller:
            assert (await refused(caller.client.model_info())).message.endswith(JWT_REFUSED)
    assert len(issuer.requests) <= 1 + (time.monotonic() - began_s) // MIN_FETCH_INTERVAL_S


async def test_tokens_are_unavailable_while_the_issuer_is_away(world: World, issuer: IssuerServer) -> None:
    gateway = await world.gateway(
        jwt_issuer=issuer.url,
        jwt_audience=AUDIENCE,
        jwt_ca_file=issuer.ca_file,
        api_keys_file=KeyFile().write(world),
    )
    async with calling(gateway, EC.token(iss=issuer.url)) as caller:
        error = await refused(caller.client.model_info())
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert "issuer cannot be fetched" in error.message
        assert issuer.url not in error.message
    async with calling(gateway, ALICE) as caller:
        must_be_true(await receive(caller.generate(max_tokens=MAX_TOKENS)))


async def test_streams_that_an_absent_issuer_fails_are_errors_of_the_server(
    world: World, issuer: IssuerServer
) -> None:
    """They use the error budget, so that somebody hears of it; bad tokens and other calls do not."""
    registry = Registry(GATEWAY)
    gateway = await world.gateway_of(
        Parts(metrics=registry),
        http_port=0,
        jwt_issuer=issuer.url,
        jwt_audience=AUDIENCE,
        jwt_ca_file=issuer.ca_file,
        api_keys_file=KeyFile().write(world),
    )

    def failed() -> float:
        return number(registry, catalogue.STREAMS, "unavailable", "server")

    token = EC.token(iss=issuer.url)
    async with calling(gateway, token) as caller:
        for call in (receive(caller.generate()), receive(caller.client.resume("0" * 32, 0))):
            assert (await refused(call)).code is grpc.StatusCode.UNAVAILABLE
        assert failed() == 2
        await refused(caller.client.model_info())
    async with calling(gateway, "unknown") as caller:
        await refused(receive(caller.generate()))
    assert failed() == 2
    async with http_client(gateway.http) as client:
        headers = {"authorization": f"Bearer {token}"}
        assert (await client.raw.post("/v1/completions", json=BODY, headers=headers)).status_code == 503
        assert failed() == 3
        assert (await client.raw.get("/v1/models", headers=headers)).status_code == 503
    assert failed() == total(registry, catalogue.STREAMS) == 3
