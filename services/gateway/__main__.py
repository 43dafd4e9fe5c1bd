"""`python -m services.gateway`: serve galley.v1.Generation."""

from __future__ import annotations

from galley.common.server.sigterm import heed_sigterm

if __name__ == "__main__":
    heed_sigterm()

from galley.common.server.server import run_main
from services.gateway.service import prepare
from services.gateway.settings import GatewaySettings

if __name__ == "__main__":
    run_main(
        GatewaySettings,
        "gateway",
        "Runs rounds of draft and target, and streams confirmed tokens.",
        prepare,
    )
