"""What holds in whatever order gRPC lets go of a call: by its generator, and by its callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from galley.core.admission.principal import ANONYMOUS, ANONYMOUS_NAME
from galley.core.answer.answer import SessionSpec
from galley.core.answer.codec import encode_spec
from galley.core.sampling_params import SamplingParams
from galley.core.session import events as ev
from galley.core.session.machine import SessionLimits
from galley.core.store import NewSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import MonotonicClock
from services.gateway.servicer import GenerationServicer
from services.gateway.session.runner import Ports
from services.gateway.session.streams import SPEC_FIELD, Streams
from services.gateway.telemetry.observer import RequestObservers
from services.gateway.timeouts import Timeouts
from tests.fakes.store import MemoryStore

SESSION = "5e" * 16
SPEC = SessionSpec(SESSION, (1, 2, 3), SamplingParams(), max_position=6, vocab_size=8)


class Silent:
    """A target that says one token once it is let; and no draft."""

    replica = None

    def __init__(self) -> None:
        self.may_speak = asyncio.Event()

    def verify(self, _spec: SessionSpec, request: ev.Verify, _remaining_ns: int | None) -> Item:
        return Item(self, request)

    async def propose(self, _spec: SessionSpec, request: ev.Propose, _remaining_ns: int | None) -> ev.Failed:
        return ev.Failed(request.request_id, "there is no draft")


class Item:
    """Its Verification."""

    replica = None

    def __init__(self, target: Silent, request: ev.Verify) -> None:
        self._target = target
        self._request = request

    async def __aiter__(self) -> AsyncIterator[ev.Verified | ev.CacheMissed | ev.Failed]:
        await self._target.may_speak.wait()
        position = self._request.slice.start + len(self._request.slice.tokens)
        yield ev.Verified(self._request.request_id, position, (5,), 0, 0, position, "build")

    def extend(self, request: ev.ExtendVerify) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Call:
    """A gRPC context that never says that its call has ended."""

    def add_done_callback(self, _callback: object) -> None:
        pass

    def time_remaining(self) -> None:
        return None


async def test_a_session_that_goes_on_keeps_its_place_though_only_its_generator_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.servicer.caller", lambda: ANONYMOUS)
    store, clock, target = MemoryStore(), MonotonicClock(), Silent()
    spec = replace(SPEC, continue_without_client=True)
    fields = {SPEC_FIELD: encode_spec(spec)}
    await store.create(NewSession(SESSION, ANONYMOUS_NAME, b"body", fields, spec.prompt))
    ports = Ports(target, target, clock)
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
    target.may_speak.set()
    async with asyncio.timeout(10):
        await idle
    with streams.admit(ANONYMOUS, 0):
        pass


class _Model:
    name = "tiny"
