#!/bin/bash
# Trains on several nodes under SLURM, and goes on by itself after a time limit, a preemption or a lost node:
# the same command starts and restarts, since a run resumes from its newest checkpoint.
#
#     sbatch examples/launch/slurm.sh examples/gpt/train.py --training.max-steps 5000
#
# Submit it from a directory that all nodes share: runs/ is written there.

#SBATCH --job-name=dream-trainer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1       # one torchrun on each node, which starts one process for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append        # a requeued job goes on in the same file
#SBATCH --requeue                 # SLURM queues it again after a preemption or a lost node
#SBATCH --signal=B:USR1@180       # 180 s before the time limit, to this script alone, which tells the nodes (below)

set -u

# Where the ranks meet. The port differs from that of another job on the same node; the id from that of an earlier
# attempt of this job, whose agents may still be about.
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
attempt=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

# How long torchrun lets the processes save before it kills them. Below the 180 s; torch before 2.13 knows 30 s only.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150

# --kill-on-bad-exit: a node that has given up ends the others, rather than leave them waiting for it.
# --max-restarts: a process that dies takes its peers with it, and all start again from the newest checkpoint.
# In the background, since bash runs no trap while it waits for a command in the foreground.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="${NPROC_PER_NODE:-gpu}" \
    --max-restarts=3 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head_node:$port" \
    --rdzv-id="$attempt" \
    "$@" &
step=$!

# Before the time limit: SIGTERM to the torchrun of every node, not to srun, which would kill them. Its processes save
# and end. Once only: a third SIGTERM would end torchrun before its processes.
out_of_time=no
trap '[ $out_of_time = yes ] || { out_of_time=yes; scancel --signal=TERM "$SLURM_JOB_ID"; }' USR1
# scancel and preemption: SLURM has told the nodes itself. This script only has to outlive them, since its end is theirs.
trap ':' TERM

# A trapped signal ends `wait` early.
while true; do
    wait "$step"
    status=$?
    kill -0 "$step" 2>/dev/null || break
done

# torchrun ends with 1 after a SIGTERM, and with 0 where the training was finished after all.
if [ $out_of_time = yes ] && [ $status -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
