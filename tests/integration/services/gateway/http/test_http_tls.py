"""HTTP over TLS, from files that are replaced while the gateway serves."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from galley.common.tls.files import BadFile
from tests.fakes.certificates import Authority, Certificate, mounted
from tests.fakes.http_client import BODY
from tests.fakes.tls_servers import tls_settings
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import World


def context_of(authority: Authority, own: Certificate | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.check_hostname = False
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def trusting(authority: Authority, own: Certificate | None = None) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(verify=context_of(authority, own), timeout=PATIENCE_S)


async def presented(address: str, authority: Authority) -> bytes:
    """Return the certificate that the server shows."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        _, writer = await asyncio.open_connection(host, int(port), ssl=context_of(authority))
    writer.transport.abort()
    return bytes(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))


def weak(authority: Authority) -> Certificate:
    """Return a pair that gRPC takes, and `ssl` does not."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return authority.issue("weak", key=key)


async def test_certificates_and_authorities_are_replaced(world: World, tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    files = mounted(tmp_path / "files", first.ca, first.issue("gateway"))
    gateway = await world.gateway(http_port=0, **tls_settings(files, mutual=True))
    url = f"https://{gateway.http}/v1/completions"
    async with trusting(first, first.issue("client")) as client:
        assert (await client.post(url, json=BODY)).status_code == 200
    async with trusting(first) as stranger:
        with pytest.raises(httpx2.TransportError):
            await stranger.post(url, json=BODY)
    pair = second.issue("gateway")
    files.put(ca=second.ca.read_bytes(), cert=pair.cert, key=pair.key)
    async with trusting(second, second.issue("client")) as client:
        assert (await client.post(url, json=BODY)).status_code == 200
    async with trusting(first, first.issue("client")) as client:
        with pytest.raises(httpx2.TransportError):
            await client.post(url, json=BODY)


async def test_the_certificate_stays_while_the_new_one_is_unusable(world: World, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files = mounted(tmp_path / "files", authority.ca, authority.issue("gateway"))
    gateway = await world.gateway(http_port=0, **tls_settings(files, mutual=False))
    first = await presented(gateway.http, authority)
    files.put_pair(authority.ca, weak(authority))
    for _ in range(2):
        assert await presented(gateway.http, authority) == first
    world.expect_error("files not reloaded")
    files.put_pair(authority.ca, authority.issue("gateway"))
    assert await presented(gateway.http, authority) != first


async def test_an_unusable_certificate_prevents_the_start(world: World, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files = mounted(tmp_path / "files", authority.ca, weak(authority))
    with pytest.raises(BadFile, match=r"tls_cert_file: .*/cert: .*EE_KEY_TOO_SMALL"):
        await world.gateway(http_port=0, **tls_settings(files, mutual=False))
