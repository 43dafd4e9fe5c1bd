"""The commands of docs/operate/tls.md make certificates that servers and callers take."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import BadFile, NamedFile
from tests.deploy.render import ROOT
from tests.fakes.certificates import Certificate, mounted
from tests.fakes.echo_service import EchoService
from tests.fakes.tls_servers import connection_error, serving


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    text = (ROOT / "docs" / "operate" / "tls.md").read_text()
    [commands] = re.findall(r"```sh\n(new_key\(\).*?)```", text, re.DOTALL)
    directory = tmp_path_factory.mktemp("made")
    subprocess.run(["sh", "-euc", commands], cwd=directory, check=True, capture_output=True)
    return directory


def pair(made: Path, name: str) -> Certificate:
    return Certificate(made / f"{name}.crt", made / f"{name}.key")


@pytest.mark.parametrize(
    ("name", "serves", "calls"),
    [
        ("galley-gateway", True, True),
        ("galley-target", True, False),
        ("galley-draft", True, False),
        ("galley-client", False, True),
    ],
)
def test_key_usage_of_each_certificate(made: Path, name: str, serves: bool, calls: bool) -> None:
    own = pair(made, name)
    ca, cert, key = (NamedFile("it", str(path)) for path in (made / "ca.crt", own.cert, own.key))
    for as_server, fits in ((True, serves), (False, calls)):
        files = TlsFiles(ca, cert, key, as_server)
        if fits:
            assert files.read().key == own.key.read_bytes()
        else:
            with pytest.raises(BadFile, match="extended key usage"):
                files.read()


async def test_a_server_and_a_client_trust_one_another(made: Path, tmp_path: Path) -> None:
    server = mounted(tmp_path / "server", made / "ca.crt", pair(made, "galley-target"))
    client = mounted(tmp_path / "client", made / "ca.crt", pair(made, "galley-gateway"))
    service = EchoService()
    async with serving(service, server) as running:
        assert await connection_error(running, client, name="galley-target") == ""
        assert await connection_error(running, client, name="galley-draft")
    assert service.callers == ["galley-gateway"]
