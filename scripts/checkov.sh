#!/usr/bin/env bash
# Run checkov on what the chart renders, in an environment of its own: it is large, and needs other versions of
# Galley's dependencies. deploy/checkov/config.yaml lists the checks that the chart does not pass, with reasons.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.galley/checkov
helm=${VENV:-.venv}/bin/helm

wanted=$(cksum <deploy/checkov/constraints.txt)
if [[ ! -x $venv/bin/checkov || ! -f $venv/.made-of || $(<"$venv/.made-of") != "$wanted" ]]; then
  echo "== installing checkov into $venv (once; 300 MB)"
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  PIP_CONSTRAINT=$PWD/deploy/checkov/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv/bin/python" -m pip install --quiet checkov
  echo "$wanted" >"$venv/.made-of"
fi

rendered=$(mktemp -d)
trap 'rm -rf "$rendered"' EXIT
render() { # NAME [VALUES]
  "$helm" template galley helm/galley --namespace galley --skip-tests ${2:+--values "$2"} >"$rendered/$1.yaml"
}
render default
for values in helm/galley/examples/*.yaml deploy/k8s/values/*.yaml; do
  render "$(basename "$values" .yaml)" "$values"
done
echo "== checkov"
"$venv/bin/checkov" --config-file deploy/checkov/config.yaml --directory "$rendered"
echo "checkov found no problem in $(find "$rendered" -name '*.yaml' | wc -l) renderings"
