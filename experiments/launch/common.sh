# Shared by the scripts beside it: options, gcloud or its dry run, what is done on the hosts. Not run by itself.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
COMMAND=()

fail() { echo "error: $*" >&2; exit 1; }
say() { echo "$*" >&2; }
usage() { sed -n '2,/^$/s/^#\( \|$\)//p' "$0"; exit 0; }

# parse 'name zone ...' 'spot dry_run ...' ARGUMENTS: fills LAUNCH_NAME, ..., and COMMAND with what stands behind --.
# Options of the first list have values, those of the second are switches. Each may come from the environment instead.
parse() {
  local valued=" $1 " switches=" $2 " option name
  for option in $1 $2; do
    name=LAUNCH_${option^^}
    printf -v "$name" '%s' "${!name:-}"
  done
  shift 2
  while (($#)); do
    case $1 in
      --help | -h) usage ;;
      --) COMMAND=("${@:2}"); return ;;
      --*=*)
        option=${1%%=*}; option=${option#--}
        [[ $valued == *" $option "* ]] || fail "there is no option --$option=VALUE; --help lists them."
        printf -v "LAUNCH_${option^^}" '%s' "${1#*=}" ;;
      --*)
        option=${1#--}
        [[ $switches == *" $option "* ]] || fail "there is no switch --$option; --help lists them."
        printf -v "LAUNCH_${option^^}" 1 ;;
      *) fail "unexpected argument '$1': options are --name=value, and the command to run stands behind --." ;;
    esac
    shift
  done
}

# require name zone ...: every one of these options has a value.
require() {
  local option name
  for option in "$@"; do
    name=LAUNCH_${option^^}
    [[ -n ${!name} ]] || fail "--$option=VALUE (or the environment variable $name) must be given."
  done
}

require_command() {
  ((${#COMMAND[@]})) || fail "the command to run must be given behind --: $(basename "$0") ... -- python experiments/pretrain.py ..."
}

require_number() {
  local name=LAUNCH_${1^^}
  [[ ${!name} =~ ^[0-9]+$ ]] || fail "--$1=${!name} is not a whole number."
}

# check_tools gcloud ...: these are on this machine. Asked for after everything that a user may have mistyped.
check_tools() {
  local tool
  [[ -z $LAUNCH_DRY_RUN ]] || return 0
  for tool in "$@"; do
    command -v "$tool" >/dev/null || fail "$tool is not installed on this machine; --dry_run shows what would be run."
  done
}

check_type() {
  [[ $LAUNCH_TYPE != v5e-* ]] || fail "--type=$LAUNCH_TYPE is v5litepod-${LAUNCH_TYPE#v5e-} for gcloud and xpk."
}

# Runs a command, or prints it under --dry_run.
run() {
  if [[ -n $LAUNCH_DRY_RUN ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

tpus() { run gcloud compute tpus "$@" --zone="$LAUNCH_ZONE" ${LAUNCH_PROJECT:+--project="$LAUNCH_PROJECT"}; }

on_hosts() { tpus tpu-vm ssh "$LAUNCH_NAME" --worker=all --command="$1"; }

# The runtime version that a TPU type boots, unless --runtime says another.
runtime() {
  case ${LAUNCH_RUNTIME:-$LAUNCH_TYPE} in
    "$LAUNCH_RUNTIME") echo "$LAUNCH_RUNTIME" ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    *) fail "no runtime version is known for --type=$LAUNCH_TYPE (known: v2-N, v3-N, v4-N, v5litepod-N, v5p-N, v6e-N); give --runtime=VERSION." ;;
  esac
}

create_vm() {
  local version
  version=$(runtime)
  if [[ -z $LAUNCH_DRY_RUN ]] && tpus tpu-vm describe "$LAUNCH_NAME" >/dev/null 2>&1; then
    say "$LAUNCH_NAME exists: it is used as it is."
    return
  fi
  tpus tpu-vm create "$LAUNCH_NAME" --accelerator-type="$LAUNCH_TYPE" --version="$version" ${LAUNCH_SPOT:+--spot}
}

# The images of TPU VMs are Ubuntu 22.04 with Python 3.10. uv brings a 3.12 of its own into the user's home: no root, and
# no waiting for apt, whose lock a fresh host holds for minutes.
INSTALL='set -e
mkdir -p ~/lns_jax && tar -xzf ~/lns_jax.tar.gz -C ~/lns_jax && cd ~/lns_jax
[ -x ~/.local/bin/uv ] || python3 -m pip install --quiet --user uv
[ -x .venv/bin/python ] || ~/.local/bin/uv venv --quiet --python 3.12 .venv
~/.local/bin/uv pip install --quiet --python .venv/bin/python -e ".[tpu,gcs]"'

# Copies this checkout, uncommitted changes of tracked files included, to every host and installs it there.
install() {
  local archive state
  archive=$(mktemp --suffix=.tar.gz)
  state=$(git -C "$ROOT" stash create)
  git -C "$ROOT" archive --output="$archive" "${state:-HEAD}" &&
    tpus tpu-vm scp "$archive" "$LAUNCH_NAME:lns_jax.tar.gz" --worker=all &&
    on_hosts "$INSTALL${LAUNCH_SETUP:+
$LAUNCH_SETUP}"
  state=$?
  rm -f "$archive"
  return "$state"
}

# Starts COMMAND on every host in a session of its own, so that it outlives the connection; ~/job.log has what it
# prints, ~/job.code its exit code once it has one. A SIGTERM to all of the session is for the command, which saves.
start() {
  local quoted
  quoted=$(printf '%q ' "${COMMAND[@]}")
  # shellcheck disable=SC2016  # for the host's shell
  on_hosts 'cd ~/lns_jax && rm -f ~/job.code && export PATH="$PWD/.venv/bin:$PATH"
setsid nohup bash -c '\''trap : TERM; "$@"; echo $? > ~/job.code'\'' job '"$quoted"'> ~/job.log 2>&1 < /dev/null &
echo $! > ~/job.pid'
}

# shellcheck disable=SC2016  # for the host's shell
STATUS='if [ -f ~/job.code ]; then echo "job: $(cat ~/job.code)"
elif [ -f ~/job.pid ] && kill -0 "$(cat ~/job.pid)" 2> /dev/null; then echo "job: running"
elif [ -f ~/job.pid ]; then echo "job: lost"
else echo "job: none"; fi'

# One word for the jobs of all hosts: running; none; unreachable; or the exit code that counts. An error (1) counts more
# than a preemption (75, 143 before Python had begun, or a job that a reboot took), because the other hosts of a failed
# one end with 75.
status() {
  local words
  words=" $(on_hosts "$STATUS" 2>/dev/null | sed -n 's/^.*job: //p' | tr '\n' ' ') " || true
  case $words in
    *' running '*) echo running ;;
    *' 1 '*) echo 1 ;;
    *' 75 '* | *' 143 '* | *' lost '*) echo 75 ;;
    *' none '*) echo none ;;
    *[1-9]*) tr -s ' ' '\n' <<<"$words" | grep -m1 '[1-9]' ;;
    *' 0 '*) echo 0 ;;
    *) echo unreachable ;;
  esac
}

# Installs and starts, and says what a user does next with a machine that goes on by itself, and costs also when it does
# not work.
set_up() {
  local code=0 at="$LAUNCH_NAME --zone=$LAUNCH_ZONE${LAUNCH_PROJECT:+ --project=$LAUNCH_PROJECT}"
  { install && start; } || code=1
  [[ -z $LAUNCH_DRY_RUN ]] || return "$code"
  if ((code)); then
    say 'the hosts could not be set up: the reason is above, and the same command tries again'
  else
    say "started; the log: gcloud compute tpus tpu-vm ssh $at --worker=0 --command='tail -f job.log'"
  fi
  say "it costs money until: gcloud compute tpus tpu-vm delete $at"
  return "$code"
}
