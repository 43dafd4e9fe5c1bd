"""TLS of servers and channels: who is let in, who is not, and what happens when files are replaced."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from galley.common.metrics.catalogue import SERVED_CERTIFICATE_EXPIRY
from galley.common.metrics.registry import Registry
from galley.common.server.acceptors import ACCEPTORS
from galley.common.server.server import Parts, start_server
from galley.common.tls import channels as reloading_module
from galley.common.tls import files
from galley.common.tls.channels import Material, ReloadingChannel, channel_credentials
from galley.common.tls.files import BadFile
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.certificates import DAY, Authority, Mounted, mounted
from tests.fakes.echo_service import EchoService, building, settings
from tests.fakes.log_lines import logged
from tests.fakes.readings import number
from tests.fakes.tls_servers import (
    PATIENCE_S,
    Stream,
    ask,
    connection_error,
    files_of,
    open_to,
    refusal,
    serving,
    tls_settings,
)

WRONG_CA, WRONG_NAME = "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed"


class Parties:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory, "authority")
        self.other = Authority(directory, "other")
        self.server = mounted(directory / "server", self.authority.ca, self.authority.issue("server"))
        self.client = mounted(directory / "client", self.authority.ca, self.authority.issue("client"))
        self.stranger = mounted(directory / "stranger", self.authority.ca, self.other.issue("stranger"))

    def trusting(self, authority: Authority, of: Authority) -> Mounted:
        return mounted(self.directory / "another", authority.ca, of.issue("another"))


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path)


async def test_server_with_a_certificate_is_reached_over_tls(parties: Parties) -> None:
    async with serving(EchoService(), parties.server, mutual=False) as running:
        assert await connection_error(running, parties.client, own=False) == ""
        assert await connection_error(running, parties.client, name="server") == ""


async def test_server_that_requires_certificates_identifies_its_callers(parties: Parties) -> None:
    service = EchoService()
    async with serving(service, parties.server) as running:
        assert await connection_error(running, parties.client) == ""
    assert service.callers == ["client"]


async def test_client_sends_nothing_to_an_untrusted_server(parties: Parties) -> None:
    service = EchoService()
    async with serving(service, parties.server, mutual=False) as running:
        mistrustful = parties.trusting(parties.other, parties.authority)
        assert WRONG_CA in await connection_error(running, mistrustful)
        assert WRONG_NAME in await connection_error(running, parties.client, name="somebody-else")
    assert not service.entered.is_set()


async def test_a_certificate_that_has_expired_is_not_trusted(parties: Parties) -> None:
    expired = parties.authority.issue("server", until=-dt.timedelta(seconds=1))
    server = grpc.aio.server()
    pair = (expired.key.read_bytes(), expired.cert.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    credentials = channel_credentials(files_of(parties.client).read())
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        response = await refusal(channel)
    await server.stop(None)
    assert "certificate has expired" in response


@pytest.mark.parametrize("who", ["plain", "without a certificate", "of another authority"])
async def test_caller_without_a_trusted_certificate_is_refused(parties: Parties, who: str) -> None:
    service = EchoService()
    async with serving(service, parties.server) as running:
        match who:
            case "plain":
                response = await connection_error(running, None)
            case "without a certificate":
                response = await connection_error(running, parties.client, own=False)
            case _:
                response = await connection_error(running, parties.stranger)
        assert response
        assert await connection_error(running, parties.client) == ""
    assert service.callers == ["client"]


async def test_server_only_certificate_is_refused_for_clients(parties: Parties) -> None:
    pair = parties.authority.issue("server", usages=(ExtendedKeyUsageOID.SERVER_AUTH,))
    output = Material(parties.authority.ca.read_bytes(), pair.cert.read_bytes(), pair.key.read_bytes())
    service = EchoService()
    async with serving(service, parties.server) as running:
        # Our own channels refuse such files at once.
        credentials = channel_credentials(output)
        async with grpc.aio.secure_channel(running.address, credentials) as channel:
            assert await refusal(channel)
    assert not service.entered.is_set()


async def test_nothing_is_sent_in_plain_text_to_a_server_that_speaks_no_tls(parties: Parties) -> None:
    service = EchoService()
    async with serving(service, None) as running:
        assert await connection_error(running, parties.client)
        assert not service.entered.is_set()
        assert await connection_error(running, None) == ""


async def test_unusable_file_prevents_server_start(parties: Parties) -> None:
    parties.server.put(ca=parties.authority.ca, cert=parties.authority.issue("x").cert, key=b"no key")
    built = EchoService()
    with pytest.raises(BadFile) as refused:
        await start_server(settings(**tls_settings(parties.server, mutual=True)), building(built))
    assert refused.value.setting == "tls_key_file"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tls_cert_file": "/c"}, "--tls-cert-file, --tls-key-file: must be given together"),
        ({"tls_key_file": "/k"}, "--tls-cert-file, --tls-key-file: must be given together"),
        ({"tls_client_ca_file": "/ca"}, "--tls-client-ca-file: requires --tls-cert-file"),
    ],
)
def test_half_of_what_tls_needs_is_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings(**given)


async def test_server_uses_new_certificate_for_new_connections_only(
    parties: Parties,
) -> None:
    newer = parties.trusting(parties.other, parties.authority)
    async with (
        serving(EchoService(), parties.server) as running,
        open_to(running, parties.client) as channel,
    ):
        stream = Stream(channel)
        await stream.must_live()
        parties.server.put_pair(parties.authority.ca, parties.other.issue("server"))
        for _ in range(3 * ACCEPTORS):
            assert WRONG_CA in await connection_error(running, parties.client)
            assert await connection_error(running, newer) == ""
        await stream.must_live()
        await stream.end()


async def test_a_server_asks_for_certificates_of_its_new_authority(parties: Parties) -> None:
    service = EchoService()
    async with serving(service, parties.server) as running, open_to(running, parties.client) as channel:
        stream = Stream(channel)
        await stream.must_live()
        parties.server.put_pair(parties.other.ca, parties.authority.issue("server"))
        assert await connection_error(running, parties.client)
        assert await connection_error(running, parties.stranger) == ""
        await stream.must_live()
        await stream.end()
    assert service.callers == ["stranger"]


async def test_server_keeps_its_certificate_while_the_new_one_is_unusable(parties: Parties) -> None:
    async with serving(EchoService(), parties.server) as running:
        assert await connection_error(running, parties.client) == ""
        newer = parties.other.issue("server")
        parties.server.put(ca=parties.authority.ca, cert=newer.cert, key=b"half written")
        with logged(files) as logs:
            assert await connection_error(running, parties.client) == ""
            assert await connection_error(running, parties.client) == ""
        [line] = [line for line in logs if line["log_level"] == "error"]
        assert line["error"].startswith("tls_key_file: ")
        parties.server.put_pair(parties.authority.ca, newer)
        assert WRONG_CA in await connection_error(running, parties.client)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"usages": (ExtendedKeyUsageOID.CLIENT_AUTH,)}, "must include serverAuth"),
        ({"since": dt.timedelta(hours=1)}, "is not valid before"),
        ({"until": -dt.timedelta(seconds=1)}, "has expired"),
    ],
    ids=["for clients", "too early", "too late"],
)
async def test_unusable_certificate_does_not_replace_a_good_one(
    parties: Parties, how: dict[str, Any], why: str
) -> None:
    async with serving(EchoService(), parties.server) as running:
        parties.server.put_pair(parties.authority.ca, parties.authority.issue("server", **how))
        with logged(files) as logs:
            assert await connection_error(running, parties.client) == ""
        assert {why in line["error"] for line in logs} == {True}  # twice if looked at between the two files


async def test_expiry_of_the_served_certificate_is_reported(parties: Parties) -> None:
    registry = Registry("draft")
    given = settings(**tls_settings(parties.server, mutual=True))
    running = await start_server(given, building(EchoService()), Parts(metrics=registry))
    for until in (DAY, 30 * DAY):
        parties.server.put_pair(parties.authority.ca, parties.authority.issue("server", until=until))
        expected = pytest.approx((dt.datetime.now(dt.UTC) + until).timestamp(), abs=60)
        async with asyncio.timeout(PATIENCE_S):
            while number(registry, SERVED_CERTIFICATE_EXPIRY) != expected:  # noqa: ASYNC110  # a thread reads it
                await asyncio.sleep(0.01)
    await running.stop()


class Reloading:
    def __init__(self, address: str, files: Mounted) -> None:
        self.opened: list[grpc.aio.Channel] = []
        self._address = address
        watched = files_of(files).watch()
        self.channel = ReloadingChannel(address, self._open, watched)

    def _open(self, material: Material) -> grpc.aio.Channel:
        self.opened.append(grpc.aio.secure_channel(self._address, channel_credentials(material)))
        return self.opened[-1]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110  # gRPC calls nobody back
                await asyncio.sleep(0.01)


@pytest.fixture
async def service() -> EchoService:
    return EchoService()


@pytest.fixture
async def reloading(parties: Parties, service: EchoService) -> AsyncIterator[Reloading]:
    async with serving(service, parties.server) as running:
        reloading = Reloading(running.address, parties.client)
        async with reloading.channel:
            yield reloading


def _is_closed(channel: grpc.aio.Channel) -> bool:
    try:
        return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    except grpc.aio.UsageError:
        return True


async def test_calls_go_by_the_new_certificate_once_a_connection_with_it_stands(
    parties: Parties, service: EchoService, reloading: Reloading
) -> None:
    stream = Stream(reloading.channel)
    await stream.must_live()
    await ask(reloading.channel)
    parties.client.put_pair(parties.authority.ca, parties.authority.issue("renewed"))
    before = reloading.channel.generation
    await reloading.until(lambda: reloading.channel.generation > before)
    await ask(reloading.channel)
    assert service.callers == ["client", "renewed"]
    await stream.must_live()
    assert not _is_closed(reloading.opened[0]), "a call is under way there"
    await stream.end()
    await reloading.until(lambda: _is_closed(reloading.opened[0]))
    await ask(reloading.channel)
    assert len(reloading.opened) == 2


async def test_old_connection_is_used_while_new_files_fail(
    parties: Parties, service: EchoService, reloading: Reloading
) -> None:
    await ask(reloading.channel)
    with logged(reloading_module) as logs:
        parties.client.put_pair(parties.other.ca, parties.authority.issue("too early"))
        await ask(reloading.channel)
        await reloading.until(lambda: reloading.channel.generation == 0 and bool(logs))
    assert [line["event"] for line in logs] == ["connection with new TLS files failed"]
    await ask(reloading.channel)
    assert service.callers == ["client"] * 3
    parties.server.put_pair(parties.authority.ca, parties.other.issue("server"))
    await reloading.until(lambda: reloading.channel.generation == 1)
    await ask(reloading.channel)
    assert service.callers[3:] == ["too early"]


async def test_a_connection_that_breaks_is_not_made_again_with_the_files_of_before(parties: Parties) -> None:
    async with serving(EchoService(), parties.server) as running:
        reloading = Reloading(running.address, parties.client)
        async with reloading.channel:
            await ask(reloading.channel)
            parties.client.put_pair(parties.other.ca, parties.authority.issue("client"))
            await reloading.until(lambda: reloading.channel.generation == 0 and len(reloading.opened) == 2)
            await running.stop()
            port = int(running.address.rpartition(":")[2])
            again = EchoService()
            async with serving(again, parties.server, port=port):
                assert await refusal(reloading.channel)
            assert not again.entered.is_set()


async def test_unusable_files_leave_a_channel_unchanged(
    parties: Parties, service: EchoService, reloading: Reloading
) -> None:
    await ask(reloading.channel)
    parties.client.put(ca=parties.authority.ca, cert=b"half", key=b"written")
    with logged(files) as logs:
        await ask(reloading.channel)
        await reloading.until(lambda: bool(logs))
    assert [line["error"].partition(":")[0] for line in logs] == ["cert_file"]
    assert len(reloading.opened) == 1


async def test_files_that_change_twice_are_followed(
    parties: Parties, service: EchoService, reloading: Reloading
) -> None:
    await ask(reloading.channel)
    parties.client.put_pair(parties.other.ca, parties.authority.issue("wrong"))
    await reloading.until(lambda: reloading.channel.generation == 0 and len(reloading.opened) == 2)
    await ask(reloading.channel)
    parties.client.put_pair(parties.authority.ca, parties.authority.issue("right"))
    await ask(reloading.channel)
    await reloading.until(lambda: reloading.channel.generation == 1)
    await ask(reloading.channel)
    assert service.callers == ["client"] * 3 + ["right"]
    await reloading.until(
        lambda: [_is_closed(channel) for channel in reloading.opened] == [True, True, False]
    )


async def test_a_channel_that_is_closed_ends_its_calls_on_every_connection(
    parties: Parties, service: EchoService, reloading: Reloading
) -> None:
    calls = [rpc.DraftStub(reloading.channel).ProposeStream()]
    await reloading.channel.channel_ready()
    parties.client.put_pair(parties.authority.ca, parties.authority.issue("renewed"))
    await reloading.until(lambda: reloading.channel.generation == 1)
    calls.append(rpc.DraftStub(reloading.channel).ProposeStream())
    await reloading.channel.close()
    for call in calls:
        assert await call.code() is grpc.StatusCode.CANCELLED
    assert all(_is_closed(channel) for channel in reloading.opened)
