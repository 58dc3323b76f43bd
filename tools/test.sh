#!/usr/bin/env bash
# Environment, lint, types and tests. Without arguments: the tests that a change needs most, in about 12 minutes.
# `--ci` adds pages, examples and long tests, as CI does; `--all` runs every case; others go to pytest.
# `--torch 2.11.0`, before all others, runs only the tests, with that PyTorch, in an environment of its own.
# `--quick`, before all others, runs only tests: one case of each, as far as it starts no process and compiles nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    echo "tools/test.sh [--torch VERSION | --quick] [--ci | --all] [arguments of pytest]"
    sed -n '2,5s/^# //p' tools/test.sh
    exit
fi
source tools/environment.sh
if [ "${1:-}" = --torch ]; then
    use_torch "${2:?--torch needs a version, such as 2.11.0}"
    shift 2
fi
install dev

if [ "${1:-}" = --ci ]; then
    shift
elif [ $# = 0 ]; then
    set -- --ordinary
fi
export OMP_NUM_THREADS=1
if [ "$VENV" = .venv ] && [ "${1:-}" != --quick ]; then # what is written for the pinned PyTorch is checked against its types alone
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/basedpyright --pythonpath .venv/bin/python & # beside mypy, since each takes one core
    pyright=$!
    trap wait EXIT # shows what it finds, whatever mypy does
    .venv/bin/mypy
    # Each folder of an example by itself: both have a module `model`.
    .venv/bin/mypy examples/gpt
    MYPYPATH=examples/gpt .venv/bin/mypy examples/llama
    wait "$pyright"
fi
unset PYTHONDONTWRITEBYTECODE # ranks and programs of the tests import the same modules hundreds of times
workers=3
if [ "${1:-}" = --quick ]; then
    workers=2 # nothing waits, and each imports all that the tests use
fi
# Three for two cores, since a quarter of the time a test waits: for a signal, a time-out, another process.
exec "$VENV/bin/python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
