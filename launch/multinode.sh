#!/usr/bin/env bash
# Trains on the nodes of a hostfile: one command, started again after any end but success and mistakes.
#
#   bash launch/multinode.sh [OPTIONS] HOSTFILE CONFIG.toml [train flags]
#
# HOSTFILE has a line "NAME slots=GPUS" per node; rank 0 is on the first. By itself it starts all nodes from here, with
# pdsh over ssh, after a look at each: does it answer, has it this folder and the same software. With --no_ssh it starts
# this node only: run it once on every node, by hand or by a scheduler.
#
#   --master_addr NAME   where the ranks meet: the first node, by a name or address that all nodes know it by
#                        (default: its name in HOSTFILE)
#   --master_port PORT   default $MASTER_PORT, else 29500
#   --ssh_port PORT      of the sshd on the nodes
#   --no_ssh --node_rank N     start node N (0, 1 ...) here, and nothing elsewhere
#
# Start it where RUN is visible: in the folder that all nodes have under the same path. Variables: launch/cluster.env.
# Exit codes are those of `txl launch`: 0 done; 75, 76 start the same command again; 2 mend first.
# shellcheck source-path=SCRIPTDIR source=cluster.env

set -euo pipefail

fail() { echo "multinode: $*" >&2; exit 2; }

without_mark() { sed $'1s/^\xef\xbb\xbf//'; } # a byte order mark, as editors of Windows write it

hosts_of() { # HOSTFILE: its names, one a line
    local line found=()
    [ -r "$1" ] || fail "cannot read the hostfile $1. It has a line \"NAME slots=GPUS\" for each node."
    while read -r line || [ -n "$line" ]; do
        [[ $line == \#* || -z $line ]] && continue
        [[ $line =~ ^([^[:space:],]+)[[:space:]]+slots=[1-9][0-9]*([[:space:]]|$) ]] \
            || fail "$1: \"$line\" is not \"NAME slots=GPUS\". Write for instance \"node1 slots=8\"."
        [[ " ${found[*]} " != *" ${BASH_REMATCH[1]} "* ]] || fail "$1 names ${BASH_REMATCH[1]} twice. Add its slots up."
        found+=("${BASH_REMATCH[1]}")
    done < <(without_mark <"$1")
    ((${#found[@]} > 0)) || fail "$1 names no node. Write a line \"NAME slots=GPUS\" for each."
    printf '%s\n' "${found[@]}"
}

# Printed by every node: what MASTER_ADDR is there, and all that has to be alike. No single quotes: it travels in them.
FACTS='
import hashlib, importlib.metadata as installed, pathlib, platform, socket, sys
try:
    address = socket.getaddrinfo(sys.argv[1], None)[0][4][0]
except OSError:
    address = "unknown"
import txl_dist
code = hashlib.sha256()
for path in sorted(pathlib.Path(txl_dist.__file__).parent.rglob("*.py")):
    code.update(path.read_bytes())
versions = [f"{name} {installed.version(name)}" for name in ("torch", "deepspeed")]
versions += ["python", platform.python_version(), "txl_dist", txl_dist.__version__, code.hexdigest()[:8]]
print("facts", address, *versions)
'

check_nodes() { # MASTER_ADDR PYTHON SSH_ARGUMENTS HOST ...: all at once; names every node that is not ready
    local master=$1 python=$2 arguments=$3 here=${PWD@Q} said host line address facts model="" expected="" bad=""
    shift 3
    said=$(PDSH_RCMD_TYPE=ssh PDSH_SSH_ARGS_APPEND="$arguments -o BatchMode=yes -o ConnectTimeout=5" \
        pdsh -f 64 -u 60 -w "$(IFS=,; echo "$*")" "cd $here && ${python@Q} -c '$FACTS' ${master@Q}" 2>&1 </dev/null) || true
    for host; do
        line=$(sed -n "s/^$host: //p" <<<"$said" | tail -n 1)
        if [[ $line != "facts "* ]]; then
            bad+=$'\n'"  $host: ${line:-no answer in 60 s}"
            continue
        fi
        read -r _ address facts <<<"$line"
        [ -n "$model" ] || { model=$host expected=$facts; }
        if [ "$address" = unknown ]; then
            bad+=$'\n'"  $host: does not know the name $master. Give --master_addr with an address of the first node."
        elif [ "$host" != "$1" ] && [[ $address == 127.* || $address == ::1 ]]; then
            bad+=$'\n'"  $host: takes $master for itself ($address). Give --master_addr with an address of the first node."
        elif [ "$facts" != "$expected" ]; then
            bad+=$'\n'"  $host: has $facts"$'\n'"    but $model: $expected. Install the same there."
        fi
    done
    [ -z "$bad" ] || fail "these nodes are not ready:$bad"$'\n'"Each must answer \`ssh NODE true\` without a password," \
        "and have $PWD and $python with the same software. Mend them, or take them out of the hostfile."
}

shared_environment() { # the lines of a .deepspeed_env, which DeepSpeed sets on every node
    local name
    if [ -f ~/.deepspeed_env ]; then without_mark <~/.deepspeed_env; fi
    for name in "${SHARED[@]}"; do echo "$name=${!name}"; done
}

# shellcheck source=cluster.env
source "$(dirname "${BASH_SOURCE[0]}")/cluster.env"
master="" port=$MASTER_PORT node_rank="" is_ssh=1 ssh_port=()
while (($# > 0)); do
    case $1 in
        --no_ssh) is_ssh="" && shift && continue ;;
        -h | --help) sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit ;;
        --master_addr | --master_port | --node_rank | --ssh_port) (($# > 1)) || fail "$1 needs a value." ;;
        -*) fail "unknown option $1. Options of the training come behind CONFIG.toml; see --help." ;;
        *) break ;;
    esac
    case $1 in
        --master_addr) master=$2 ;;
        --master_port) port=$2 ;;
        --node_rank) node_rank=$2 ;;
        --ssh_port) ssh_port=(--ssh_port "$2") ;;
    esac
    shift 2
done
(($# > 1)) || fail "what is needed: HOSTFILE CONFIG.toml; see --help."
hostfile=$1 config=$2
names=$(hosts_of "$hostfile")
mapfile -t hosts <<<"$names"
[ -r "$config" ] || fail "cannot read the configuration $config."
for program in txl deepspeed; do
    command -v $program >/dev/null || fail "no $program on PATH. Activate its environment: source .venv/bin/activate."
done
master=${master:-${hosts[0]}}
flags=(--hostfile "$hostfile" --master_addr "$master" --master_port "$port")

if [ -z "$is_ssh" ]; then
    if ! [[ $node_rank =~ ^[0-9]+$ ]] || ((node_rank >= ${#hosts[@]})); then
        fail "--no_ssh needs --node_rank, 0 to $((${#hosts[@]} - 1)) by the lines of $hostfile; got \"$node_rank\"."
    fi
    exec txl launch "${flags[@]}" --no_ssh --node_rank "$node_rank" "${@:2}"
fi

[ -z "$node_rank" ] || fail "--node_rank goes with --no_ssh; without it all nodes are started from here."
command -v pdsh >/dev/null || fail "no pdsh. Install it here (Debian: apt-get install pdsh), or start each node with --no_ssh."
python=$(dirname "$(command -v deepspeed)")/python
[ -x "$python" ] || python=$(command -v python3)
# DeepSpeed's command line for pdsh says `cd FOLDER;` without quotes.
[[ $PWD != *[[:space:]]* ]] || fail "the folder '$PWD' has a blank in its name, which DeepSpeed's pdsh runner cannot enter." \
    "Move the project, or start with --no_ssh on each node."
check_nodes "$master" "$python" "${PDSH_SSH_ARGS_APPEND:-}${ssh_port[1]:+ -p ${ssh_port[1]}}" "${hosts[@]}"
DS_ENV_FILE=$(mktemp)
export DS_ENV_FILE
shared_environment >"$DS_ENV_FILE"
# The launcher takes the place of this shell, so that signals and exit code are its own; this one tidies up after it.
{ tail --pid=$$ -f /dev/null; rm -f "$DS_ENV_FILE"; } </dev/null >/dev/null 2>&1 &
# --force_multi: a hostfile of one node would otherwise be started here, whatever its name.
exec txl launch "${flags[@]}" "${ssh_port[@]}" --no_ssh_check --force_multi "${@:2}"
