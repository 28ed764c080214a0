# Keeps the wanted number of workers in the queue: after an interruption, the driver released them.
keep() {
  wanted=$(cat "$2") || return
  there=$(squeue --me --noheader --array --name="$1" --sort=-i --format=%i) || return
  number=$(echo "$there" | grep -c .)
  if [ "$number" -lt "$wanted" ]; then
    sbatch --parsable --array="0-$((wanted - number - 1))" "$3"
  elif [ "$number" -gt "$wanted" ]; then
    echo "$there" | head -n "$((number - wanted))" | xargs scancel
  fi
}
keep_all() {
  # A submission in progress finishes first, so that it can be cancelled.
  trap exit TERM
  while :; do
    sleep "$every" &
    wait $!
    for role in "${!names[@]}"; do
      keep "${names[role]}" "${counts[role]}" "${scripts[role]}"
    done
  done
}
keep_all > /dev/null 2>&1 &
keeping=$!
while :; do
  run "${command[@]}"
  # Killed from outside: it resumes from its newest checkpoint.
  [ "$status" -gt 128 ] && [ -z "$stopped$again" ] || break
  sleep 5
done
kill "$keeping" 2> /dev/null
wait "$keeping"
if [ "$again" ] && [ -z "$stopped" ] && [ "$status" != 0 ]; then
  # The counts stay. 1: the learner was preempted first, so there is no last checkpoint.
  queue_again
else
  echo "$status" > "$status_file"
  rm -f "${counts[@]}"
  for name in "${names[@]}"; do
    scancel --me --name="$name"
  done
fi
exit "$status"
