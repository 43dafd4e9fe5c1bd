"""HTTP over TLS, from files that are replaced while the gateway serves."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2
import pytest

from tests.fakes.certificates import Authority, Certificate, mounted
from tests.fakes.http_client import BODY
from tests.fakes.tls_servers import tls_settings
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import World


def trusting(authority: Authority, own: Certificate | None = None) -> httpx2.AsyncClient:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.check_hostname = False
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return httpx2.AsyncClient(verify=context, timeout=PATIENCE_S)


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
    later = second.issue("client")
    status = 0
    while status != 200:  # the first handshake after the change begins the check of the files
        async with trusting(second, later) as client:
            try:
                status = (await client.post(url, json=BODY)).status_code
            except httpx2.TransportError:
                continue
    async with trusting(first, first.issue("client")) as client:
        with pytest.raises(httpx2.TransportError):
            await client.post(url, json=BODY)
