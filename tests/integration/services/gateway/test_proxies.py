"""A gateway behind nginx and HAProxy, with what the annotations of docs/operate/ingress.md become there."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import httpx2
import pytest

from galley.client.client import NO_RETRIES, AsyncClient
from tests.fakes.truth import SEED
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT, Gateway, World, must_be_true, receive, refused

Proxy = Callable[[Gateway, str], AbstractContextManager[Path]]
PAGE = Path(__file__).parents[4] / "docs" / "operate" / "ingress.md"
LARGE = "x" * (2 << 20)
"""Above the gateway's bound on a text, so that its refusal shows that the message arrived."""

_NGINX = """
pid {at}/pid; error_log {at}/log; worker_processes 1; {user}
events {{ }}
http {{
  access_log off;
  client_body_temp_path {at}/a; proxy_temp_path {at}/b; fastcgi_temp_path {at}/c;
  uwsgi_temp_path {at}/d; scgi_temp_path {at}/e;
  {limits}
  server {{
    listen unix:{at}/grpc http2;
    location /galley.v1.Generation/ {{ grpc_pass grpc://{grpc}; }}
  }}
  server {{
    listen unix:{at}/http;
    location /v1/ {{ proxy_pass http://{http}; proxy_http_version 1.1; proxy_buffering off; }}
  }}
}}
"""
_HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
listen grpc
  bind unix@{at}/grpc proto h2
  server gateway {grpc} proto h2
listen http
  bind unix@{at}/http
  server gateway {http}
"""


def page_limit() -> str:
    (size,) = re.findall(r"nginx\.ingress\.kubernetes\.io/proxy-body-size: (\w+)", PAGE.read_text())
    return f"client_max_body_size {size};"


@contextmanager
def nginx(gateway: Gateway, limits: str) -> Iterator[Path]:
    user = "user root;" if os.geteuid() == 0 else ""
    with _started("nginx", _NGINX, gateway, limits=limits, user=user) as at:
        yield at


@contextmanager
def haproxy(gateway: Gateway, limits: str) -> Iterator[Path]:
    del limits  # it has none on bodies
    with _started("haproxy", _HAPROXY, gateway) as at:
        yield at


@contextmanager
def _started(program: str, config: str, gateway: Gateway, **more: str) -> Iterator[Path]:
    """Run the proxy with sockets in a folder; it goes to the background once it listens."""
    path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        pytest.skip(f"{program} is not installed")
    with tempfile.TemporaryDirectory() as folder:  # short, for the names of sockets
        at = Path(folder)
        file = at / "config"
        file.write_text(config.format(at=at, grpc=gateway.address, http=gateway.http, **more))
        flags = ["-c", str(file), "-e", f"{at}/log"]
        if program == "haproxy":
            flags = ["-D", "-f", str(file), "-p", f"{at}/pid"]
        subprocess.run([path, *flags], check=True, capture_output=True)
        pid = int((at / "pid").read_text())
        process = os.pidfd_open(pid)
        try:
            yield at
        finally:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            ended, _, _ = select.select([process], [], [], PATIENCE_S)
            os.close(process)
        assert ended, f"{program} did not end"


PROXIES = pytest.mark.parametrize("proxy", [nginx, haproxy])


@PROXIES
async def test_streams_pass(world: World, proxy: Proxy) -> None:
    gateway = await world.gateway(http_port=0)
    with proxy(gateway, page_limit()) as at:
        async with AsyncClient(f"unix:{at}/grpc", retries=NO_RETRIES) as client:
            stream = client.stream(PROMPT, max_tokens=MAX_TOKENS, seed=SEED, ignore_eos=True)
            must_be_true(await receive(stream))
        transport = httpx2.AsyncHTTPTransport(uds=f"{at}/http")
        async with httpx2.AsyncClient(transport=transport, base_url="http://galley") as http:
            body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200
            assert response.text.rstrip().endswith("data: [DONE]")


@PROXIES
async def test_large_messages_pass_with_the_annotations(world: World, proxy: Proxy) -> None:
    gateway = await world.gateway(http_port=0, max_message_bytes=4 << 20)
    with proxy(gateway, page_limit()) as at:
        grpc_code, http_code = await answers(at)
    assert (grpc_code, http_code) == (grpc.StatusCode.INVALID_ARGUMENT, 400)


async def test_nginx_refuses_large_messages_by_default(world: World) -> None:
    gateway = await world.gateway(http_port=0, max_message_bytes=4 << 20)
    with nginx(gateway, "") as at:
        grpc_code, http_code = await answers(at)
    assert (grpc_code, http_code) == (grpc.StatusCode.INTERNAL, 413)


async def answers(at: Path) -> tuple[grpc.StatusCode, int]:
    """Return the statuses of a large message by gRPC and by HTTP."""
    async with AsyncClient(f"unix:{at}/grpc", retries=NO_RETRIES) as client:
        error = await refused(receive(client.stream(LARGE, max_tokens=1)))
    transport = httpx2.AsyncHTTPTransport(uds=f"{at}/http")
    async with httpx2.AsyncClient(transport=transport, base_url="http://galley") as http:
        response = await http.post("/v1/completions", json={"prompt": LARGE, "max_tokens": 1})
    return error.code, response.status_code
