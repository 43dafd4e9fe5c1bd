"""What holds in whatever order gRPC lets go of a call: by its generator, and by its callbacks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from galley.core.admission.principal import ANONYMOUS, ANONYMOUS_NAME
from galley.core.answer.codec import encode_spec
from galley.core.session.machine import SessionLimits
from galley.core.store import NewSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import MonotonicClock, Timeouts
from services.gateway.servicer import GenerationServicer
from services.gateway.session.runner import Ports
from services.gateway.session.streams import SPEC_FIELD, Streams
from services.gateway.telemetry.observer import RequestObservers
from tests.fakes.session_ports import SPEC, NoDraft, PortTarget
from tests.fakes.store import MemoryStore

SESSION = "5e" * 16


class Call:
    """A gRPC context that never says that its call has ended."""

    def add_done_callback(self, _callback: object) -> None:
        pass

    def time_remaining(self) -> None:
        return None


async def test_a_session_without_client_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.servicer.caller", lambda: ANONYMOUS)
    store, clock, target = MemoryStore(), MonotonicClock(), PortTarget()
    target.may_answer.clear()
    spec = replace(SPEC, session_id=SESSION, continue_without_client=True)
    fields = {SPEC_FIELD: encode_spec(spec)}
    await store.create(NewSession(SESSION, ANONYMOUS_NAME, b"body", fields, spec.prompt))
    ports = Ports(NoDraft(), target, clock)
    limits = SessionLimits(credit=0)
    streams = Streams(
        store, clock, lambda _stored, _session: ports, lambda ids: "x" * len(ids), limits, Timeouts(), 1
    )
    servicer = GenerationServicer(streams, cast("Any", _Model), clock, b"secret", RequestObservers(clock))
    events = servicer.Resume(pb.ResumeRequest(session_id=SESSION), cast("Any", Call()))
    assert (await anext(events)).event.HasField("started")
    await cast("Any", events).aclose()
    idle = asyncio.ensure_future(streams.wait_idle())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not idle.done()
    target.may_answer.set()
    async with asyncio.timeout(10):
        await idle
    with streams.admit(ANONYMOUS, 0):
        pass


class _Model:
    name = "tiny"
