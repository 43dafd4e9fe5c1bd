#!/usr/bin/env bash
# Generates the stubs from proto/ into OUT/galley/pb. The include path is what makes the generated
# imports resolve as they stand: `-I<package folder>=proto`.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/proto.sh OUT}
bin=$(cd "${VENV:-.venv}/bin" && pwd)

mapfile -t protos < <(find proto -name '*.proto' | LC_ALL=C sort)
PATH=$bin:$PATH "$bin/python" -m grpc_tools.protoc -Igalley/pb=proto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  "${protos[@]}"
