"""Which session an idempotency key of a principal names."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

SESSION_ID_HEX = 32


def session_id_for(principal: str, key: str, secret: bytes) -> str:
    """A 128-bit session id in hex: random, or for a key that is not empty a keyed hash of (principal, key).

    The hash lets `create` arbitrate between repeats of one request without a second record, and does not
    let one principal name another's session.
    """
    if not key:
        return secrets.token_hex(SESSION_ID_HEX // 2)
    message = principal.encode() + b"\0" + key.encode()
    return hmac.new(secret, message, sha256).hexdigest()[:SESSION_ID_HEX]
