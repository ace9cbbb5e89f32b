#!/usr/bin/env bash
# Creates a TPU slice of several hosts, installs this checkout on every host and runs the same command on all.
#
#   pod_slice.sh --name=pod --zone=ZONE --type=v5litepod-16 -- \
#     python experiments/pretrain.py --config=llama_1b --config.mesh.fsdp=-1 --config.mesh.data=1 --workdir=gs://BUCKET/1b
#
# --name=N --zone=Z --type=T   required: of the slice; T as gcloud names it, such as v5litepod-16, v6e-64, v4-32
# --project=P                  Google Cloud project; else gcloud's own
# --runtime=V                  TPU runtime version; else by type
# --setup=LINES                shell lines for every host after installing, such as a mount
# --spot                       spot machines, which may be taken away (queued_spot.sh starts them again)
# --dry_run                    prints the commands, runs none
# Each is also read from the environment: LAUNCH_NAME, LAUNCH_ZONE, ...; switches are on when not empty.
# A slice of that name that exists is used. On every host ~/job.log is the log and ~/job.code the exit code.

set -euo pipefail
# shellcheck source=experiments/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

parse 'name zone type project runtime setup' 'spot dry_run' "$@"
require name zone type
require_command
check_type
check_tools gcloud git
create_vm
set_up
