"""Processes that are told of TLS: files of no use end them at once; health is told where it is asked for."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from galley.common.server.healthcheck import problem_of
from tests.fakes.certificates import Authority, Mounted, mounted
from tests.fakes.waiting import PATIENCE_S


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    authority = Authority(tmp_path, "authority")
    return mounted(tmp_path / "files", authority.ca, authority.issue("server"))


def command(role: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", f"services.{role}", "--die-with-parent", *flags]


@pytest.mark.parametrize(
    ("role", "flags", "told"),
    [
        (
            "draft",
            ("--tls-cert-file={cert}", "--tls-key-file=/nowhere"),
            "--tls-key-file (or GALLEY_DRAFT_TLS_KEY_FILE): /nowhere: No such file or directory",
        ),
        (
            "gateway",
            ("--peer-ca-file={key}",),
            "--peer-ca-file (or GALLEY_GATEWAY_PEER_CA_FILE): {key}: holds no certificate in PEM",
        ),
        (
            "gateway",
            ("--redis-url=rediss://store?ca=/nowhere",),
            "--redis-url (or GALLEY_GATEWAY_REDIS_URL): /nowhere: No such file or directory",
        ),
    ],
)
async def test_a_file_of_no_use_ends_a_process_with_its_flag_and_the_reason(
    role: str, flags: tuple[str, ...], told: str, files: Mounted
) -> None:
    paths = {"ca": files.ca, "cert": files.cert, "key": files.key}
    process = await asyncio.create_subprocess_exec(
        *command(role, *(flag.format(**paths) for flag in flags)), stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 2
    [line] = errors.decode().splitlines()
    assert line.startswith(f"galley {role}: error: {told.format(**paths)}")


async def test_a_process_tells_where_it_tells_its_health(files: Mounted) -> None:
    read_fd, write_fd = os.pipe()
    flags = ("--tls-cert-file", files.cert, "--tls-key-file", files.key, "--tls-client-ca-file", files.ca)
    process = await asyncio.create_subprocess_exec(
        *command("draft", *flags, "--health-port=0", "--log-level=error", f"--ready-fd={write_fd}"),
        pass_fds=(write_fd,),
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as lines:
            told = await asyncio.to_thread(lines.readlines)
        ready = json.loads(told[-1])
        assert await asyncio.to_thread(problem_of, ready["health"]) is None
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
