#!/usr/bin/env bash
# Shows that the tests have teeth: each one-line fault below must turn its tests red. Prints a table; exits 1 if a fault survives.
# Usage: bash tools/mutants.sh [name ...]   (no name: all of them)
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
install dev
export OMP_NUM_THREADS=1
exec .venv/bin/python tools/mutants.py "$@"
