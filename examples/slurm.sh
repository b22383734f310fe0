#!/bin/bash
# One training under Slurm, one task for each rank, started by srun alone: `sbatch examples/slurm.sh`.
#SBATCH --job-name=ncz
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --output=%x-%j.log
set -euo pipefail

# All ranks meet at the first host of the job, at a port that follows from the job's number.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# torch reads RANK, WORLD_SIZE and LOCAL_RANK. srun gives each task the same numbers by other names.
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    exec "$@"' rank "${PYTHON:-python}" examples/train_ddp.py "$@"
