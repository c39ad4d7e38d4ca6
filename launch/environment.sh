# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: a virtual environment with everything in it. Safe to run again, and without a
# network once it is made.
#
#   PYTHON   interpreter to build it with (default python3; 3.11 or newer)
#   VENV     where it goes (default .venv in the project)
#
# After it, $VENV/bin is in front of PATH.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV

fail() { echo "launch: $*" >&2; exit 1; }

make_environment() { # EXTRAS, "" or "[dev]"; sets num_gpus
    command -v "$PYTHON" >/dev/null || fail "no $PYTHON found. Install Python 3.11 or newer, or set PYTHON."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
        || fail "$PYTHON is $("$PYTHON" --version 2>/dev/null || echo "nothing that runs"); Python 3.11 or newer is" \
            "needed. Set PYTHON to a newer one."
    make_venv
    export PATH="$VENV/bin:$PATH"
    is_installed "$1" || install_project "$1"
    # What torch can use counts: CUDA_VISIBLE_DEVICES and MIG decide that, not the devices that nvidia-smi lists.
    # shellcheck disable=SC2034  # read by who sources this
    num_gpus=$("$VENV/bin/python" -c 'import torch; print(torch.cuda.device_count())') \
        || fail "torch cannot be imported; see its message above. Remove $VENV and start again."
}

make_venv() {
    if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    # None is there, or one whose making was killed before pip was in it.
    if [ -d "$VENV" ] && [ -n "$(ls -A "$VENV")" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
        fail "$VENV is not a virtual environment. Remove it, or set VENV to another place."
    fi
    "$PYTHON" -m venv --clear "$VENV" || fail "cannot make $VENV (Debian: apt-get install python3-venv)."
}

install_project() { # EXTRAS
    rm -f "$VENV"/.installed-*
    local pin
    pin=$(grep '^torch==' constraints.txt)
    if ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(torch.__version__.split("+")[0] != sys.argv[1])' \
        "${pin#torch==}" 2>/dev/null; then
        # Without a GPU the build without CUDA is enough, and gigabytes smaller. The usual one is installed elsewhere.
        { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1 || "$VENV/bin/python" -m pip install --quiet \
            --retries 0 --timeout 15 "$pin" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
            || echo "launch: the build of torch without CUDA is not available here; the usual one takes some gigabytes"
    fi
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$1" \
        || fail "pip could not install the project; see its message above."
    fingerprint "$1" >"$VENV/.installed-$1"
}

is_installed() { # EXTRAS
    [ "$(cat "$VENV/.installed-$1" 2>/dev/null)" = "$(fingerprint "$1")" ] && return
    [ -z "$1" ] && is_installed "[dev]"
}

fingerprint() { # EXTRAS: hash of all that decides what is installed; the place too, because that is editable
    { printf '%s\n' "$PWD" "$1"; cat pyproject.toml constraints.txt; } | sha256sum | cut -d' ' -f1
}
