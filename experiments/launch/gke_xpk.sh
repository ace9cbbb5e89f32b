#!/usr/bin/env bash
# GKE by xpk: makes a cluster of TPU slices, and runs a command on it that is restarted when it is preempted.
#
#   gke_xpk.sh cluster --cluster=C --zone=ZONE --type=v5litepod-16 --slices=2 --spot
#   gke_xpk.sh workload --cluster=C --zone=ZONE --type=v5litepod-16 --slices=2 --name=130m -- \
#     python experiments/pretrain.py --config=llama_130m --config.mesh.slices=2 --workdir=gs://BUCKET/130m
#
# --cluster=C --zone=Z --type=T   required; T as xpk names it, such as v5litepod-16, v6e-64
# --name=N                        of the workload, required there
# --project=P                     Google Cloud project; else gcloud's own
# --slices=1                      slices of that type
# --spot or --reservation=R       how the cluster gets its TPUs; else on demand
# --image=python:3.12             image that this checkout is put into and installed in at each start
# --restarts=20                   restarts of the workload: after exit code 75, and after a lost node
# --dry_run                       prints the command, runs none
# Each is also read from the environment: LAUNCH_CLUSTER, LAUNCH_ZONE, ...; switches are on when not empty.
# Needs xpk (pip install xpk), gcloud, kubectl and docker on this machine.

set -euo pipefail
# shellcheck source=experiments/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  cluster | workload) what=$1; shift ;;
  --help | -h) usage ;;
  *) fail "the first argument says what to create: cluster or workload." ;;
esac
parse 'cluster zone type name project slices reservation image restarts' 'spot dry_run' "$@"
LAUNCH_SLICES=${LAUNCH_SLICES:-1} LAUNCH_RESTARTS=${LAUNCH_RESTARTS:-20} LAUNCH_IMAGE=${LAUNCH_IMAGE:-python:3.12}
require cluster zone type
check_type
require_number slices
require_number restarts
common=(--cluster="$LAUNCH_CLUSTER" --tpu-type="$LAUNCH_TYPE" --num-slices="$LAUNCH_SLICES" --zone="$LAUNCH_ZONE"
  ${LAUNCH_PROJECT:+--project="$LAUNCH_PROJECT"})
if [[ $what == cluster ]]; then
  [[ -z $LAUNCH_SPOT || -z $LAUNCH_RESERVATION ]] || fail "--spot and --reservation exclude each other."
  capacity=--on-demand
  [[ -z $LAUNCH_SPOT ]] || capacity=--spot
  [[ -z $LAUNCH_RESERVATION ]] || capacity=--reservation=$LAUNCH_RESERVATION
  check_tools xpk gcloud
  run xpk cluster create "${common[@]}" "$capacity"
  exit
fi
require name
require_command
check_tools xpk gcloud
# xpk passes SIGTERM on to the shell that it starts this with: exec makes that shell the command, which saves. A pod that
# is told to stop has five minutes for it, instead of half a minute.
run xpk workload create "${common[@]}" --workload="$LAUNCH_NAME" --base-docker-image="$LAUNCH_IMAGE" \
  --script-dir="$ROOT" --max-restarts="$LAUNCH_RESTARTS" --restart-on-exit-codes=75 \
  --termination-grace-period-seconds=300 \
  --command="pip install --quiet -e '.[tpu,gcs]' && exec $(printf '%q ' "${COMMAND[@]}")"
