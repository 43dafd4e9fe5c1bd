#!/usr/bin/env bash
# Generate the stubs from proto/ into OUT/galley/pb. The include path `-I<package folder>=proto` makes the
# generated imports resolve without changes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/proto.sh OUT}
bin=$(cd "${VENV:-.venv}/bin" && pwd)

mapfile -t protos < <(find proto -name '*.proto' | LC_ALL=C sort)
PATH=$bin:$PATH "$bin/python" -m grpc_tools.protoc -Igalley/pb=proto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  "${protos[@]}"
