#!/usr/bin/env bash
# Collects in .gpu-wheels what tools/gpu.sh needs on a machine that has torch, numpy, rich, safetensors, xxhash and pytest
# but no network: packages in pure Python, at the pinned versions, for Python 3.12; about 1 MiB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
missing=(tyro docstring_parser typeguard cattrs attrs typing_extensions torchdata)
rm -rf .gpu-wheels
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation py --abi none \
    --platform any --constraint tools/constraints.txt --dest .gpu-wheels "${missing[@]}"
ls -l .gpu-wheels
