#!/usr/bin/env bash
# Trains a small GPT on real text, on all GPUs of this machine or on 2 CPU processes. Run it again: it resumes.
# Arguments go to the training script; try `bash tools/demo.sh --help`.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh

# A torch that already works with this machine's GPUs is worth more than the pinned one, which may be built for others.
python=$(find_python)
if [ -n "$python" ] && "$python" -c '
import sys, torch
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(not (torch.cuda.is_available() and version >= (2, 11)))' 2>/dev/null; then
    pins=$(mktemp)
    trap 'rm -f "$pins"' EXIT
    grep -v '^torch==' tools/constraints.txt >"$pins"
    CONSTRAINTS=$pins
    install plot --system-site-packages
else
    install plot
fi

n_gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
if [ "$n_gpus" -gt 0 ]; then
    # Each rank gets an equal part of the example's global batch of 32.
    n_processes=$n_gpus
    while [ $((32 % n_processes)) -ne 0 ]; do n_processes=$((n_processes - 1)); done
    echo "Training on $n_processes of $n_gpus GPUs"
else
    n_processes=2
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    echo "No GPU found: training on $n_processes CPU processes"
fi
.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node="$n_processes" examples/gpt/train.py "$@"
