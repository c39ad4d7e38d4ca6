#!/usr/bin/env bash
# An sshd without root, for a node of a cluster: keys only, host keys of its own made at the first start.
#
#   PORT              where it listens (default 2222)
#   AUTHORIZED_KEYS   who may come in (default ~/.ssh/authorized_keys): mount the first node's public key
#
# Runs in the foreground until it is told to end.

set -euo pipefail

PORT=${PORT:-2222}
AUTHORIZED_KEYS=${AUTHORIZED_KEYS:-$HOME/.ssh/authorized_keys}
own=$HOME/.sshd

if [ ! -s "$AUTHORIZED_KEYS" ]; then
    echo "sshd: $AUTHORIZED_KEYS is missing or empty, so nobody could come in. Mount the first node's key." >&2
    exit 2
fi
umask 077
mkdir -p "$own"
cp "$AUTHORIZED_KEYS" "$own/authorized_keys"  # a mounted one may belong to others, or be open to them
[ -s "$own/host_key" ] || ssh-keygen -q -t ed25519 -N "" -f "$own/host_key"
options=(
    "Port $PORT"
    "HostKey $own/host_key"
    "PidFile $own/pid"
    "AuthorizedKeysFile $own/authorized_keys"
    "StrictModes no"            # that file is ours alone; the folders above it may be mounted anyhow
    "AuthenticationMethods publickey"
    "PasswordAuthentication no"
    "KbdInteractiveAuthentication no"
    "UsePAM no"                 # it needs root
    "AllowTcpForwarding no"
    "X11Forwarding no"
    "PrintMotd no"
    "MaxStartups 1000"          # pdsh opens one for each rank's node at once
    "SetEnv PATH=$PATH"         # a login by ssh would not have the environment of Python in it
)
printf '%s\n' "${options[@]}" >"$own/config"
exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f "$own/config"
