"""An issuer's public keys as it publishes them, a JWKS (RFC 7517): what can be used of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from galley.common.tls.files import NamedFile

MAX_BYTES = 256 * 1024
_MAX_KEYS = 100
_LEAST_RSA_BITS = 2048
_OF_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_OF_CURVE = {
    "secp256r1": frozenset({"ES256"}),
    "secp384r1": frozenset({"ES384"}),
    "secp521r1": frozenset({"ES512"}),
}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key, and the signatures that it may check."""

    key_id: str | None
    algorithms: frozenset[str]
    public: Any


class KeySet:
    """What an issuer signs with."""

    def __init__(self, keys: Sequence[SigningKey]) -> None:
        self.keys = tuple(keys)

    def find(self, key_id: str | None, algorithm: str) -> SigningKey | None:
        """The key of this id; of a token that names none, the only one that its signature can be of."""
        fitting = [key for key in self.keys if algorithm in key.algorithms]
        if key_id is not None:
            return next((key for key in fitting if key.key_id == key_id), None)
        return fitting[0] if len(fitting) == 1 else None


def read_jwks(file: NamedFile) -> KeySet:
    """Raises BadFile, which says what is wrong with it."""
    content = file.read()
    try:
        return parse_jwks(content)
    except ValueError as error:
        raise file.bad(str(error)) from None


def parse_jwks(content: bytes) -> KeySet:
    """Raises ValueError if it is no JWKS, or of no use.

    Keys for other purposes or of other kinds are passed over, as the RFC asks for; so is what is secret: that
    everybody knows by now.
    """
    entries = parse_object(content).get("keys")
    if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
        raise ValueError(f"is no JWKS: `keys` must be a list of at most {_MAX_KEYS}")
    keys = [key for entry in entries if isinstance(entry, dict) and (key := _signing_key(entry)) is not None]
    if not keys:
        raise ValueError(
            "holds no public key that could check a signature of RSA (2048 bits), ECDSA or EdDSA"
        )
    return KeySet(keys)


def parse_object(content: bytes) -> dict[str, Any]:
    """Raises ValueError unless it is a JSON object of at most MAX_BYTES."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")  # noqa: TRY004  # the content is at fault, not a type
    return found


def _signing_key(entry: dict[str, Any]) -> SigningKey | None:
    if entry.get("use", "sig") != "sig" or "verify" not in entry.get("key_ops", ("verify",)):
        return None
    if entry.get("kty") == "oct" or "d" in entry:
        return None
    try:
        public = PyJWK(entry).key
    except (PyJWTError, ValueError, TypeError, KeyError):
        return None
    algorithms = _algorithms(public)
    if (only := entry.get("alg")) is not None:
        algorithms &= {only}
    key_id = entry.get("kid")
    if not algorithms or not (key_id is None or isinstance(key_id, str)):
        return None
    return SigningKey(key_id, algorithms, public)


def _algorithms(public: object) -> frozenset[str]:
    if isinstance(public, RSAPublicKey):
        return _OF_RSA if public.key_size >= _LEAST_RSA_BITS else frozenset()
    if isinstance(public, EllipticCurvePublicKey):
        return _OF_CURVE.get(public.curve.name, frozenset())
    return frozenset({"EdDSA"}) if isinstance(public, Ed25519PublicKey) else frozenset()
