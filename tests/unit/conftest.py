"""Unit tests open no socket, start no process and load no model: whatever tries to, raises."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import grpc._server
import grpc.aio._server
import pytest

_EVENTS = frozenset({"socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.posix_spawn"})
_TIER = Path(__file__).parent


class _Guard:
    running = False

    def audit(self, event: str, _: object) -> None:
        if self.running and event in _EVENTS:
            raise AssertionError(f"{event}: not in a unit test; see tests/README.md")

    def refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("no gRPC server and no real model in a unit test; see tests/README.md")


_GUARD = _Guard()
# A hook cannot be removed, so it looks whether a unit test runs. A socketpair neither binds nor connects.
sys.addaudithook(_GUARD.audit)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if _TIER in item.path.parents:
            _GUARD.running = True
            # gRPC opens its sockets in C, out of the sight of audit hooks.
            patch.setattr(grpc.aio._server.Server, "start", _GUARD.refuse)
            patch.setattr(grpc._server._Server, "start", _GUARD.refuse)
        try:
            return (yield)
        finally:
            _GUARD.running = False


@pytest.fixture(scope="session")
def default_model_dir() -> NoReturn:
    _GUARD.refuse()
