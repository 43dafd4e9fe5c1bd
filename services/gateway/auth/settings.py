"""Settings of signed tokens (docs/operate/principals.md)."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from galley.common.config.settings import ServiceSettings

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Asymmetric signatures only: not "none", and no HMAC, which whoever can verify it can forge."""

JWT_LEEWAY_S = 30.0


def comma_separated(text: str) -> tuple[str, ...]:
    """Return the parts between the commas that are not empty."""
    return tuple(part for one in text.split(",") if (part := one.strip()))


def check_https(url: str) -> str:
    """Return `url`. Raise ValueError unless it is empty or https without user name and password."""
    if not url:
        return url
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise ValueError("must be an https:// URL")
    if "@" in parts.netloc:
        raise ValueError("must not contain a user name or password")
    return url


def _algorithms(text: str) -> str:
    names = comma_separated(text)
    if unknown := [name for name in names if name not in ALGORITHMS]:
        raise ValueError(f"must be some of {', '.join(ALGORITHMS)}, got {unknown[0]!r}")
    if not names:
        raise ValueError(f"must be some of {', '.join(ALGORITHMS)}, got none")
    return text


class TokenSettings(ServiceSettings):
    """Accepted signed tokens (JWT); without an issuer, none."""

    jwt_issuer: str = Field(
        "", description="Token issuer, exactly as in `iss`. Empty: tokens are not accepted."
    )
    jwt_audience: str = Field("", description="Accepted audiences (`aud`), comma-separated.")
    jwt_jwks_file: str = Field("", description="JWKS file with the issuer's keys; reloaded when it changes.")
    jwt_jwks_url: Annotated[str, AfterValidator(check_https)] = Field(
        "",
        description="URL (https) of the issuer's JWKS. Empty, and no file: from its OpenID configuration.",
    )
    jwt_ca_file: str = Field(
        "", description="PEM file of authorities for the issuer's host. Empty: the system's."
    )
    jwt_algorithms: Annotated[str, AfterValidator(_algorithms)] = Field(
        "RS256,ES256", description="Accepted signature algorithms, comma-separated."
    )
    jwt_principal_claim: str = Field("sub", min_length=1, description="Claim that names the principal.")

    @model_validator(mode="after")
    def _tokens_fit_together(self) -> Self:
        if not self.jwt_issuer:
            if useless := [name for name in _NEEDS_ISSUER if getattr(self, name)]:
                raise ValueError(f"{useless[0]}: needs jwt_issuer")
            return self
        if not comma_separated(self.jwt_audience):
            raise ValueError(
                "jwt_audience: required with jwt_issuer; without it, tokens issued for other services would "
                "be accepted"
            )
        if self.jwt_jwks_file and self.jwt_jwks_url:
            raise ValueError("jwt_jwks_url: must be empty if jwt_jwks_file is set")
        if not (self.jwt_jwks_file or self.jwt_jwks_url):
            try:
                check_https(self.jwt_issuer)
            except ValueError as error:
                raise ValueError(
                    f"jwt_issuer: {error}, unless jwt_jwks_file or jwt_jwks_url is set"
                ) from None
        return self


_NEEDS_ISSUER = ("jwt_audience", "jwt_jwks_file", "jwt_jwks_url", "jwt_ca_file")
