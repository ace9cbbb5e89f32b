#!/usr/bin/env bash
# Keeps a run going on spot TPUs: asks for a queued resource, runs the command on every host, and when the TPUs are
# taken away or the command ends with 75 (preempted and saved) deletes them, asks again and runs the same command.
#
#   queued_spot.sh --name=spot --zone=ZONE --type=v5litepod-16 -- \
#     python experiments/pretrain.py --config=llama_130m --workdir=gs://BUCKET/130m
#
# --name=N --zone=Z --type=T   required: of the queued resource and its node; T such as v5litepod-16, v6e-8
# --project=P                  Google Cloud project; else gcloud's own
# --runtime=V                  TPU runtime version; else by type
# --setup=LINES                shell lines for every host after installing, such as a mount
# --relaunches=20              how often it asks again before it gives up
# --poll=60                    seconds between looks
# --keep                       leaves the TPUs, and their cost, when the command has ended
# --dry_run                    prints the commands of one launch, runs none
# Each is also read from the environment: LAUNCH_NAME, LAUNCH_ZONE, ...; switches are on when not empty.
#
# Ends with 0 when the command did, with its code after showing the log's last lines when it failed, and with 75 when
# it gave up. Disks of spot TPUs are lost with them: the run folder must be on gs:// or a share that --setup mounts.
# Stopped and started again, it goes on with the TPUs that are there. Keep it running (tmux, or a small VM).

set -euo pipefail
# shellcheck source=experiments/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

LOST=5   # looks in a row at hosts that do not answer before they are given up
SETUPS=3 # tries to set up hosts that are there: what fails then fails on the next TPUs too

request() {
  tpus queued-resources create "$LAUNCH_NAME" --node-id="$LAUNCH_NAME" --accelerator-type="$LAUNCH_TYPE" \
    --runtime-version="$VERSION" --spot
}

remove() { tpus queued-resources delete "$LAUNCH_NAME" --force --quiet; }

# ACTIVE; FAILED, SUSPENDED, ...; PREEMPTED where the node says so first; or NONE.
state() {
  local queued node
  queued=$(tpus queued-resources describe "$LAUNCH_NAME" --format='value(state.state)' 2>/dev/null) || queued=NONE
  if [[ $queued == ACTIVE ]]; then
    node=$(tpus tpu-vm describe "$LAUNCH_NAME" --format='value(state)' 2>/dev/null) || node=
    case $node in PREEMPTED | TERMINATED | STOPPED) queued=PREEMPTED ;; esac
  fi
  echo "${queued:-NONE}"
}

gone() { [[ $1 =~ ^(FAILED|SUSPENDING|SUSPENDED|PREEMPTED|DELETING|NONE)$ ]]; }

# Waits for the TPUs; fails when they will not come.
await() {
  local now before=
  while now=$(state); do
    [[ $now == ACTIVE ]] && return
    gone "$now" && say "the request is $now" && return 1
    [[ $now == "$before" ]] || say "the request is $now"
    before=$now
    sleep "$LAUNCH_POLL"
  done
}

# Waits for the command; prints its code, 75 also when the TPUs are gone.
watch() {
  local now word silent=0
  while true; do
    now=$(state)
    if gone "$now"; then
      say "the TPUs are $now"
      echo 75
      return
    fi
    word=$(status)
    case $word in
      running) silent=0 ;;
      unreachable | none) ((++silent < LOST)) || { say 'the hosts do not answer'; echo 75; return; } ;;
      *) echo "$word"; return ;;
    esac
    sleep "$LAUNCH_POLL"
  done
}

# One launch, until its end; prints the code.
launch() {
  local try
  await || { echo 75; return; }
  if [[ $(status) != running ]]; then # after a restart of this script it may be
    for ((try = 1; ; try++)); do
      if { install && start; } >&2; then break; fi
      say "the hosts could not be set up, try $try of $SETUPS"
      if gone "$(state)"; then echo 75; return; fi
      if ((try == SETUPS)); then echo 1; return; fi
      sleep "$LAUNCH_POLL"
    done
  fi
  watch
}

parse 'name zone type project runtime setup relaunches poll' 'keep dry_run' "$@"
LAUNCH_RELAUNCHES=${LAUNCH_RELAUNCHES:-20} LAUNCH_POLL=${LAUNCH_POLL:-60}
require name zone type
require_number relaunches
require_number poll
require_command
check_type
VERSION=$(runtime)
if [[ -n $LAUNCH_DRY_RUN ]]; then
  request
  tpus queued-resources describe "$LAUNCH_NAME" --format='value(state.state)'
  install
  start
  on_hosts "$STATUS"
  remove
  exit
fi
check_tools gcloud git
for ((relaunch = 0; ; relaunch++)); do
  if [[ $(state) == NONE ]]; then
    request || fail "the request was refused; gcloud says why above."
  fi
  code=$(launch)
  if [[ $code != 75 ]]; then
    if [[ $code != 0 ]]; then
      say "ended with $code; the last lines of the log, where there is one:"
      on_hosts 'tail -n 40 ~/job.log' >&2 || true
    fi
    [[ -n $LAUNCH_KEEP ]] || remove
    exit "$code"
  fi
  remove || say 'nothing to delete'
  if ((relaunch >= LAUNCH_RELAUNCHES)); then
    say "gave up after $relaunch relaunches; the same command goes on from the run folder."
    exit 75
  fi
  say "relaunch $((relaunch + 1)) of at most $LAUNCH_RELAUNCHES"
done
