"""A gateway that measures its event loop: `python -m tests.fakes.measured_gateway FLAGS`.

It runs as in production, but without uvloop.
"""

from __future__ import annotations

from tests.fakes.turns import measure


def main() -> None:
    measure(threads=True)
    from galley.common.server.server import run_main  # noqa: PLC0415  # after what it imports was replaced
    from services.gateway.service import prepare  # noqa: PLC0415
    from services.gateway.settings import GatewaySettings  # noqa: PLC0415

    run_main(GatewaySettings, "gateway", "A gateway that is measured.", prepare)


if __name__ == "__main__":
    main()
