#!/usr/bin/env bash
# Trains the llama example on every mesh of replicas, shards and tensor parallelism, and compares it with one process:
#   tools/parity.sh [most processes, 8]
# Prints the matrix (docs/same-on-every-mesh.md shows it) and exits non-zero if a cell is further off than rounding. Ten minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
PYTHONPATH=. exec "${PYTHON:-.venv/bin/python}" -m tools.parity "$@"
