#!/usr/bin/env bash
# Make a cluster of several nodes on one machine, to try launches. Each node has its own network, host name,
# /etc/hosts, /run, process numbers and sshd, and a link to a common switch. All nodes share the files of the machine.
# The script needs root, iproute2 and openssh-server (and pdsh for launches). It does not change the machine's own
# interfaces, keys and settings.
#
#   tools/checks/local_cluster.sh N [COMMAND ...]      N nodes in a temporary folder; the command (or a shell) runs on
#                                                      node1 with $HOSTFILE; the cluster is removed when it ends
# or in steps:
#   tools/checks/local_cluster.sh up N DIR             makes DIR, with DIR/hostfile: node1 slots=2 ...   (SLOTS=2)
#   tools/checks/local_cluster.sh exec DIR NODE COMMAND ...    runs the command on that node, in this folder
#   tools/checks/local_cluster.sh cut DIR NODE [to|from]   disconnects the node from the switch, without a reset of its
#                                                      connections; only what goes to the node, or comes from it
#   tools/checks/local_cluster.sh restore DIR NODE     connects the node again
#   tools/checks/local_cluster.sh kill DIR NODE        disconnects the node and ends its processes, as a loss of power
#   tools/checks/local_cluster.sh down DIR             ends every process of the nodes and removes DIR
#
# A node consists of the namespaces of its first process, an sshd. When this process ends, all other processes of the
# node end, and its network is removed. The switch is a bridge in its own network namespace.

set -euo pipefail
SUBNET=10.77.0
PARTS=(--net --uts --mount --pid)

fail() { echo "local_cluster: $*" >&2; exit 1; }

up() { # N DIR
    local num_nodes=$1 dir=$2 number
    [[ $num_nodes =~ ^[1-9][0-9]?$ ]] || fail "the number of nodes must be 1 to 99, not \`$num_nodes\`."
    ((EUID == 0)) || fail "network namespaces need root."
    for program in ip unshare nsenter ssh-keygen /usr/sbin/sshd; do
        command -v "$program" >/dev/null || fail "no $program. Install iproute2, util-linux and openssh-server."
    done
    [ ! -e "$dir" ] || [ -z "$(ls -A "$dir")" ] || fail "$dir is not empty. Type local_cluster.sh down DIR to remove a cluster, or choose another folder."
    mkdir -p "$dir/bin"
    dir=$(realpath "$dir")
    [[ $dir != *[[:space:]]* ]] || fail "$dir: the path must not contain blanks."
    trap 'down "$dir"' EXIT # removes the cluster if a command fails
    configure "$num_nodes" "$dir"
    # shellcheck disable=SC2016
    start "$dir" switch unshare --net bash -c \
        'ip link add switch type bridge && ip link set switch up && exec -a "switch of $0" sleep infinity' "$dir"
    for ((number = 1; number <= num_nodes; number++)); do
        start "$dir" "node$number" unshare "${PARTS[@]}" --fork --kill-child --mount-proc \
            bash "${BASH_SOURCE[0]}" boot "$dir" "node$number"
    done
    until grep -qz "^switch of" "/proc/$(cat "$dir/switch.pid")/cmdline"; do sleep 0.02; done
    for ((number = 1; number <= num_nodes; number++)); do connect "$dir" "$number"; done
    trap - EXIT
}

configure() { # N DIR: writes keys, names and settings of all nodes
    local dir=$2 number name
    ssh-keygen -q -t ed25519 -N "" -f "$dir/key"
    echo "127.0.0.1 localhost" >"$dir/hosts"
    for ((number = 1; number <= $1; number++)); do
        name=node$number
        mkdir "$dir/$name"
        ssh-keygen -q -t ed25519 -N "" -C "$name" -f "$dir/$name/host_key"
        echo "$SUBNET.$number $name" >>"$dir/hosts"
        echo "$name slots=${SLOTS:-2}" >>"$dir/hostfile"
        echo "$name,$SUBNET.$number $(cut -d' ' -f1,2 "$dir/$name/host_key.pub")" >>"$dir/known_hosts"
        printf '%s\n' "HostKey $dir/$name/host_key" "AuthorizedKeysFile $dir/key.pub" "PasswordAuthentication no" \
            "KbdInteractiveAuthentication no" "PermitRootLogin prohibit-password" "StrictModes no" "UsePAM no" \
            "PidFile none" "MaxStartups 100" >"$dir/$name/sshd_config"
    done
    printf '%s\n' "IdentityFile $dir/key" "IdentitiesOnly yes" "UserKnownHostsFile $dir/known_hosts" \
        "GlobalKnownHostsFile /dev/null" "StrictHostKeyChecking yes" >"$dir/ssh_config"
    # All calls of ssh on a node use these settings, also those of a launcher. No ~/.ssh is read or written.
    printf '#!/bin/sh\nexec %s -F %s/ssh_config "$@"\n' "$(command -v ssh)" "$dir" >"$dir/bin/ssh"
    chmod +x "$dir/bin/ssh"
}

start() { # DIR NAME COMMAND ...: starts it in the background; writes its pid, or that of its child, to DIR/NAME.pid
    local dir=$1 name=$2 pid child=""
    shift 2
    setsid "$@" </dev/null >"$dir/$name.log" 2>&1 &
    pid=$!
    disown # the shell does not report its end
    while [ "$name" != switch ] && [ -z "$child" ]; do # unshare's child is the node's first process
        kill -0 "$pid" 2>/dev/null || fail "$name did not start: $(cat "$dir/$name.log")"
        child=$(tr -d ' ' <"/proc/$pid/task/$pid/children" || true)
    done
    echo "${child:-$pid}" >"$dir/$name.pid"
}

boot() { # DIR NODE: the first process of a node
    hostname "$2"
    ip link set lo up
    mount --bind "$1/hosts" /etc/hosts
    mount -t tmpfs tmpfs /run # sshd needs a folder in /run
    mkdir /run/sshd
    exec /usr/sbin/sshd -D -e -f "$1/$2/sshd_config"
}

connect() { # DIR NUMBER
    local dir=$1 name=node$2 tries=0
    on "$dir" switch ip link add "port$2" type veth peer name eth0 netns "$(cat "$dir/$name.pid")"
    on "$dir" switch ip link set "port$2" master switch up
    on "$dir" "$name" ip addr add "$SUBNET.$2/24" dev eth0
    on "$dir" "$name" ip link set eth0 up
    until on "$dir" "$name" ssh -o BatchMode=yes "$name" true 2>/dev/null; do
        ((++tries < 100)) || fail "no sshd on $name: $(tail -3 "$dir/$name.log")"
        sleep 0.1
    done
}

on() { # DIR NAME COMMAND ...: runs it in the namespaces of a node or of the switch
    local dir=$1 name=$2 pid parts=("${PARTS[@]}")
    shift 2
    [ -f "$dir/$name.pid" ] || fail "there is no $name in $dir."
    pid=$(cat "$dir/$name.pid")
    grep -qzF "$dir" "/proc/$pid/cmdline" 2>/dev/null || fail "$name of $dir has ended. Type local_cluster.sh down $dir."
    if [ "$name" = switch ]; then parts=(--net); fi
    # nsenter changes the folder, so the shell changes back. HOSTFILE and PATH are for the user of the node.
    # shellcheck disable=SC2016
    HOSTFILE=$dir/hostfile PATH=$dir/bin:$PATH nsenter --target "$pid" "${parts[@]}" \
        sh -c 'cd "$1" && shift && exec "$@"' sh "$PWD" "$@"
}

disconnect() { # DIR NODE [to|from]
    case ${3:-both} in
        both) on "$1" switch ip link set "port${2#node}" down ;;
        to) on "$1" switch tc qdisc replace dev "port${2#node}" root pfifo limit 0 ;; # a queue that drops all packets
        from) on "$1" "$2" tc qdisc replace dev eth0 root pfifo limit 0 ;;
        *) fail "a cut is to or from a node, not \`$3\`." ;;
    esac
}

reconnect() { # DIR NODE
    on "$1" switch ip link set "port${2#node}" up
    on "$1" switch tc qdisc del dev "port${2#node}" root 2>/dev/null || true
    on "$1" "$2" tc qdisc del dev eth0 root 2>/dev/null || true
}

kill_node() { # DIR NODE
    local pid
    disconnect "$1" "$2"
    pid=$(cat "$1/$2.pid")
    kill -KILL "$pid"
    while [ -e "/proc/$pid" ]; do sleep 0.02; done
}

down() { # DIR
    local dir file pid
    dir=$(realpath "$1")
    [ -f "$dir/hosts" ] || fail "$1 does not contain a cluster."
    for file in "$dir"/*.pid; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        if grep -qzF "$dir" "/proc/$pid/cmdline" 2>/dev/null; then
            kill -KILL "$pid"
            while [ -e "/proc/$pid" ]; do sleep 0.02; done
        fi
    done
    rm -r "$dir"
}

for_a_command() { # N [COMMAND ...]
    local num_nodes=$1 folder code=0
    shift
    folder=$(mktemp -d)
    up "$num_nodes" "$folder/cluster"
    trap 'down "$folder/cluster"; rmdir "$folder"' EXIT
    trap : INT # the terminal sends it to the command too, which decides how to react
    (($# > 0)) || set -- "${SHELL:-bash}"
    on "$folder/cluster" node1 "$@" || code=$?
    exit "$code"
}

case ${1:-} in
    [0-9]*) for_a_command "$@" ;;
    up) (($# == 3)) || fail "up N DIR"; up "$2" "$3" ;;
    down) (($# == 2)) || fail "down DIR"; down "$2" ;;
    exec) (($# > 3)) || fail "exec DIR NODE COMMAND ..."; on "$(realpath "$2")" "${@:3}" ;;
    cut) (($# == 3 || $# == 4)) || fail "cut DIR NODE [to|from]"; disconnect "$(realpath "$2")" "${@:3}" ;;
    restore) (($# == 3)) || fail "restore DIR NODE"; reconnect "$(realpath "$2")" "$3" ;;
    kill) (($# == 3)) || fail "kill DIR NODE"; kill_node "$(realpath "$2")" "$3" ;;
    boot) boot "$2" "$3" ;;
    *) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; [[ ${1:-} =~ ^(-h|--help)$ ]] || exit 2 ;;
esac
