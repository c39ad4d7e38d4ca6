#!/usr/bin/env bash
# Everything once, on this machine: install, prepare text, train on 2 ranks, evaluate, export, generate.
# Safe to run again: what is finished is kept, an interrupted training continues.
#
#   bash launch/quickstart.sh [--section.key value ...]      settings go to the training
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

corpus=data/stdlib run=runs/quickstart bundle=bundles/quickstart

say() { printf '\n== %s\n' "$*"; }

say "1/6 install into $VENV"
make_environment ""

say "2/6 prepare the standard library's source text as a corpus: $corpus"
txl prepare stdlib --out "$corpus" --tokenizer bpe --vocab-size 4096

say "3/6 train with DeepSpeed on 2 ranks: $run"
start_s=$SECONDS
if has_gpu; then
    gpus=$(nvidia-smi -L | wc -l)
    deepspeed --num_gpus $((gpus > 2 ? 2 : gpus)) --module txl_dist train configs/quickstart.toml "$@"
else
    # DS_ACCELERATOR: without it DeepSpeed looks for other hardware first and may find half-installed drivers.
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 --module txl_dist train configs/quickstart.toml "$@"
fi
train_s=$((SECONDS - start_s))
# The launcher may exit 0 although a rank failed; DONE is what counts.
[ -f "$run/DONE" ] || fail "training did not finish; see $run/log.txt"

say "4/6 evaluate on held-out files, with memory, without it, and beside counting baselines"
txl evaluate "$run" --without-memory --baselines --json "$run/evaluation.json"

say "5/6 export an inference bundle: $bundle"
txl export "$run" "$bundle"

say "6/6 generate"
txl generate "$bundle" --prompt "def read_lines(path):" --max-tokens 120 --seed 1

cat <<END

Training took $train_s s. What lies where:
  $corpus        tar shards, index.json, tokenizer.json
  $run     config.toml, metrics.jsonl, log.txt, tensorboard/, checkpoints/, evaluation.json
  $bundle  weights, config, tokenizer, probe

Next (after: source $VENV/bin/activate):
  tensorboard --logdir runs                                  look at the curves
  txl train configs/quickstart.toml --dry-run                see what a run would be
  txl prepare MY_FILES --out data/mine                       your own text
  txl train configs/quickstart.toml --data.path data/mine --run.dir runs/mine
  txl generate $bundle --prompt "class "
END
