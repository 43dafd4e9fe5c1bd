"""The entry point of the `galley` command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from galley.cli.app import app  # noqa: PLC0415  # its packages are an extra
    except ModuleNotFoundError as error:
        if (error.name or "galley").partition(".")[0] == "galley":
            raise
        sys.exit("error: galley: the command line is not installed: pip install 'galley[cli]'")
    app()


if __name__ == "__main__":
    main()
