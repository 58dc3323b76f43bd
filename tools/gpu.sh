#!/usr/bin/env bash
# Everything that a GPU has to show, in one command of at most 9 minutes, without a network: tests marked gpu, then
# benches. It writes a page and its JSON into docs/measurements. `--dry` rehearses all of it on a CPU, with small sizes.
# Needs torch, pytest and what the package depends on; what of that is not installed it takes from .gpu-wheels, which
# tools/gpu_wheels.sh fills elsewhere. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && ! "$python" -c "import torch" 2>/dev/null && [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
if ! "$python" -c "import torch" 2>/dev/null; then
    echo "$python has no torch. Set PYTHON to an interpreter that has it." >&2
    exit 2
fi
export PYTHONPATH=$PWD
if compgen -G ".gpu-wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .gpu-wheels/*.whl
    PYTHONPATH=$PWD:$site
fi
"$python" tools/gpu.py "$@"
