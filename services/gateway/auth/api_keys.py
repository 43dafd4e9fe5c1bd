"""API keys: the principals' file holds their SHA-256, and never the keys themselves."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from galley.core.admission.principal import Principal
from galley.core.errors import Unauthenticated
from services.gateway.auth.interceptor import Authenticator, Presented
from services.gateway.auth.principals_file import Principals

NEEDED = "an API key is needed: `authorization: Bearer KEY` or `x-api-key: KEY`"
UNKNOWN = "this API key is not known"


class ApiKeys(Authenticator):
    """Those that `principals` tells of at the time."""

    def __init__(
        self,
        principals: Callable[[], Principals],
        today: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._principals = principals
        self._today = today

    async def authenticate(self, presented: Presented) -> Principal:
        """See `Authenticator`."""
        if not presented.key:
            raise Unauthenticated(NEEDED)
        found = self.find(presented)
        if found is None:
            raise Unauthenticated(UNKNOWN)
        return found

    def find(self, presented: Presented) -> Principal | None:
        """Whose key it is; None if it is not known. Raises Unauthenticated if it has expired."""
        return self._principals().by_key(presented.key, self._today())
