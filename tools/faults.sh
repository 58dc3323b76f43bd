#!/usr/bin/env bash
# Kills a small run again and again, by SIGKILL, restarts it each time, and compares its end with the undisturbed run's:
#   tools/faults.sh [number of kills, 200] [seed, 0]
# Prints a table and exits non-zero if anything was lost that must not be. About a second for each kill.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
PYTHONPATH=. exec "${PYTHON:-.venv/bin/python}" -m tools.faults "$@"
