#!/usr/bin/env bash
# Usage: bash tools/benchmarks/gpu_offline.sh WHEELS OUT [--run 1|2|3] [more words for tools.benchmarks.gpu]
# Measures one GPU in a call of at most ten minutes, on a machine without network whose python3 has torch and triton.
# Run it in the root of a checkout. WHEELS is a folder with
#   *.whl              packages that this python3 lacks, as tools.benchmarks.gpu_wheels collects them
#   kernels.tar.gz     kernels compiled by tools.benchmarks.gpu_kernels (optional)
#   original, nvidia   the other codes' folders `pytorch` (optional)
#   commit             the commit of the checkout, for a copy without .git (optional)
# OUT gets gpu.jsonl (the rows), gpu.jsonl.log (whole errors), log.txt (progress and tables) and smi.txt (the device).
set -uo pipefail
wheels=$1 out=$2
shift 2
site=${TXL_SITE:-/tmp/txl-site}
mkdir -p "$out"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl || exit
export PYTHONPATH=$site:$PWD            # the project is not installed
export TRITON_CACHE_DIR=/tmp/txl-triton # where gpu_kernels compiled: the paths in the archive are absolute
export PYTHONUNBUFFERED=1               # what was printed is in the log when the call is ended from outside
if [ -f "$wheels/kernels.tar.gz" ]; then tar xzf "$wheels/kernels.tar.gz" -C /; fi
nvidia-smi -q >"$out/smi.txt" 2>&1
words=()
for peer in original nvidia; do
  if [ -d "$wheels/$peer" ]; then words+=("--peer-$peer" "$wheels/$peer"); fi
done
if [ -f "$wheels/commit" ]; then words+=("--commit" "$(<"$wheels/commit")"); fi
# Bash counts SECONDS from the start of this script. The run ends by itself before ten minutes are over.
python3 -m tools.benchmarks.gpu --seconds $((560 - SECONDS)) --json "$out/gpu.jsonl" ${words[@]+"${words[@]}"} "$@" 2>&1 |
  tee "$out/log.txt"
