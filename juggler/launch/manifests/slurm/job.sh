# Runs a command in the background, so that the shell can pass signals on.
cd "$work" || exit 1
export OMP_NUM_THREADS=1
child=
stopped=
again=
# The end of the run: `juggler launch` sends USR2.
trap 'stopped=1; [ "$child" ] && kill -TERM "$child"' USR2 INT
# Slurm sends USR1 two minutes before the time limit, and TERM to a job that it preempts or cancels.
trap 'again=1; [ "$child" ] && kill -TERM "$child"' USR1 TERM
run() {
  "$@" &
  child=$!
  # A signal may have come between two commands.
  [ "$stopped$again" ] && kill -TERM "$child"
  while :; do
    wait "$child"
    status=$?
    # A signal ends the wait, not the child.
    [ "$status" -gt 128 ] && kill -0 "$child" 2> /dev/null || break
  done
  # The child may have ended just after a signal had ended the wait.
  wait "$child"
  status=$?
  child=
}
queue_again() {
  # A preempted job without a grace time is already in the queue, and a cancelled one stays away.
  job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
  [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ] || return
  # Slurm ends this script. If it ended first, Slurm could take its end for the next job's.
  scontrol requeue "$job" && sleep 60
}
