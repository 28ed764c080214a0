[ "$tls" ] && export JUGGLER_TLS="$tls"
while :; do
  run "${command[@]}" --reattach-seconds 0
  # 0: the driver released it.
  [ "$status" != 0 ] && [ -z "$stopped$again" ] || break
  # A driver that was cancelled does not come back.
  there=$(squeue --me --noheader --name="$driver" --format=%i) && [ -z "$there" ] && break
  sleep 5
done
[ "$again" ] && queue_again
exit "$status"
