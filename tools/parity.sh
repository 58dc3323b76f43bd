#!/usr/bin/env bash
# Trains the llama example on every mesh of replicas, shards, split layers, shared sequences, shared experts and stages,
# and compares it with one process:
#   tools/parity.sh [most processes, 8] [--axis pp] [--part 2/5] [--record FILE]
# Prints tables by mesh and option, as docs/same-on-every-mesh.md has of earlier runs, and exits non-zero if a cell is further off than rounding. Hours on two
# cores (220 pipelines took 75 minutes on busy ones); with --part in pieces, whose findings a record adds up.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
PYTHONPATH=. exec "${PYTHON:-.venv/bin/python}" -m tools.parity "$@"
