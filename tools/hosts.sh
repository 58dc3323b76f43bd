#!/usr/bin/env bash
# Runs a small job as 2 hosts x 2 ranks, each host a network namespace with a torchrun of its own, lets every kind of
# fault befall one of them, starts the job again, and compares its end with the undisturbed run's:
#   tools/hosts.sh [fault ...]
#   tools/hosts.sh --elastic [rounds, 100] [seed, 0]      hosts come and go at random; some 20 seconds a round
# Prints a table (docs/hosts.md shows it) and exits non-zero if anything ended otherwise than it should. It takes root and
# iproute2, and says so where they are missing. About ten minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
PYTHONPATH=. exec "${PYTHON:-.venv/bin/python}" -m tools.hosts "$@"
