"""Token issuers with generated keys, the JWKS that they publish, and an https server that serves it."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import get_default_algorithms

from tests.fakes.certificates import Authority

ISSUER, AUDIENCE = "https://issuer.test", "galley"
CONFIGURATION = "/.well-known/openid-configuration"


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def ec_key(curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(curve or ec.SECP256R1())


def jwk(private: Any, algorithm: str, **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = get_default_algorithms()[algorithm].to_jwk(private.public_key(), as_dict=True)
    return {**result, **more}


def claims(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    fields = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "alice",
        "iat": now,
        "nbf": now,
        "exp": now + 600,
        **more,
    }
    return {name: value for name, value in fields.items() if value is not None}


@dataclass
class TokenIssuer:
    key_id: str = "one"
    private: Any = field(default_factory=ec_key)
    algorithm: str = "ES256"

    @property
    def published(self) -> dict[str, Any]:
        return jwk(self.private, self.algorithm, kid=self.key_id, use="sig")

    def token(self, header: dict[str, Any] | None = None, **more: Any) -> str:
        fields = {"kid": self.key_id, **(header or {})}
        named = {name: value for name, value in fields.items() if value is not None}
        return jwt.encode(claims(**more), self.private, algorithm=self.algorithm, headers=named)


def jwks(*issuers: TokenIssuer) -> bytes:
    return json.dumps({"keys": [issuer.published for issuer in issuers]}).encode()


def write_jwks(path: Path, *issuers: TokenIssuer) -> Path:
    path.write_bytes(jwks(*issuers))
    return path


class IssuerServer:
    def __init__(self) -> None:
        self.answers: dict[str, bytes | None] = {}
        self.requests: list[str] = []
        self.url = ""
        self.ca_file = ""
        self.hanging = asyncio.Event()

    def publish(self, path: str, body: bytes, status: str = "200 OK", headers: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n"
        self.answers[path] = head.encode() + body

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            self.requests.append(path)
            answer = self.answers.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            if answer is None:
                self.hanging.set()
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def issuer_server(directory: Path) -> AsyncIterator[IssuerServer]:
    authority = Authority(directory, "issuers")
    mine = authority.issue("issuer")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(mine.cert, mine.key)
    server = IssuerServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    server.url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    server.ca_file = str(authority.ca)
    try:
        yield server
    finally:
        listening.close()
