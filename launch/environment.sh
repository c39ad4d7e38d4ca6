# Sourced by quickstart.sh and test.sh: a virtual environment with everything in it. Safe to run again.
#
#   PYTHON   interpreter to build it with (default python3; 3.11 or newer)
#   VENV     where it goes (default .venv in the project)
#
# After it, $VENV/bin is in front of PATH, as DeepSpeed needs: it looks for `ninja` there when it compiles.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-$PWD/.venv}

fail() { echo "launch: $*" >&2; exit 1; }

make_environment() { # EXTRAS, for instance "" or "[dev]"
    command -v "$PYTHON" >/dev/null || fail "no $PYTHON found. Install Python 3.11 or newer, or set PYTHON."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        || fail "$PYTHON is $("$PYTHON" --version); Python 3.11 or newer is needed. Set PYTHON to a newer one."
    # DeepSpeed compiles its CPU collectives at the first start; without a compiler that fails in the middle of a run.
    command -v "${CXX:-c++}" >/dev/null || fail "no C++ compiler found. Install one (Debian: apt-get install g++)."
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" || fail "cannot make $VENV (Debian: apt-get install python3-venv)."
    export PATH="$VENV/bin:$PATH"
    local pin
    pin=$(grep '^torch==' constraints.txt)
    if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
        # Without a GPU the build without CUDA is enough, and gigabytes smaller. Where it cannot be had: the usual one.
        has_gpu || "$VENV/bin/pip" install --quiet --retries 0 --timeout 15 "$pin" \
            --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || true
    fi
    "$VENV/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt -e ".$1" \
        || fail "pip could not install the project; its message stands above."
    has_gpu || build_cpu_extension
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

build_cpu_extension() {
    # Otherwise the first training run would build it, silently, for half a minute.
    DS_ACCELERATOR=cpu "$VENV/bin/python" - >"$VENV/build_cpu_extension.log" 2>&1 <<'PY' \
        || fail "DeepSpeed's CPU extension does not compile; see $VENV/build_cpu_extension.log."
from deepspeed.accelerator import get_accelerator

get_accelerator().create_op_builder("ShareMemCommBuilder").load()
PY
}
