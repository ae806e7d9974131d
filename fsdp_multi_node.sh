#!/bin/bash
# train.py on the nodes of a SLURM job, with GPUs or without.
#
#     sbatch fsdp_multi_node.sh          train; a new run, or on from the newest checkpoint in the output folder
#     sbatch fsdp_multi_node.sh check    look at the nodes first: what each process sees, how fast they exchange
#
# Before its time limit, or when it is preempted, the job saves, goes back into the queue and resumes. The job's
# output has what rank 0 says; what other ranks say, and every rank's errors, are in $errors/rank-*.err.

# One task per node, which starts the node's processes. Five minutes before the time limit USR1 comes to this
# shell, not to the tasks: it alone is there from the first second, and can wait until the others are.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# ---- edit from here ------------------------------------------------------------------------------------------
#SBATCH --job-name=qshard
##SBATCH --account=my_account
##SBATCH --partition=my_partition
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out

environment() {                       # srun takes what it sets to all nodes
  source .venv/bin/activate
}
project=$SLURM_SUBMIT_DIR             # the folder of train.py, seen by all nodes
errors=$project/errors-$SLURM_JOB_ID  # likewise
processes_per_node=                   # empty: one per GPU that the job got (2 on nodes without GPUs)
restarts=100                          # at most so many times back into the queue
flags=(
  --model_name meta-llama/Llama-2-70b-hf
  --dataset my_data.jsonl
  --train_type qlora
  --output_dir output                 # seen by all nodes, too
  --save_steps 200
)
# ---- to here -------------------------------------------------------------------------------------------------

cd "$project" || exit
environment || exit
if [ "${1-}" = check ]; then
  program=(scripts/launch_check.py)
else
  program=(train.py "${flags[@]}" --resume auto --error_dir "$errors")
fi
[ -z "$processes_per_node" ] || program+=(--world_size $((SLURM_JOB_NUM_NODES * processes_per_node)))

stop= srun=
forward() { # again and again: a signal to tasks that srun is still starting is lost
  stop=1
  [ -z "$srun" ] || while kill -USR1 "$srun" 2>/dev/null; do sleep 10; done &
}
trap forward USR1
trap : TERM # SLURM sends it to the tasks as well; what they need to save they shall have
rc=75
if [ -z "$stop" ]; then
  # SLURM 22 and later do not hand --cpus-per-task on to srun. The launchers end together by themselves; a node
  # that fails before it has met the others ends them a minute later.
  srun --kill-on-bad-exit=0 --wait=60 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    python "${program[@]}" &
  srun=$!
  [ -z "$stop" ] || forward
  while kill -0 "$srun" 2>/dev/null; do wait "$srun"; done # a trap interrupts wait
  wait "$srun"
  rc=$?
fi

running() { [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; }
case $rc in
  75 | 138 | 143) ;; # stopped and saved; or by USR1 or TERM before there was anything to save
  76)                # a node is lost: SLURM notices, too, and then requeues the job without it
    for _ in $(seq 120); do
      running || exit $rc
      sleep 5
    done
    ;;
  *) exit $rc ;;
esac
running || exit $rc # SLURM is ending the job already: cancelled, requeued, out of time
if [ "${SLURM_RESTART_COUNT:-0}" -ge "$restarts" ]; then
  echo "stopped after $restarts restarts; sbatch again to go on"
elif scontrol requeue "$SLURM_JOB_ID"; then
  echo "back into the queue (restart $((${SLURM_RESTART_COUNT:-0} + 1)))"
  sleep 60 # until SLURM ends this shell: a job that exits is not requeued
else
  echo "this job may not be requeued; sbatch again to go on"
fi
exit $rc
