"""Send the requests of one replay to one target replica."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace

import grpc

from galley.core.answer.answer import SessionSpec
from galley.core.audit import AUDIT_PRIORITY
from galley.core.errors import GalleyError
from galley.core.session import events as ev
from galley.core.session.events import VerifyEvent
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import SECOND
from services.gateway.replicas import messages
from services.gateway.replicas.clients import OnlyResponse
from services.gateway.replicas.targets import TargetReplica

AUDIT_PREFIX = "audit-"
"""Begins the session ids of audits at targets; no session of a client has such an id."""
_SALT_BYTES = 16
_TOP_LOGPROBS = 20
"""Likeliest tokens that a target names, among which the token of the log probably is."""
_MEET_S = 1.0
_LOOK_S = 0.05
"""Time between two looks at whether sessions have come while a target computes for an audit."""


def audited_spec(spec: SessionSpec) -> SessionSpec:
    """Return the spec under which a session is computed again.

    It has an id and a salt of its own, so that no cached KV is used, and the lowest priority.
    """
    return replace(
        spec,
        session_id=f"{AUDIT_PREFIX}{secrets.token_hex(16)}",
        tenant_salt=secrets.token_bytes(_SALT_BYTES),
        arrival_ns=time.time_ns(),
        priority=AUDIT_PRIORITY,
        logprobs=_TOP_LOGPROBS,
    )


async def is_idle(target: TargetReplica) -> bool:
    """Return True if the replica has no open request, of whatever gateway."""
    if target.open_requests or not target.is_accepted:
        return False
    try:
        await target.client.meet(_MEET_S)
    except (grpc.aio.AioRpcError, GalleyError):
        return False
    return not target.client.info.queue_depth and not target.open_requests


class AuditedReplica:
    """A target replica that computes for an audit; its sessions come first."""

    def __init__(self, target: TargetReplica, spec: SessionSpec, timeout_ns: int) -> None:
        """`spec` is an `audited_spec`. A request fails after `timeout_ns`."""
        self.target = target
        self._spec = spec
        self._timeout_ns = timeout_ns

    async def verify(self, request: ev.Verify) -> VerifyEvent:
        """Return the response to a request; what goes wrong is a Failed."""
        only = OnlyResponse[pb.VerifyAnswer](has_begun=True)
        try:
            async with asyncio.timeout(self._timeout_ns / SECOND):
                item = await messages.verify_item(self._spec, request, self._timeout_ns, "")
                opened = await self.target.client.verify(item, only)
                try:
                    answer = await only.future
                finally:
                    opened.cancel()
        except TimeoutError:
            return ev.Failed(request.request_id, "no response in time")
        except (grpc.aio.AioRpcError, GalleyError) as error:
            self.target.client.lost()
            return ev.Failed(request.request_id, messages.problem_of(error))
        return messages.verify_event(request.request_id, answer)

    async def verify_while_idle(self, request: ev.Verify, most_ns: int) -> VerifyEvent | None:
        """Return the response, or None after `most_ns`, or once a session of this gateway has come.

        So a session need not wait. The replica keeps the KV that it has computed by then.
        """
        work = asyncio.create_task(self.verify(request))
        try:
            async with asyncio.timeout(most_ns / SECOND):
                while not self.target.open_requests:
                    done, _ = await asyncio.wait([work], timeout=_LOOK_S)
                    if done:
                        return work.result()
        except TimeoutError:
            pass
        finally:
            work.cancel()
        return None
