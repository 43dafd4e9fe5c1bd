"""Resumes of one session at a gateway's streams."""

from __future__ import annotations

from galley.core.admission.admission import AdmissionSlot
from services.gateway.request.validate import ResumeSpec
from services.gateway.session.runner import SessionRunner
from services.gateway.session.streams import Streams


async def resumed(streams: Streams, slot: AdmissionSlot, resume: ResumeSpec) -> SessionRunner:
    """Check and claim a session within the slot; return its runner."""
    [claim] = await streams.prepare_claims([slot], [resume], None)
    return await streams.claim(claim, None)
