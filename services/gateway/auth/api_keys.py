"""API keys: the principals file holds their SHA-256, never the keys themselves."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from galley.core.admission.principal import Principal
from galley.core.errors import Unauthenticated
from services.gateway.auth.interceptor import Authenticator, Credentials
from services.gateway.auth.principals_file import Principals

KEY_NEEDED = "an API key is needed: `authorization: Bearer KEY` or `x-api-key: KEY`"
KEY_UNKNOWN = "this API key is not known"


class ApiKeyAuthenticator(Authenticator):
    """Accepts the keys in the current `principals`."""

    def __init__(
        self,
        principals: Callable[[], Principals],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._principals = principals
        self._now = now

    async def authenticate(self, credentials: Credentials) -> Principal:
        """Return the principal of the key. Raise Unauthenticated if it is missing, unknown or expired."""
        if not credentials.key:
            raise Unauthenticated(KEY_NEEDED)
        principal = self.find(credentials)
        if principal is None:
            raise Unauthenticated(KEY_UNKNOWN)
        return principal

    def find(self, credentials: Credentials) -> Principal | None:
        """Return the principal of the key, None if it is unknown. Raise Unauthenticated if it has expired."""
        return self._principals().by_key(credentials.key, self._now())
