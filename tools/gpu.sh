#!/usr/bin/env bash
# Everything that a GPU has to show, in one command of at most 9 minutes, without a network: tests marked gpu, then
# benches. It writes a page and its JSON into docs/measurements. `--dry` rehearses all of it on a CPU, with small sizes.
# Needs torch, pytest and what the package depends on; what of that is not installed it takes from .gpu-wheels, which
# tools/gpu_wheels.sh fills elsewhere. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD
if compgen -G ".gpu-wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .gpu-wheels/*.whl
    PYTHONPATH=$PWD:$site
fi
"$python" tools/gpu.py "$@"
