"""Processes that are told of TLS: files of no use end them at once; health is told where it is asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from galley.common.server.healthcheck import problem_of
from tests.fakes.certificates import Authority, Mounted, mounted
from tests.fakes.processes import service_process
from tests.fakes.tls_servers import tls_settings
from tests.fakes.waiting import PATIENCE_S


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    authority = Authority(tmp_path, "authority")
    return mounted(tmp_path / "files", authority.ca, authority.issue("server"))


@pytest.mark.parametrize(
    ("role", "flags", "reported"),
    [
        (
            "draft",
            ("--tls-cert-file={cert}", "--tls-key-file=/nowhere"),
            "--tls-key-file (or GALLEY_DRAFT_TLS_KEY_FILE): /nowhere: No such file or directory",
        ),
        (
            "gateway",
            ("--peer-ca-file={key}",),
            "--peer-ca-file (or GALLEY_GATEWAY_PEER_CA_FILE): {key}: must hold certificates in PEM",
        ),
        (
            "gateway",
            ("--api-keys-file=/dev/null",),
            "--api-keys-file (or GALLEY_GATEWAY_API_KEYS_FILE): /dev/null: must be a regular file",
        ),
        (
            "gateway",
            ("--redis-url=rediss://store?ca=/nowhere",),
            "--redis-url (or GALLEY_GATEWAY_REDIS_URL): /nowhere: No such file or directory",
        ),
    ],
)
async def test_an_unusable_file_ends_the_process(
    role: str, flags: tuple[str, ...], reported: str, files: Mounted
) -> None:
    paths = {"ca": files.ca, "cert": files.cert, "key": files.key}
    command = (sys.executable, "-m", f"services.{role}", *(flag.format(**paths) for flag in flags))
    process = await asyncio.to_thread(
        subprocess.run, command, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False
    )
    assert process.returncode == 2
    [line] = process.stderr.decode().splitlines()
    assert line.startswith(f"galley {role}: error: {reported.format(**paths)}")


async def test_a_process_reports_its_health_port(files: Mounted, tmp_path: Path) -> None:
    flags = {**tls_settings(files, mutual=True), "health_port": "0", "log_level": "error"}
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    async with service_process("services.draft", tmp_path / "log", {}, named) as ready:
        assert await asyncio.to_thread(problem_of, ready["health"]) is None
