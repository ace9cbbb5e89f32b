#!/usr/bin/env bash
# Creates one TPU VM, installs this checkout there and runs a command, which goes on when the connection drops.
#
#   tpu_vm.sh --name=mine --zone=ZONE --type=v5litepod-8 -- \
#     python experiments/pretrain.py --config=llama_130m --workdir=runs/130m
#
# --name=N --zone=Z --type=T   required: of the machine; T as gcloud names it, such as v5litepod-1, v6e-8, v4-8
# --project=P                  Google Cloud project; else gcloud's own
# --runtime=V                  TPU runtime version; else by type
# --setup=LINES                shell lines for the host after installing, such as a mount
# --spot                       a spot machine, which may be taken away (queued_spot.sh starts it again)
# --dry_run                    prints the commands, runs none
# Each is also read from the environment: LAUNCH_NAME, LAUNCH_ZONE, ...; switches are on when not empty.
# A machine of that name that exists is used. The command's log is ~/job.log there, its exit code ~/job.code.

set -euo pipefail
# shellcheck source=experiments/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

parse 'name zone type project runtime setup' 'spot dry_run' "$@"
require name zone type
require_command
check_type
[[ $LAUNCH_TYPE =~ ^(v5litepod|v6e)-[148]$|^(v2|v3|v4|v5p)-8$|^v5p-[24]$ ]] ||
  fail "--type=$LAUNCH_TYPE has several hosts or is not known; pod_slice.sh runs on every host of a slice."
check_tools gcloud git
create_vm
set_up
