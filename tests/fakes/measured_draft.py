"""A draft that measures its event loop: `python -m tests.fakes.measured_draft FLAGS`.

It runs as in production, but without uvloop.
"""

from __future__ import annotations

from tests.fakes.turns import measure


def main() -> None:
    measure()
    from services.draft import __main__ as draft  # noqa: PLC0415  # after what it imports was replaced

    draft.main()


if __name__ == "__main__":
    main()
