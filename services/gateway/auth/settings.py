"""How a gateway is told whose tokens it takes (docs/operate/principals.md)."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from galley.common.config.settings import ServiceSettings

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by a key that only the issuer has. No "none", and no HMAC: who can check one can make one."""

JWT_LEEWAY_S = 30.0


def listed(text: str) -> tuple[str, ...]:
    """What stands between the commas."""
    return tuple(part for one in text.split(",") if (part := one.strip()))


def check_https(url: str) -> str:
    """Raise ValueError unless `url` is of https, without a user's name or a password, or empty."""
    if not url:
        return url
    found = urlsplit(url)
    if found.scheme != "https" or not found.hostname:
        raise ValueError("must be an https:// URL")
    if "@" in found.netloc:
        raise ValueError("must not hold a user's name or a password")
    return url


def _algorithms(text: str) -> str:
    known = listed(text)
    if unknown := [name for name in known if name not in ALGORITHMS]:
        raise ValueError(f"{unknown[0]!r} is not taken: some of {', '.join(ALGORITHMS)} may be")
    if not known:
        raise ValueError(f"must name some of {', '.join(ALGORITHMS)}")
    return text


class TokenSettings(ServiceSettings):
    """Which signed tokens (JWT) say who calls; none, unless there is an issuer."""

    jwt_issuer: str = Field(
        "", description="Issuer whose signed tokens are taken, to the letter as `iss` says it; empty: none's."
    )
    jwt_audience: str = Field(
        "", description="For whom tokens must be, as `aud` says it; of several, with commas, one."
    )
    jwt_jwks_file: str = Field("", description="File of the issuer's keys, a JWKS; read anew as it changes.")
    jwt_jwks_url: Annotated[str, AfterValidator(check_https)] = Field(
        "",
        description="Where the issuer's keys are fetched, https only; where no file is given either, the "
        "issuer's OpenID configuration says it.",
    )
    jwt_ca_file: str = Field(
        "", description="PEM of the authorities that may vouch for the issuer's host; empty: the system's."
    )
    jwt_algorithms: Annotated[str, AfterValidator(_algorithms)] = Field(
        "RS256,ES256", description="Signatures that are taken, with commas."
    )
    jwt_principal_claim: str = Field("sub", min_length=1, description="The claim that names the principal.")

    @model_validator(mode="after")
    def _tokens_fit_together(self) -> Self:
        if not self.jwt_issuer:
            if told := [name for name in _OF_AN_ISSUER if getattr(self, name)]:
                raise ValueError(f"{told[0]} says nothing without jwt_issuer")
            return self
        if not listed(self.jwt_audience):
            raise ValueError("jwt_issuer needs jwt_audience, lest tokens for others be taken")
        if self.jwt_jwks_file and self.jwt_jwks_url:
            raise ValueError("jwt_jwks_file and jwt_jwks_url: one of them is enough")
        if not (self.jwt_jwks_file or self.jwt_jwks_url):
            try:
                check_https(self.jwt_issuer)
            except ValueError as error:
                raise ValueError(
                    f"jwt_issuer {error}, or jwt_jwks_file or jwt_jwks_url say where its keys are"
                ) from None
        return self


_OF_AN_ISSUER = ("jwt_audience", "jwt_jwks_file", "jwt_jwks_url", "jwt_ca_file")
