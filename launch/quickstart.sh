#!/usr/bin/env bash
# Everything once, on this machine: install, prepare text, train on 2 ranks, evaluate, export, generate.
# Safe to run again: what is finished is kept, an interrupted training continues.
#
#   bash launch/quickstart.sh [--section.key value ...]      settings go to the training
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

config=configs/modern_quickstart.toml corpus=data/stdlib run=runs/modern_quickstart bundle=bundles/modern_quickstart

say() { printf '\n== %s\n' "$*"; }

refuse_other_places() { # SETTINGS
    local word
    for word in "$@"; do
        case $word in
            --run.dir | --run.dir=* | --data.path | --data.path=*)
                fail "${word%%=*} is fixed here: the steps after the training read $run and $corpus." \
                    "For other places run the commands one by one; see docs/getting-started.md."
                ;;
        esac
    done
}

train() { # SETTINGS; returns what the training exits with. Asked to stop, it passes that on and waits.
    local code=0 interrupted="" asked="" pid=""
    trap 'interrupted=1 asked=1; kill -TERM $pid 2>/dev/null || true' TERM INT
    start_training "$@" &
    pid=$!
    if [ -n "$asked" ]; then kill -TERM "$pid" || true; fi # it came before there was a pid
    while :; do
        interrupted="" code=0
        wait "$pid" || code=$?
        [ -n "$interrupted" ] || break # else it was the wait that ended, not the training
    done
    trap - TERM INT
    # Death by that signal: it came while Python was starting, when nothing could be lost yet.
    if [ -n "$asked" ] && ((code == 143)); then code=75; fi
    return "$code"
}

start_training() { # SETTINGS; in a process of its own, which the program takes over
    local devices=${CUDA_VISIBLE_DEVICES:-}
    if ((num_gpus == 0)); then
        exec txl launch --num_accelerators 2 "$config" "$@"
    elif ((num_gpus == 1)) || [[ $devices == *[!0-9,]* ]]; then
        # The launcher reads no device names like MIG-..., and a single rank needs no launcher.
        exec txl train "$config" "$@"
    elif [ -n "$devices" ]; then
        # With --num_gpus the launcher would ignore CUDA_VISIBLE_DEVICES.
        CUDA_VISIBLE_DEVICES=$(cut -d, -f1,2 <<<"$devices") exec txl launch "$config" "$@"
    else
        exec txl launch --num_gpus 2 "$config" "$@"
    fi
}

steps_of_this_start() {
    python - "$run" <<'PY'
import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
starts = [record["step"] for record in records if record.get("event") == "start"]
print(int((run / "DONE").read_text()) - starts[-1])
PY
}

check_scores() {
    python - "$run/evaluation.json" <<'PY'
import json
import sys
from pathlib import Path

results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
bits = {name.split(" (")[0]: values["bits_per_byte"] for name, values in results.items()}
model = bits["model"]
others = {name: bits[name] for name in ("memory off", "bigram", "order 0")}
print(f"bits per byte: model {model:.4f};", ", ".join(f"{name} {value:.4f}" for name, value in others.items()))
lost = [name for name, value in others.items() if not model < value]
if lost:
    sys.exit(f"not better than: {', '.join(lost)}")
print("check passed: memory helps, and the model beats both counting baselines")
PY
}

refuse_other_places "$@"

say "1/6 install into $VENV"
make_environment ""

say "2/6 prepare the standard library's source text as a corpus: $corpus"
if [ -f "$corpus/index.json" ]; then
    echo "it is there already; remove $corpus to prepare it again"
else
    txl prepare stdlib --out "$corpus" --tokenizer bpe --vocab-size 4096
fi

say "3/6 train with DeepSpeed on 2 ranks: $run"
start_s=$SECONDS code=0
train "$@" || code=$?
train_s=$((SECONDS - start_s))
if ((code == 75)); then
    echo "launch: training was asked to stop; the same command continues" >&2
    exit 75
fi
if ((code != 0)); then
    echo "launch: training did not finish; see the messages above and $run/log.txt" >&2
    exit "$code"
fi
num_steps=$(steps_of_this_start)

say "4/6 evaluate on the validation split, with memory and without, and compare with counting baselines"
txl evaluate "$run" --without-memory --baselines --json "$run/evaluation.json"
check_scores || [ $# -gt 0 ] || fail "the scores in $run/evaluation.json are not what this model reaches with" \
    "$config. Remove $run to train from the beginning."

say "5/6 export an inference bundle: $bundle"
txl export "$run" "$bundle"

say "6/6 generate"
txl generate "$bundle" --prompt "def read_lines(path):" --max-tokens 120 --seed 1

finished=""
((num_steps > 0)) || finished=" (the run was finished already; remove $run to train it again)"
cat <<END

This start trained $num_steps steps in $train_s s, start-up included$finished. What lies where:
  $corpus                tar shards, index.json, tokenizer.json
  $run     config.toml, metrics.jsonl, log.txt, tensorboard/, checkpoints/, evaluation.json
  $bundle  weights, config, tokenizer, probe

Next (after: source $VENV/bin/activate):
  txl report $run                          one page with all that happened
  tensorboard --logdir runs                                  the curves, live
  txl train $config --dry-run         see what a run would be
  txl prepare MY_FILES --out data/mine                       your own text
  txl launch --num_accelerators 2 $config --data.path data/mine --run.dir runs/mine
  txl generate $bundle --prompt "class "
END
