#!/usr/bin/env bash
# A cluster on one machine, to try launches on: nodes with a network, host name, /etc/hosts, /run and process numbers of
# their own, each with an sshd and one link to a common switch. Files are shared. Needs root, iproute2 and
# openssh-server (and pdsh for launches). The machine's own interfaces, keys and settings are left alone.
#
#   tools/checks/local_cluster.sh N [COMMAND ...]      N nodes in a temporary folder; the command (or a shell) runs on node1 and
#                                               finds $HOSTFILE; when it ends, everything is removed
# or in steps:
#   tools/checks/local_cluster.sh up N DIR             makes DIR with DIR/hostfile: node1 slots=2 ...   (SLOTS=2)
#   tools/checks/local_cluster.sh exec DIR NODE COMMAND ...    on that node, in this folder
#   tools/checks/local_cluster.sh cut DIR NODE         pulls the node's cable out of the switch: silence, no reset
#   tools/checks/local_cluster.sh restore DIR NODE     puts it back
#   tools/checks/local_cluster.sh down DIR             ends every process of the nodes and removes DIR
#
# A node is the namespaces of its first process, an sshd; with that process all others in it end, and its network goes.
# The switch is a bridge in a network namespace of its own.

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
    [ ! -e "$dir" ] || [ -z "$(ls -A "$dir")" ] || fail "$dir is not empty. Take it down, or choose another folder."
    mkdir -p "$dir/bin"
    dir=$(realpath "$dir")
    [[ $dir != *[[:space:]]* ]] || fail "$dir: the path must have no blanks."
    trap 'down "$dir"' EXIT # unless all goes well
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

configure() { # N DIR: keys, names and settings of all nodes
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
    # Whoever calls ssh on a node, a launcher too, gets these settings; nobody's ~/.ssh is read or written.
    printf '#!/bin/sh\nexec %s -F %s/ssh_config "$@"\n' "$(command -v ssh)" "$dir" >"$dir/bin/ssh"
    chmod +x "$dir/bin/ssh"
}

start() { # DIR NAME COMMAND ...: in the background; its pid, or that of its child, goes to DIR/NAME.pid
    local dir=$1 name=$2 pid child=""
    shift 2
    setsid "$@" </dev/null >"$dir/$name.log" 2>&1 &
    pid=$!
    disown # its end, when it comes, is no news
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
    mount -t tmpfs tmpfs /run # sshd wants a folder there
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

on() { # DIR NAME COMMAND ...: in the namespaces of a node or of the switch
    local dir=$1 name=$2 pid parts=("${PARTS[@]}")
    shift 2
    [ -f "$dir/$name.pid" ] || fail "there is no $name in $dir."
    pid=$(cat "$dir/$name.pid")
    grep -qzF "$dir" "/proc/$pid/cmdline" 2>/dev/null || fail "$name of $dir has ended. Take the cluster down."
    if [ "$name" = switch ]; then parts=(--net); fi
    # The folder would be lost on the way. HOSTFILE and PATH: what a person on a node needs.
    # shellcheck disable=SC2016
    HOSTFILE=$dir/hostfile PATH=$dir/bin:$PATH nsenter --target "$pid" "${parts[@]}" \
        sh -c 'cd "$1" && shift && exec "$@"' sh "$PWD" "$@"
}

down() { # DIR
    local dir file pid
    dir=$(realpath "$1")
    [ -f "$dir/hosts" ] || fail "$1 holds no cluster."
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
    trap : INT # the command, which a terminal sends it too, decides what it means
    (($# > 0)) || set -- "${SHELL:-bash}"
    on "$folder/cluster" node1 "$@" || code=$?
    exit "$code"
}

case ${1:-} in
    [0-9]*) for_a_command "$@" ;;
    up) (($# == 3)) || fail "up N DIR"; up "$2" "$3" ;;
    down) (($# == 2)) || fail "down DIR"; down "$2" ;;
    exec) (($# > 3)) || fail "exec DIR NODE COMMAND ..."; on "$(realpath "$2")" "${@:3}" ;;
    cut | restore)
        (($# == 3)) || fail "$1 DIR NODE"
        state=up
        if [ "$1" = cut ]; then state=down; fi
        on "$(realpath "$2")" switch ip link set "port${3#node}" "$state"
        ;;
    boot) boot "$2" "$3" ;;
    *) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; [[ ${1:-} =~ ^(-h|--help)$ ]] || exit 2 ;;
esac
