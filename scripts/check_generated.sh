#!/usr/bin/env bash
# Generate stubs, manifests, the chart's schema, tables, dashboards, rules and locks into a temporary folder, and compare them
# with the committed files.
set -euo pipefail
cd "$(dirname "$0")/.."

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
failed=0

compare() { # COMMITTED GENERATED TARGET
  if ! diff --recursive --unified --exclude __pycache__ --exclude __init__.py "$1" "$2"; then
    echo "$1 is not what would be generated: run \`make $3\` and commit the result" >&2
    failed=1
  fi
}

scripts/proto.sh "$fresh"
compare galley/pb "$fresh/galley/pb" proto
"${VENV:-.venv}/bin/python" scripts/manifests.py "$fresh/k8s"
compare deploy/k8s/base "$fresh/k8s/base" manifests
compare deploy/k8s/overlays "$fresh/k8s/overlays" manifests
cp helm/galley/values.schema.json "$fresh/values.schema.json"
"${VENV:-.venv}/bin/python" -m scripts.chart_schema "$fresh/values.schema.json"
compare helm/galley/values.schema.json "$fresh/values.schema.json" chart-schema
mkdir "$fresh/chart"
cp helm/galley/README.md helm/galley/values.yaml "$fresh/chart"
"${VENV:-.venv}/bin/python" -m scripts.chart_readme "$fresh/chart/README.md"
compare helm/galley/README.md "$fresh/chart/README.md" chart-readme
cp docs/observe/metrics.md "$fresh/metrics.md"
"${VENV:-.venv}/bin/python" -m scripts.metrics_table "$fresh/metrics.md"
compare docs/observe/metrics.md "$fresh/metrics.md" metrics
cp docs/configuration.md "$fresh/configuration.md"
"${VENV:-.venv}/bin/python" -m scripts.configuration_page "$fresh/configuration.md"
compare docs/configuration.md "$fresh/configuration.md" configuration
mkdir "$fresh/dashboards" "$fresh/prometheus"
"${VENV:-.venv}/bin/python" -m scripts.monitoring "$fresh/dashboards" "$fresh/prometheus"
compare helm/galley/files/dashboards "$fresh/dashboards" monitoring
compare deploy/prometheus "$fresh/prometheus" monitoring
cp -r deploy/locks "$fresh/locks"
scripts/locks.sh "$fresh/locks"
compare deploy/locks "$fresh/locks" locks
exit "$failed"
