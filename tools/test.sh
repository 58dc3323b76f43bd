#!/usr/bin/env bash
# Environment, lint, types and tests. Arguments go to pytest; `--all` runs every case and not only the spanning set.
# TORCH=2.11.0 takes another PyTorch than the pinned one.
set -euo pipefail
cd "$(dirname "$0")/.."
CONSTRAINTS=(--constraint tools/constraints.txt)
source tools/environment.sh
install dev

export OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Each folder of an example by itself: both have a module `model`.
.venv/bin/mypy examples/gpt
MYPYPATH=examples/gpt .venv/bin/mypy examples/llama
.venv/bin/basedpyright --pythonpath .venv/bin/python
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
