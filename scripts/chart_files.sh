#!/usr/bin/env bash
# Copies what the chart installs but does not own, alerts and dashboards, into OUT: a chart reads no file outside its
# own folder.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/chart_files.sh OUT}

rm -rf "$out"
mkdir -p "$out/dashboards"
cp deploy/alerts/galley.rules.yaml "$out/"
cp deploy/dashboards/*.json "$out/dashboards/"
