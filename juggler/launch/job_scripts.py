"""The scripts of Slurm's jobs."""

from __future__ import annotations

#: Runs a command in the background and waits for it, so that the shell can pass signals on.
_RUN = """\
child=
stopped=
again=
trap 'stopped=1; [ "$child" ] && kill -TERM "$child"' TERM INT
# Slurm sends it two minutes before the time limit.
trap 'again=1; [ "$child" ] && kill -TERM "$child"' USR1
run() {{
  "$@" &
  child=$!
  # A signal may have come between two commands.
  [ "$stopped$again" ] && kill -TERM "$child"
  while :; do
    wait "$child"
    status=$?
    # A signal ends the wait, and not the child.
    [ "$status" -gt 128 ] && kill -0 "$child" 2> /dev/null || break
  done
  child=
}}
"""

#: Fields: options, work, every (seconds), keep, drop, status, counts, command.
DRIVER_SCRIPT = (
    """\
#!/bin/bash
{options}
cd {work} || exit 1
export OMP_NUM_THREADS=1
"""
    + _RUN
    + """\
# As many workers in the queue as are wanted: after an interruption, the driver has sent them home.
keep() {{
  wanted=$(cat "$2") || return
  there=$(squeue --me --noheader --array --name="$1" --sort=-i --format=%i) || return
  number=$(echo "$there" | grep -c .)
  if [ "$number" -lt "$wanted" ]; then
    sbatch --parsable --array="0-$((wanted - number - 1))" "$3"
  elif [ "$number" -gt "$wanted" ]; then
    echo "$there" | head -n "$((number - wanted))" | xargs scancel
  fi
}}
keep_all() {{
  # What is being submitted then is submitted first, so that it can be cancelled.
  trap exit TERM
  while :; do
    sleep {every} &
    wait $!
{keep}
  done
}}
keep_all > /dev/null 2>&1 &
keeping=$!
while :; do
  run {command}
  # Killed, and not by us: it goes on from its newest checkpoint.
  [ "$status" -gt 128 ] && [ -z "$stopped$again" ] || break
  sleep 5
done
kill "$keeping"
wait "$keeping"
if [ "$again" ] && [ "$status" = 143 ]; then
  # Slurm ends this script: the end of a script that went first may be taken for that of the next.
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
else
  echo "$status" > {status}
  rm -f {counts}
{drop}
fi
exit "$status"
"""
)

#: Fields: options, work, tls, command.
WORKER_SCRIPT = (
    """\
#!/bin/bash
{options}
cd {work} || exit 1
export OMP_NUM_THREADS=1
{tls}
"""
    + _RUN
    + """\
while :; do
  run {command} --reattach-seconds 0
  # 0: the driver has sent it home.
  [ "$status" != 0 ] && [ -z "$stopped$again" ] || break
  sleep 5
done
[ "$again" ] && scontrol requeue "$SLURM_JOB_ID" && sleep 60
exit "$status"
"""
)
