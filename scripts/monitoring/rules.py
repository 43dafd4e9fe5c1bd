"""The chart's rules for Prometheus outside Kubernetes: the default values, and the series of all releases."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_HELM = Path(sys.prefix) / "bin" / "helm"
_MATCHERS = 'namespace="galley", release="galley"'
_HEADER = """\
# Recording rules and alerts for Prometheus 2.40 or newer: `rule_files: [galley.rules.yaml]`.
#
# Written by `make monitoring` from helm/galley/templates/_rules.tpl with the default values of the chart.
# The labels `namespace` and `release` separate deployments, if the scrape sets them.
"""


def rule_file() -> str:
    """Return the rules of the chart without the matchers of a release."""
    command = [str(_HELM), "template", "galley", str(_ROOT / "helm" / "galley"), "--namespace", "galley"]
    command += ["--set", "monitoring.rules.enabled=true,monitoring.scrape=podMonitor"]
    command += ["--show-only", "templates/alerts.yaml"]
    # helm prints its errors on stderr.
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
    _, _, spec = text.partition("\nspec:\n")
    return _HEADER + textwrap.dedent(spec).replace(f", {_MATCHERS}", "").replace(f"{{{_MATCHERS}}}", "")
