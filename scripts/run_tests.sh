#!/usr/bin/env bash
# Run the tests of a tier: run_tests.sh PYTHON TIER PYTEST_ARGUMENT...
# Of at most 3 tests that fail, each is run once more with nothing beside it. The run fails if one fails again.
# Those that pass then are named as unstable: each is a defect to mend (tests/README.md).
set -euo pipefail
python=$1 tier=$2
shift 2
most=3

cache="build/tests/$tier"
rm -rf "$cache"
status=0
"$python" -m pytest -o "cache_dir=$cache" "$@" || status=$?
# 1: tests failed. Anything else than that, such as a file that cannot be imported, is no matter of time.
[[ $status == 1 ]] || exit "$status"

mapfile -t failed < <("$python" -c 'import json; [print(name) for name in json.load(open("'"$cache"'/v/cache/lastfailed"))]')
((${#failed[@]} >= 1 && ${#failed[@]} <= most)) || exit 1
echo "== failed, run once more:" "${failed[@]}"
"$python" -m pytest -o "cache_dir=$cache" -p no:xdist "${failed[@]}"
echo "== UNSTABLE, failed once and passed alone:" "${failed[@]}"
