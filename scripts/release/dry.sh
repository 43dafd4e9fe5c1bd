#!/usr/bin/env bash
# Run all of a release that needs no registry, and leave what it makes in build/release. TAG, if set, must be that of the version.
#
# Pip's index must be reachable: wheels are built in an environment of their own, and the locks are resolved for arm64.
set -euo pipefail
cd "$(dirname "$0")/../.."
tag=${TAG:-}
bin=$(cd "${VENV:-.venv}/bin" && pwd)
out=$PWD/build/release
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' galley/version.py)

if [[ -n $tag && $tag != "v$version" ]]; then
  echo "TAG: must be v$version, the version in galley/version.py, got $tag" >&2
  exit 1
fi
rm -rf "$out"
mkdir -p "$out"

echo "== sdist, and the wheel that it builds"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$bin/uv" build --quiet --build-constraint constraints.txt --out-dir "$out/dist"
rm "$out/dist/.gitignore"
"$bin/python" -m scripts.release.wheel "$out"/dist/*.whl

echo "== locks, for amd64 and arm64"
for platform in x86_64 aarch64; do
  for lock in build gateway draft target model; do
    "$bin/uv" pip install --quiet --dry-run --python-version 3.11 --python-platform "$platform-manylinux_2_31" \
      --target "$out/none" --no-deps --only-binary :all: --require-hashes --requirement "deploy/locks/$lock.txt"
  done
done
# PyTorch's index has the CPU builds: one wheel a platform.
(($(grep -c -- --hash= deploy/locks/torch-cpu.txt) == 2))

echo "== bills of materials"
make --silent sbom
cp -r build/sbom "$out/sbom"

echo "== workflow and images"
"$bin/python" -m pytest --quiet --no-header -p no:xdist tests/deploy/test_images.py tests/deploy/test_release.py

echo "== chart, with digests made up for this run"
"$bin/python" - >"$out/images.json" <<'PYTHON'
import hashlib, json
from scripts.release.chart import NAMES, store_image

print(json.dumps({name: "sha256:" + hashlib.sha256(name.encode()).hexdigest() for name in (*NAMES, store_image())}))
PYTHON
"$bin/python" -m scripts.release.schema "$out/values.schema.json"
"$bin/python" -m scripts.release.chart --registry registry.example.com/galley --repository https://example.com/galley \
  --images "$out/images.json" --schema "$out/values.schema.json" --out "$out/chart" --helm "$bin/helm"
"$bin/helm" lint --strict --quiet "$out"/chart/*.tgz
"$bin/helm" show readme "$out"/chart/*.tgz | grep --quiet '^## Values$'
for values in "$out"/chart/values-*-images.yaml; do
  "$bin/helm" template galley "$out"/chart/*.tgz --values "$values" >"$out/rendered.yaml"
  if grep -E '^ *(- )?image: ' "$out/rendered.yaml" | grep -vE '@sha256:[0-9a-f]{64}"?$'; then
    echo "$values: must name every image by digest" >&2
    exit 1
  fi
done

echo "== done: $out. Only the workflow looks for vulnerabilities (make audit), builds the images, pushes and signs"
