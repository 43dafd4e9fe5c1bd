"""Write the dashboards into a folder: `python -m scripts.monitoring helm/galley/files/dashboards`."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.monitoring.grafana import as_json
from scripts.monitoring.overview import OVERVIEW
from scripts.monitoring.sessions import SESSIONS
from scripts.monitoring.speculation import SPECULATION
from scripts.monitoring.target_engine import TARGET_ENGINE


def main() -> None:
    """Write one JSON file for each dashboard."""
    (folder,) = (Path(name) for name in sys.argv[1:])
    for dashboard in (OVERVIEW, SPECULATION, TARGET_ENGINE, SESSIONS):
        text = as_json(dashboard)
        (folder / f"{dashboard.name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
