"""Signed tokens: which are accept, as whom; and that the others are told apart by nobody but the log."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from galley.common.tls import files as files_module
from galley.common.tls.files import NamedFile, WatchedFiles
from galley.core.admission.admission import Principal, PrincipalLimits
from galley.core.errors import Unauthenticated
from services.gateway.auth.authentication import Credentials, build_authentication
from services.gateway.auth.jwks import JwksFile, read_jwks
from services.gateway.auth.jwt import (
    JWT_EARLY,
    JWT_EXPIRED,
    JWT_NEEDED,
    JWT_REFUSED,
    MAX_CHARS,
    JwtAuthenticator,
)
from services.gateway.settings import GatewaySettings
from tests.fakes.issuers import AUDIENCE, ISSUER, TokenIssuer, claims, ec_key, jwks, rsa_key, write_jwks
from tests.fakes.log_lines import logged
from tests.unit.services.gateway.test_api_keys import KEY, entry

LEEWAY_S = 30
RSA = TokenIssuer("rsa", rsa_key(), "RS256")
EC = TokenIssuer("ec")
OTHER = TokenIssuer("ec", ec_key())


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unsigned(header: object, signature: bytes = b"") -> str:
    return f"{b64(json.dumps(header).encode())}.{b64(json.dumps(claims()).encode())}.{b64(signature)}"


def signed_by_public_key() -> str:
    """HMAC with the public key as its secret (algorithm confusion)."""
    public = RSA.private.public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    body = unsigned({"alg": "HS256", "typ": "JWT", "kid": "rsa"}).rpartition(".")[0]
    return f"{body}.{b64(hmac.new(pem, body.encode(), sha256).digest())}"


def tampered() -> str:
    header, _, signature = EC.token().split(".")
    return f"{header}.{b64(json.dumps(claims(sub='root')).encode())}.{signature}"


def now(offset: int) -> int:
    return int(time.time()) + offset


BAD: dict[str, tuple[Callable[[], str], str]] = {
    "alg none": (lambda: unsigned({"alg": "none", "kid": "ec"}), "algorithm"),
    "no alg": (lambda: unsigned({"kid": "ec"}), "algorithm"),
    "alg of a list": (lambda: unsigned({"alg": ["ES256"], "kid": "ec"}), "algorithm"),
    "hmac by the public key": (signed_by_public_key, "algorithm"),
    "alg that is not allowed": (lambda: TokenIssuer("rsa", RSA.private, "RS512").token(), "algorithm"),
    "alg of another kind of key": (lambda: RSA.token({"kid": "ec"}), "unknown key"),
    "unknown kid": (lambda: EC.token({"kid": "nobody"}), "unknown key"),
    "kid of a number": (lambda: unsigned({"alg": "ES256", "kid": 7}), "malformed"),
    "anothers signature": (OTHER.token, "signature"),
    "no signature": (lambda: EC.token().rpartition(".")[0] + ".", "signature"),
    "tampered": (tampered, "signature"),
    "a key of its own": (
        lambda: OTHER.token({"jwk": OTHER.published, "kid": "nobody", "jku": "https://evil.test"}),
        "unknown key",
    ),
    "critical header": (lambda: EC.token({"crit": ["exp"], "exp": 1}), "malformed"),
    "critical b64": (
        lambda: unsigned({"alg": "ES256", "kid": "ec", "crit": ["b64"], "b64": True}),
        "critical header",
    ),
    "other issuer": (lambda: EC.token(iss=ISSUER + "/"), "issuer"),
    "no issuer": (lambda: EC.token(iss=None), "a claim is missing"),
    "other audience": (lambda: EC.token(aud=["other", "galley2"]), "audience"),
    "no audience": (lambda: EC.token(aud=None), "a claim is missing"),
    "no end": (lambda: EC.token(exp=None), "a claim is missing"),
    "an end of a word": (lambda: EC.token(exp="never"), "malformed"),
    "an endless end": (lambda: EC.token(exp=float("inf")), "malformed"),
    "nobody": (lambda: EC.token(sub=None), "a claim is missing"),
    "an empty name": (lambda: EC.token(sub=""), "claim"),
    "half a character": (lambda: EC.token(sub="\ud800"), "claim"),
    "a long name": (lambda: EC.token(sub="a" * 253), "claim"),
    "too long": (lambda: EC.token(more="a" * MAX_CHARS), "too long"),
    "two parts": (lambda: "eyJhbGciOiJFUzI1NiJ9.e30", "malformed"),
    "four parts": (lambda: EC.token() + ".e30", "malformed"),
    "no base64": (lambda: "é.é.é", "malformed"),
    "no JSON": (lambda: f"{b64(b'alg')}.{b64(b'{}')}.", "malformed"),
    "no object": (lambda: f"{b64(b'[]')}.{b64(b'{}')}.", "malformed"),
    "deep JSON": (lambda: f"{b64(b'[' * 4000)}.{b64(b'{}')}.", "malformed"),
    "no text": (lambda: f"{b64(bytes([255, 254]))}.{b64(b'{}')}.", "malformed"),
}


class Gate:
    def __init__(self, path: Path, *issuers: TokenIssuer, content: bytes = b"", **more: object) -> None:
        file = path / "jwks.json"
        file.write_bytes(content or jwks(*(issuers or (RSA, EC))))
        fields = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_jwks_file": str(file), **more}
        self._callers = build_authentication(GatewaySettings.model_validate(fields))

    async def who(self, **metadata: str) -> Principal:
        named = {name.replace("_", "-"): value for name, value in metadata.items()}
        return await self._callers.authenticate(Credentials(named))

    async def accept(self, token: str) -> Principal:
        return await self.who(authorization=f"Bearer {token}")

    async def refusal(self, **metadata: str) -> str:
        with pytest.raises(Unauthenticated) as caught:
            await self.who(**metadata)
        return str(caught.value)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


async def test_a_token_names_its_principal(gate: Gate) -> None:
    limits = PrincipalLimits(max_priority=0)
    for issuer in (RSA, EC):
        assert await gate.accept(issuer.token()) == Principal("jwt:alice", limits)
    assert (await gate.who(authorization=f"bearer {EC.token(sub='bob')}")).name == "jwt:bob"


@pytest.mark.parametrize(("make", "reason"), BAD.values(), ids=BAD)
async def test_reason_of_a_refused_token_is_only_logged(
    gate: Gate, make: Callable[[], str], reason: str
) -> None:
    with capture_logs() as logs:
        assert await gate.refusal(authorization=f"Bearer {make()}") == JWT_REFUSED
    assert logs == [
        {"event": "tokens refused", "reason": reason, "total": 1, "log_level": "info"},
    ]


async def test_unauthenticated_calls_do_not_fill_the_log(gate: Gate) -> None:
    with capture_logs() as logs:
        for _ in range(50):
            for token in (OTHER.token(), "a.b.c"):
                await gate.refusal(authorization=f"Bearer {token}")
    assert sorted(log["reason"] for log in logs) == ["malformed", "signature"]


async def test_an_expired_token_is_named_as_such(gate: Gate) -> None:
    assert await gate.refusal(authorization=f"Bearer {EC.token(exp=now(-LEEWAY_S - 2))}") == JWT_EXPIRED
    for early in (EC.token(nbf=now(LEEWAY_S + 60)), EC.token(iat=now(LEEWAY_S + 60))):
        assert await gate.refusal(authorization=f"Bearer {early}") == JWT_EARLY
    forged = OTHER.token(exp=now(-LEEWAY_S - 2))
    assert await gate.refusal(authorization=f"Bearer {forged}") == JWT_REFUSED
    await gate.accept(EC.token(exp=now(-LEEWAY_S // 2), iat=now(LEEWAY_S // 2), nbf=now(LEEWAY_S // 2)))


async def test_where_a_token_must_stand(gate: Gate) -> None:
    for metadata in ({}, {"x_api_key": EC.token()}, {"authorization": f"Basic {EC.token()}"}):
        assert await gate.refusal(**metadata) == JWT_NEEDED


async def test_one_of_several_audiences_is_enough(tmp_path: Path) -> None:
    gate = Gate(tmp_path, jwt_audience="galley, other")
    for audience in ("galley", ["else", "other"]):
        await gate.accept(EC.token(aud=audience))


async def test_a_token_without_key_id_needs_a_single_key(tmp_path: Path) -> None:
    assert (await Gate(tmp_path).accept(EC.token({"kid": None}))).name == "jwt:alice"
    several = Gate(tmp_path, EC, TokenIssuer("two"))
    assert await several.refusal(authorization=f"Bearer {EC.token({'kid': None})}") == JWT_REFUSED


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("anonymous", "jwt:anonymous"),
        ("jwt:alice", "jwt:jwt:alice"),
        ("auth0|ab-1@example.com", "jwt:auth0|ab-1@example.com"),
        ("a b\0c\n%é", "jwt:a%20b%00c%0A%25%C3%A9"),
        ("~a/b_c.d", "jwt:~a/b_c.d"),
    ],
)
async def test_names_are_escaped_and_can_have_limits(tmp_path: Path, text: str, name: str) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'keys = []\n[principals."{name}"]\nmax_sessions = 2\n')
    gate = Gate(tmp_path, jwt_principal_claim="who", api_keys_file=str(keys))
    principal = await gate.accept(EC.token(who=text))
    assert (principal.name, principal.limits.max_sessions) == (name, 2)


async def test_keys_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    clock_s = 0.0
    path = write_jwks(tmp_path / "jwks.json", EC)
    named = NamedFile("jwt_jwks_file", str(path))
    file = WatchedFiles([named], lambda: read_jwks(named), check_interval_s=1.0, clock=lambda: clock_s)
    settings = GatewaySettings.model_validate({"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE})
    tokens = JwtAuthenticator(settings, JwksFile(file), Principal)

    async def accept(issuer: TokenIssuer) -> bool:
        try:
            await tokens.authenticate(issuer.token())
        except Unauthenticated:
            return False
        return True

    path.write_bytes(jwks(RSA))
    assert await accept(EC)
    clock_s = 2.0
    assert (await accept(RSA), await accept(EC)) == (True, False)
    path.write_text("{}")
    clock_s = 4.0
    with logged(files_module) as logs:
        assert await accept(RSA)
    assert [log["log_level"] for log in logs] == ["error"]


async def test_token_and_key_each_identify_the_caller(tmp_path: Path) -> None:
    limits = '[defaults]\nmax_sessions = 5\n[principals."jwt:alice"]\nmax_sessions = 2\nmax_priority = 3\n'
    keys = tmp_path / "keys.toml"
    keys.write_text(entry(KEY, "alice") + limits)
    gate = Gate(tmp_path, api_keys_file=str(keys))
    assert await gate.accept(KEY) == Principal("alice", PrincipalLimits(5, None, None, 0))
    assert (await gate.who(x_api_key=KEY)).name == "alice"
    assert await gate.accept(EC.token()) == Principal("jwt:alice", PrincipalLimits(2, None, None, 3))
    assert (await gate.accept(EC.token(sub="bob"))).limits.max_sessions == 5
    assert await gate.refusal(authorization="Bearer what") == JWT_REFUSED
    assert await gate.refusal(authorization=f"Bearer {OTHER.token()}") == JWT_REFUSED
    assert "not known" in await gate.refusal(x_api_key=EC.token())
    assert "an API key or a token" in await gate.refusal()


async def test_limits_alone_need_no_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("keys = []\n[defaults]\nmax_sessions = 1")
    gate = Gate(tmp_path, api_keys_file=str(keys))
    assert (await gate.accept(EC.token())).limits.max_sessions == 1


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (b"\0", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"[" * 100_000, "must be a JSON object"),
        (b"{}", "`keys` must be a list"),
        (b'{"keys": []}', "must have a public key"),
        (json.dumps({"keys": [{}] * 101}).encode(), "at most 100"),
        (b" " * (256 * 1024 + 1), "must be at most 262144 bytes"),
    ],
    ids=["no text", "a list", "deep", "no keys", "none", "many", "large"],
)
def test_an_error_in_the_key_file_is_named(tmp_path: Path, content: bytes, reported: str) -> None:
    with pytest.raises(ValueError, match=reported) as caught:
        Gate(tmp_path, content=content)
    assert "jwks.json" in str(caught.value)


def _entry(**more: Any) -> dict[str, Any]:
    return {**EC.published, **more}


@pytest.mark.parametrize(
    "useless",
    [
        _entry(use="enc"),
        _entry(key_ops=["sign"]),
        _entry(alg="ECDH-ES"),
        _entry(kid=3),
        _entry(crv="P-1"),
        _entry(x="AA"),
        _entry(d="AA"),
        {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256", "kid": "ec"},
        {"kty": "RSA", "kid": "ec"},
        TokenIssuer("ec", rsa_key(1024), "RS256").published,
        TokenIssuer("ec", ec_key(ec.SECP256K1()), "ES256K").published,
    ],
    ids=["enc", "ops", "alg", "kid", "curve", "point", "private", "oct", "no modulus", "short", "k1"],
)
def test_keys_for_other_purposes_are_ignored(tmp_path: Path, useless: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must have a public key"):
        Gate(tmp_path, content=json.dumps({"keys": [useless, 7]}).encode())


@pytest.mark.parametrize("algorithm", ["ES384", "ES512", "EdDSA", "PS256"])
async def test_other_algorithms_are_accepted_if_allowed(tmp_path: Path, algorithm: str) -> None:
    make: dict[str, Callable[[], Any]] = {
        "ES384": lambda: ec_key(ec.SECP384R1()),
        "ES512": lambda: ec_key(ec.SECP521R1()),
        "EdDSA": Ed25519PrivateKey.generate,
        "PS256": lambda: RSA.private,
    }
    issuer = TokenIssuer("k", make[algorithm](), algorithm)
    assert (await Gate(tmp_path, issuer, jwt_algorithms=algorithm).accept(issuer.token())).name == "jwt:alice"
    assert await Gate(tmp_path, issuer).refusal(authorization=f"Bearer {issuer.token()}") == JWT_REFUSED


def test_test_tokens_are_valid_jwts() -> None:
    assert jwt.get_unverified_header(signed_by_public_key())["alg"] == "HS256"
