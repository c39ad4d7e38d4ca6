#!/usr/bin/env bash
# Builds a wheel, installs it in an empty environment, and uses it there: help, a dry run, and a report of a short run.
#
#   bash launch/wheel.sh [FOLDER]    default build/wheel; its content is removed first
#   DEPENDENCIES=PATH                a folder of installed packages to use in place of downloading them
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

folder=${1:-build/wheel}
[[ $folder == /* ]] || folder=$PWD/$folder
rm -rf "$folder" && mkdir -p "$folder"
pin=$(grep '^torch==' constraints.txt)
if [ -n "${DEPENDENCIES:-}" ]; then
    "$PYTHON" -m venv --without-pip "$folder/venv"
    "$PYTHON" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$folder" .
    "$PYTHON" -m zipfile -e "$folder"/txl_dist-*.whl "$folder/site"
    for path in "$folder/site" "$DEPENDENCIES"; do echo "$path"; done >"$("$folder/venv/bin/python" -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
else
    "$PYTHON" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip wheel -q --no-deps --wheel-dir "$folder" .
    "$folder/venv/bin/python" -m pip install -q "$pin" --index-url https://download.pytorch.org/whl/cpu \
        || echo "launch: the build of torch without CUDA is not available here; the usual one takes some gigabytes"
    "$folder/venv/bin/python" -m pip install -q -c constraints.txt "$folder"/txl_dist-*.whl
fi

txl() { "$folder/venv/bin/python" -m txl_dist "$@"; }
configs=$PWD/configs
cd "$folder" # not the checkout: only what is installed is imported
seq 1 4000 | tr '\n' ' ' >numbers.txt
txl --help >help.txt
txl prepare numbers.txt --out corpus --tokenizer byte >prepare.txt
small=(--data.path corpus --run.dir run --train.max_steps 4 --train.num_lanes 4 --train.microbatch_lanes 4
    --train.segment_len 8 --train.memory_len 8 --model.num_layers 1 --model.cutoffs --checkpoint.every_steps 4)
txl train "$configs/mine.toml" "${small[@]}" --dry-run >dry_run.txt
txl train "$configs/mine.toml" "${small[@]}" >train.txt 2>&1 || { cat train.txt >&2 && exit 1; }
txl report run >report.txt
echo "the wheel works: $(basename "$folder"/txl_dist-*.whl), $("$folder/venv/bin/python" -c \
    'import txl_dist; print(txl_dist.__version__)')"
