#!/usr/bin/env bash
# Renders the chart with its default values into OUT: one file a component, and a kustomization over them.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/manifests.sh OUT}
helm=${HELM:-${VENV:-.venv}/bin/helm}

rendered=$(mktemp -d)
trap 'rm -rf "$rendered"' EXIT
"$helm" template galley helm/galley --namespace galley --output-dir "$rendered" >/dev/null

mkdir -p "$out"
rm -f "$out"/*.yaml
cp "$rendered"/galley/templates/*.yaml "$out/"
{
  echo "# Rendered from helm/galley by \`make manifests\`; change the chart, not these files."
  echo "apiVersion: kustomize.config.k8s.io/v1beta1"
  echo "kind: Kustomization"
  echo "namespace: galley"
  echo "resources:"
  (cd "$rendered/galley/templates" && LC_ALL=C ls -- *.yaml) | sed 's/^/  - /'
} >"$out/kustomization.yaml"
