"""Session ids: random, or derived from a principal's idempotency key."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

SESSION_ID_HEX = 32


def session_id_for(principal: str, key: str, secret: bytes) -> str:
    """Return a 128-bit session id in hex: random, or an HMAC of (principal, key) if `key` is not empty.

    The HMAC makes repeats of one request meet in `create` without a second record, and keeps principals from
    naming each other's sessions.
    """
    if not key:
        return secrets.token_hex(SESSION_ID_HEX // 2)
    message = principal.encode() + b"\0" + key.encode()
    return hmac.new(secret, message, sha256).hexdigest()[:SESSION_ID_HEX]
