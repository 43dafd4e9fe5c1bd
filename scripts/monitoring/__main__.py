"""Write dashboards and rules into folders: `python -m scripts.monitoring DASHBOARDS RULES`."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.monitoring.grafana import as_json
from scripts.monitoring.overview import OVERVIEW
from scripts.monitoring.rules import rule_file
from scripts.monitoring.sessions import SESSIONS
from scripts.monitoring.speculation import SPECULATION
from scripts.monitoring.target_engine import TARGET_ENGINE


def main() -> None:
    """Write one JSON file for each dashboard, and galley.rules.yaml."""
    folder, rules = (Path(name) for name in sys.argv[1:])
    for dashboard in (OVERVIEW, SPECULATION, TARGET_ENGINE, SESSIONS):
        text = as_json(dashboard)
        (folder / f"{dashboard.name}.json").write_text(text + "\n", encoding="utf-8")
    (rules / "galley.rules.yaml").write_text(rule_file(), encoding="utf-8")


if __name__ == "__main__":
    main()
