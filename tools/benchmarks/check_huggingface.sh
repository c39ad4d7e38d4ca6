#!/usr/bin/env bash
# Check that transformers reads the output of `txl export --format huggingface` and computes the same log-probabilities.
#
#   tools/benchmarks/check_huggingface.sh [--venv DIR] [BUNDLE [SEED]]
#
#   BUNDLE   a bundle (an exported model) that Hugging Face's TransfoXLLMHeadModel can express; without BUNDLE, small
#            random bundles of every kind are made and checked
#   SEED     seed of the test tokens and of the random bundles (default 1)
#   --venv   environment with transformers; it is created if it does not exist (default .venv-huggingface in the
#            current directory)
#
# The project's environment must be the active one: `python` is taken from PATH. Exit code 1 if a log-probability
# differs by more than 1e-5, or if a tensor is missing or unexpected.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
venv=.venv-huggingface

fail() { echo "check_huggingface: $*" >&2; exit 1; }

make_environment() { # sets theirs
    # 4.46.3 is the release that the exporter is written for. torch has the same version as in our environment, so that
    # a difference comes from the models. pip chooses matching versions of safetensors and numpy.
    local pin packages
    pin=$(grep '^torch==' "$root/constraints.txt")
    packages="transformers==4.46.3 $pin safetensors numpy"
    theirs=$venv/bin/python
    if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$packages" ] && "$theirs" -c '' 2>/dev/null; then return; fi
    if [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        fail "$venv is not a virtual environment. Remove the folder, or name another folder with --venv."
    fi
    echo "making $venv: $packages"
    python -m venv --clear "$venv" || fail "cannot make $venv (Debian: apt-get install python3-venv)."
    echo '*' >"$venv/.gitignore"
    # The build without CUDA is enough, and gigabytes smaller. If it cannot be downloaded, the default build is used.
    "$theirs" -m pip install --quiet --retries 0 --timeout 15 "$pin" \
        --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || true
    # shellcheck disable=SC2086  # several words
    "$theirs" -m pip install --quiet --disable-pip-version-check $packages \
        || fail "pip could not install transformers. Read the message of pip above."
    echo "$packages" >"$venv/.installed"
}

export_all() { # exports bundle/ to huggingface/ in each folder of $work
    # All exports run in one process, because starting `txl export` for each bundle would take most of the time.
    python - "$work" <<'PY'
import sys
from pathlib import Path

from txl_dist.cli.main import main

for bundle in sorted(Path(sys.argv[1]).glob("*/bundle")):
    code = main(["export", str(bundle), str(bundle.with_name("huggingface")), "--format", "huggingface"])
    if code:
        sys.exit(code)
PY
}

while (($#)); do
    case $1 in
        --venv) [ $# -gt 1 ] || fail "--venv needs a folder."; venv=$2; shift 2 ;;
        --venv=*) venv=${1#--venv=}; shift ;;
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) fail "unknown option $1; see --help." ;;
        *) break ;;
    esac
done
(($# <= 2)) || fail "too many arguments; see --help."
bundle=${1:-} seed=${2:-1}
[[ $seed =~ ^[0-9]+$ ]] || fail "SEED must be a whole number, not $seed."
[ -z "$bundle" ] || [ -d "$bundle" ] || fail "$bundle is not a folder. Name a bundle that \`txl export\` wrote."
python -c 'import txl_dist' >/dev/null 2>&1 \
    || fail "the project is not in the active environment. Activate it: source .venv/bin/activate"

# Small models gain nothing from threads, and a fixed number of threads gives the same sums on every machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
make_environment

if [ -n "$bundle" ]; then
    bundle=$(realpath "$bundle")
    mkdir "$work/${bundle##*/}"
    ln -s "$bundle" "$work/${bundle##*/}/bundle"
else
    python -m tools.benchmarks.huggingface_ours random "$work" --seed "$seed"
fi
export_all >/dev/null || fail "the export failed. Read its message above."
python -m tools.benchmarks.huggingface_ours values "$work" --seed "$seed"
# transformers must not contact the hub.
HF_HUB_OFFLINE=1 "$theirs" -m tools.benchmarks.huggingface_theirs "$work" || fail "the log-probabilities of transformers differ from ours."
echo "check passed: transformers computes the same log-probabilities"
