"""How the store keeps the end of a session."""

from __future__ import annotations

import json

from galley.core.answer.answer import Ending, Reason


def encode_ending(ending: Ending) -> bytes:
    """A small JSON object."""
    return json.dumps({"reason": ending.reason.value, "matched": ending.matched}).encode()


def decode_ending(data: bytes) -> Ending:
    """The inverse of `encode_ending`; raises ValueError if `data` is not one."""
    fields = json.loads(data)
    return Ending(Reason(fields["reason"]), fields["matched"])
