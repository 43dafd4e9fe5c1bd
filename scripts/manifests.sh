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
for file in "$rendered"/galley/templates/*.yaml; do
  # Without the blank lines that helm leaves at the end.
  printf '%s\n' "$(<"$file")" >"$out/$(basename "$file")"
done
{
  echo "# Rendered from helm/galley by \`make manifests\`; change the chart, not these files."
  echo "apiVersion: kustomize.config.k8s.io/v1beta1"
  echo "kind: Kustomization"
  echo "namespace: galley"
  echo "resources:"
  (cd "$rendered/galley/templates" && printf '  - %s\n' *.yaml)
} >"$out/kustomization.yaml"
