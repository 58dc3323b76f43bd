#!/usr/bin/env bash
# Collects in .gpu-wheels what tools/gpu.sh needs on a machine that has torch, numpy, rich, safetensors, xxhash and pytest
# but no network: packages at the pinned versions, for Python 3.12 on x86-64; about 5 MiB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
missing=(tyro docstring_parser typeguard cattrs attrs typing_extensions torchdata torchao)
rm -rf .gpu-wheels
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --constraint tools/constraints.txt \
    --dest .gpu-wheels "${missing[@]}"
ls -l .gpu-wheels
