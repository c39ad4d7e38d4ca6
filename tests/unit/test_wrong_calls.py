"""Wrong calls of every command give one line with the cause and a fitting remedy, exit code 2, and no traceback.

All calls run in this process and without torch, because a user must get the answer at once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from txl_dist.cli.main import main
from txl_dist.errors import missing_package

ROOT = Path(__file__).parents[2]

FILES = {
    "data/x": ["index.json", "tokenizer.json"],
    "runs/x": ["config.toml", "metrics.jsonl", "checkpoints/step_000000004/state.json"],
    "bundles/x": ["model.safetensors", "config.json", "train.toml", "MANIFEST.json"],
    "hf": ["model.safetensors", "config.json", "txl_tokenizer.json"],
    "graphs": ["token.onnx", "chunk.onnx", "config.json"],
    "texts": ["a.txt"],
}
STEP = "runs/x/checkpoints/step_000000004"

PATHS: list[tuple[str, str]] = [
    ("evaluate data/x", "data/x is a corpus, not .* `txl train CONFIG --data.path data/x`.* `txl inspect data/x`"),
    ("evaluate hf", "hf is a Hugging Face folder.* `txl import hf BUNDLE --format huggingface`"),
    ("evaluate runs", "contains runs/x. Give one of these paths"),
    ("evaluate runs/y", "runs/y does not exist. Name .*: runs has runs/x"),
    ("evaluate bundles/x", "is a bundle, and a bundle names no corpus. Name a corpus with --data"),
    ("evaluate runs/x --data runs/x", "--data runs/x is a run, not a corpus"),
    ("evaluate runs/x/config.toml", "is a file of a run. Name the folder: runs/x"),
    ("evaluate s3://bucket/run", "s3://bucket/run is a URL, but .* local folders .* repeat the `txl train` command"),
    ("export s3://bucket/run out", "s3://bucket/run is a URL"),
    ("report s3://bucket/run", "s3://bucket/run is a URL"),
    ("generate data/x", "data/x is a corpus, not a run, a checkpoint or a bundle"),
    ("generate texts", "it has no config.toml .a run., state.json .a checkpoint., model.safetensors .a bundle."),
    ("generate bundles/x --file nowhere", "nowhere does not exist. Name another file"),
    ("generate bundles/x --jsonl nowhere", "nowhere does not exist. Name another file"),
    ("generate bundles/x --load-memory nowhere", "nowhere does not exist. Name another file"),
    (
        "generate bundles/x --out no/where",
        "cannot write no/where: No such file or directory. Name another file with --out",
    ),
    (
        "generate bundles/x --save-memory runs",
        "cannot write runs: the path is not a file. Name another file with --save-memory",
    ),
    (
        "generate bundles/x --jsonl e.toml --out e.toml",
        "--out e.toml is also the file with the prompts. Name another file",
    ),
    ("export data/x out", "data/x is a corpus"),
    ("export runs/x runs/x", "runs/x is a run, not a bundle. Choose another output folder"),
    ("export runs/x bundles/x --format onnx", "bundles/x is a bundle, not a folder of ONNX graphs. Choose another"),
    ("export runs/x hf --format huggingface-code", "hf is a Hugging Face folder, not .* with its own code. Choose"),
    ("evaluate graphs", "graphs is a folder of ONNX graphs, not .* ONNX Runtime runs these graphs. Use the run"),
    ("import runs/x out --format original", "txl_dist itself wrote it. To get a bundle: `txl export runs/x BUNDLE`"),
    ("import hf out --format nvidia", "Give --format huggingface"),
    ("import data/x out --format original", "data/x is a corpus"),
    ("import nothing out --format original", "nothing does not exist. Name the file or folder"),
    ("inspect bundles/x", "bundles/x is a bundle, not a corpus, a run or a checkpoint"),
    ("inspect dat/x", "dat/x does not exist"),
    ("verify hf", "has no manifest. Verify the bundle that it was exported from"),
    ("verify data/xx", "Did you mean data/x?"),
    ("report data/x", "data/x is a corpus, not a run, a checkpoint or a bundle"),
    ("compare runs/x bundles/x", "bundles/x is a bundle, not a run. Name the run directory"),
    ("compare runs/x", "needs 2 to 16 run directories"),
    ("prepare texts --out runs/x", "--out runs/x is a run, not a corpus. Choose another --out"),
    ("train runs/x", "Resume this run with `txl train runs/x/config.toml`"),
    ("train data/x", "`txl train CONFIG.toml --data.path data/x`"),
    ("train bundles/x", "`txl train bundles/x/train.toml --init bundles/x --data.path CORPUS`"),
    ("train texts", "texts is a folder, not a configuration file.*lists the recipes"),
    ("train quikstart", "Did you mean .*configs/quickstart.toml"),
    ("train e.toml", "data.path data/stdlib does not exist"),
    ("train e.toml --data.path runs/x", "data.path runs/x is a run.*the data.path in runs/x/config.toml"),
    ("train e.toml --data.path data/x --init runs/x", "--init runs/x is a run.*`txl export runs/x BUNDLE`"),
    ("train e.toml --data.path data/x --resume runs/x", f"Give a checkpoint of the run: --resume {STEP}"),
    ("train e.toml --data.path data/x --run.dir bundles/x", "run.dir bundles/x is a bundle.*another --run.dir"),
    ("sweep e.toml --grid optim.lr=1e-3,2e-3", "data.path data/stdlib does not exist"),
    (
        "sweep e.toml --grid optim.lr=1e-3,2e-3 --out runs/x",
        "--out runs/x is a run, and a sweep must not write runs into it. Choose",
    ),
    ("sweep runs/x --grid optim.lr=1e-3,2e-3", "Resume this run with `txl train runs/x/config.toml`"),
    ("plan e.toml --gpus 8 --gpu h100 --data.path bundles/x", "is a bundle.*Or give --vocab-size"),
]
"""The wrong kind of path."""

SETTINGS: list[tuple[str, str]] = [
    (
        "evaluate r --memory-len 1e3",
        "--memory-len 1e3: it must be whole numbers .tokens of memory",
    ),
    ("recl r --r half", "--r half: it must be numbers .shares of the targets"),
    ("train e.toml --train.num-lanes 0", "--train.num-lanes 0: it must be a whole number, 1 or more .rows of the"),
    ("train e.toml --train.num-lanes 1000000000000", "1 or more and at most 1,048,576 .rows of the global batch"),
    ("train e.toml --train.num_lanes -3", "--train.num-lanes -3: it must be a whole number, 1 or more"),
    ("train e.toml --train.num-lanes many", "--train.num-lanes many: it must be a whole number"),
    ("train e.toml --model.dropout 1.5", "--model.dropout 1.5: it must be a number, 0 or more and below 1"),
    ("train e.toml --optim.lr nan", "--optim.lr nan: it must be a number, above 0 .peak of the learning rate"),
    ("train e.toml --optim.betas 0.1", "--optim.betas 0.1: it must be 2 numbers, 0 or more and below 1"),
    ("train e.toml --model.cutoffs 3 a", "--model.cutoffs 3 a: it must be a list of whole numbers"),
    ("train e.toml --engine.zero-stage 7", "--engine.zero-stage 7: .* 0 or more and at most 3"),
    ("train e.toml --optim.lr", "--optim.lr needs a value: it must be a number"),
    ("train e.toml --checkpoint.keep-best e.toml", "--checkpoint.keep-best e.toml: it can be True, False"),
    ("train e.toml --model.pre_norm yes", "--model.pre_norm yes: it can be True, False"),
    ("train e.toml --model.pre_norm=true", "Did you mean True?"),
    ("train e.toml --keep-best", "the section is missing.. Did you mean --checkpoint.keep-best"),
    ("train e.toml optim.lr=1e-3", "optim.lr=1e-3 is a flag without dashes. Write --optim.lr 1e-3"),
    ("train e.toml optim.lr 1e-3", "optim.lr 1e-3 is a flag without dashes. Write --optim.lr 1e-3"),
    ("train e.toml -optim.lr 1e-3", "is a flag without dashes. Write --optim.lr 1e-3"),
    ("train e.toml lr=1e-3", "lr=1e-3 is not a flag. Did you mean --optim.lr?"),
    ("train e.toml --resume", "--resume needs a value"),
    ("train e.toml --ranks two", "--ranks two: it must be a whole number"),
    ("train e.toml --dry-run yes", "cannot use 'yes'"),
    ("train e.toml more.toml", "cannot use 'more.toml'"),
    ("train --dry-run e.toml", "the configuration file must come first"),
    ("train bad.toml", "train.num_lanes = 0: it must be a whole number, 1 or more .rows of the global batch"),
]
FLAGS: list[tuple[str, str]] = [
    ("prepare texts data/y", "missing: --out STR.* Did you mean --out data/y?"),
    ("prepare texts --output data/y", "unknown flag --output. Did you mean --out?"),
    ("prepare texts --output-folder data/y", "unknown flag --output-folder. Did you mean --out?"),
    ("prepare texts --out data/y --tokenizer bep", "it can be auto, .* Did you mean bpe?"),
    ("prepare texts --out data/y --vocab-size 4k", "--vocab-size 4k: it must be a whole number"),
    ("prepare --out data/y", "there are no inputs"),
    ("evaluate", "missing: run directory, checkpoint folder, bundle or hf:.* See txl evaluate --help"),
    ("evaluate runs/x --memory-len -7", "--memory-len -7: it must be 0 to 1,048,576 tokens. Without the flag"),
    ("evaluate runs/x --memory-len 64 1000000000", "--memory-len 1000000000: it must be 0 to 1,048,576 tokens"),
    ("evaluate runs/x --memory-len", "--memory-len needs one or more values"),
    (
        "evaluate runs/x --segment-len",
        "--segment-len needs one or more values in tokens, each 0 or more, for instance 16 64",
    ),
    ("evaluate runs/x --clamp-len 5 -2", "--clamp-len -2: it must be 0 to 1,048,576 tokens"),
    ("evaluate runs/x --segment-len 16 -1", "--segment-len -1: it must be 0 to 1,048,576 tokens"),
    ("evaluate runs/x --protocol hf", "--protocol hf: it can be ours, original, nvidia, nanogpt"),
    ("evaluate runs/x --protocol original --num-lanes 4", "--num-lanes cannot be given with --protocol original"),
    ("evaluate runs/x --log-probs p.txt", "--log-probs p.txt: the file name must end in .npz or .jsonl"),
    ("evaluate runs/x --plot p.png", "--plot draws losses over several lengths"),
    ("recl", "txl recl needs a model. Name run directories, checkpoint folders or bundles"),
    ("recl runs/x --step 0", "--step 0: it must be 1 to 1,048,576 tokens"),
    ("recl runs/x --max-context 100", "--max-context 100: it must be at least twice --step 100 .tokens."),
    ("recl runs/x --r 2", "--r 2.0: each share of the targets must be above 0 and at most 1"),
    ("recl data/x", "data/x is a corpus, not"),
    ("evaluate runs/x --num-lanes -1", "--num-lanes -1: it must be 0 to 1,048,576 lanes"),
    ("evaluate runs/x memory_len=0", "Write --memory-len 0"),
    ("evaluate runs/x --memroy-len 3", "unknown flag --memroy-len. Did you mean --memory-len?"),
    ("evaluate runs/x runs/y", "cannot use 'runs/y'"),
    ("generate bundles/x --top-k many", "--top-k many: it must be a whole number .keep only this many"),
    ("generate bundles/x --temperature -1", "--temperature -1.0: it must be 0 or more"),
    ("generate bundles/x --top-p 2", "--top-p 2.0: it must be above 0 and at most 1"),
    ("generate bundles/x --promt a", "Did you mean --prompt?"),
    ("generate bundles/x --temperature nan", "--temperature nan: it must be 0 or more"),
    ("generate bundles/x --top-k -1", "--top-k -1: it must be 0 or more tokens .0 keeps all"),
    ("generate bundles/x --min-p 1.5", "--min-p 1.5: it must be between 0 and 1"),
    ("generate bundles/x --repetition-penalty 0.5", "--repetition-penalty 0.5: it must be 1 or more"),
    ("generate bundles/x --max-tokens -1", "--max-tokens -1: it must be 0 or more tokens"),
    ("generate bundles/x --num-samples 0", "--num-samples 0: it must be 1 or more"),
    ("generate bundles/x --batch-size 0", "--batch-size 0: it must be 1 or more"),
    ("generate bundles/x --seed -1", "--seed -1: it must be 0 or more"),
    ("generate bundles/x --memory-len -2", "--memory-len -2: it must be 0 or more tokens, or -1"),
    ("generate bundles/x --stop=", "it must be strings that are not empty"),
    ("generate bundles/x --tokens a", "--tokens a: it must be whole numbers .token ids to continue"),
    ("generate bundles/x --prompt a --tokens 1", "--prompt and --tokens cannot be given together, because each"),
    (
        "generate bundles/x --file e.toml --jsonl e.toml",
        "--file and --jsonl cannot be given together, because each of these flags gives prompts",
    ),
    ("generate bundles/x --save-memory m --num-samples 2", "--save-memory saves the memory of a single text"),
    (
        "generate bundles/x --log-probs 1",
        "writes JSON and needs an output file. Give --out FILE, or --out - for standard output",
    ),
    ("export runs/x", "missing: folder to write"),
    ("export runs/x out --format gguf", "--format gguf: it can be bundle, huggingface, huggingface-code, onnx"),
    ("export runs/x out --format onnx --dtype bf16", "--format onnx writes fp32, not bf16. Remove --dtype"),
    ("import hf out", "missing: --format"),
    ("plan e.toml", "missing: --gpus INT .number of GPUs"),
    ("plan --gpus 8", "the configuration file must come first"),
    ("plan e.toml --gpus eight --gpu h100", "--gpus eight: it must be a whole number"),
    ("sweep --grid optim.lr=1e-3,2e-3 e.toml", "the configuration file must come first"),
    ("sweep e.toml", "a sweep needs two runs or more. Give --grid section.key=VALUE,VALUE, or --seeds 2"),
    ("sweep e.toml --grid optim.lr=1e-3", "a sweep needs two runs"),
    ("sweep e.toml --grid optim.lr=", "--grid optim.lr= has no values. Write --grid optim.lr=VALUE,VALUE"),
    ("sweep e.toml --grid optim.lrr=1,2", "unknown setting optim.lrr. Did you mean optim.lr?"),
    ("sweep e.toml --grid optim.lr=1e-3,fast", "--optim.lr fast: it must be a number, above 0"),
    ("sweep e.toml --grid optim.lr=1e-3,0.001", "has a value twice"),
    ("sweep e.toml --grid run.seed=1,2", "a sweep cannot vary run.seed: --seeds sets the number"),
    ("sweep e.toml --grid optim.lr=1 --grid optim.lr=2", "--grid has optim.lr twice"),
    ("sweep e.toml --grid optim.lr=1e-3,2e-3 --seeds 0", "--seeds 0: it must be 1 or more"),
    ("sweep e.toml --grid optim.lr=1e-3,2e-3 --jobs 0", "--jobs 0: it must be 1 or more"),
    ("sweep e.toml --grid optim.lr=1e-3,2e-3 --sedes 3", "unknown flag --sedes. Did you mean --seeds?"),
    ("sweep e.toml --grid optim.min_lr=0,1 --data.path data/x", "optim.min_lr=1.0 must not exceed optim.lr"),
    ("doctor runs/x", "cannot use 'runs/x'"),
    ("report", "missing: run directory"),
    ("inspect data/x --step one", "--step one: it must be a whole number"),
    ("verify data/x data/x", "cannot use 'data/x'"),
]
FOREIGN: list[tuple[str, str]] = [
    ("prepare texts --out data/y --vocabsize 4096", "Did you mean --vocab-size"),
    ("prepare texts --out data/y --tokenizer sentencepiece", "it can be auto, byte, char, word, bpe, unigram"),
    ("prepare texts --out data/y --val_ratio 0.1", "Did you mean --valid-fraction. It is a share of the documents"),
    ("prepare --input texts --out data/y", "Give the inputs first and without a flag: txl prepare FILES --out DIR"),
    ("prepare texts --out data/y --workers 4", "Did you mean --num-workers"),
    ("prepare texts --out data/y --valid-fraction half", "--valid-fraction half: it must be a number"),
    ("prepare texts --out data/y --seed", "--seed needs a value"),
    ("train e.toml --learning_rate 1e-3", "Did you mean --optim.lr.$"),
    ("train e.toml --batch_size 8", "--train.num-lanes .* batch size per GPU . GPUs . accumulation steps"),
    ("train e.toml --num_train_epochs 3", "--train.max-steps .* epochs . tokens of the corpus / "),
    ("train e.toml --max_iters 5000", "Did you mean --train.max-steps"),
    ("train e.toml --fp16", "Did you mean --engine.precision fp16"),
    ("train e.toml --deepspeed ds.json", "DeepSpeed files are not read. Set engine.zero_stage"),
    ("train e.toml --output_dir out", "Did you mean --run.dir"),
    ("train e.toml --resume_from_checkpoint runs/x", "Did you mean --resume"),
    ("train e.toml batch_size=8", "batch_size=8 is not a flag. Did you mean --train.num-lanes"),
    ("train e.toml --no-checkpoint.keep_best", "Did you mean --checkpoint.keep-best False"),
    ("train e.toml --device cuda", "CUDA_VISIBLE_DEVICES selects among several"),
    ("train --config e.toml", "first and without a flag: txl train CONFIG.toml"),
    ("train e.toml -v", "unknown flag -v. There is no such switch"),
    ("train e.toml --all", "Add --dry-run, or leave out --all"),
    ("train e.toml --gradient_accumulation_step 4", "Did you mean --train.microbatch-lanes"),
    ("launch --nproc_per_node 2 e.toml", "txl launch --num_accelerators N"),
    ("launch --batch_size 8 e.toml", "Did you mean --train.num_lanes after e.toml"),
    ("launch e.toml --n_layer 4", "Did you mean --model.num-layers"),
    ("plan e.toml --num_gpus 8 --gpu h100", "Did you mean --gpus"),
    ("plan e.toml --gpus 8 --gpu h100 --lr 3", "the section is missing.. Did you mean --optim.lr"),
    ("plan e.toml --gpus 8 --gpu h100 --block_size 512", "Did you mean --train.segment-len"),
    ("sweep e.toml --grid learning_rate=1,2", "Did you mean optim.lr.$"),
    ("sweep e.toml --params optim.lr=1,2", "Did you mean --grid"),
    ("sweep e.toml --grid optim.lr=1,2 --n_jobs 2", "Did you mean --jobs"),
    ("evaluate runs/x --mem_len 64", "Did you mean --memory-len"),
    ("evaluate runs/x --batch_size 4", "Did you mean --num-lanes"),
    ("evaluate runs/x --dataset data/x", "Did you mean --data"),
    ("evaluate runs/x nanogpt", "Did you mean --protocol nanogpt"),
    ("recl runs/x --seq_len 4", "unknown flag --seq_len. See txl recl --help"),
    ("export runs/x out onnx", "Did you mean --format onnx"),
    ("export runs/x --output_dir out", "Give the folder to write second and without a flag"),
    ("export runs/x out --precision bf16", "Did you mean --dtype"),
    ("export runs/x out --half", "Did you mean --dtype fp16"),
    ("import hf out --format pytorch", "--format pytorch: it can be original, nvidia, huggingface, labml"),
    ("import weights out --format original --vocab_size 10", "Did you mean --vocab"),
    ("generate bundles/x Hello", "Did you mean --prompt Hello"),
    ("generate bundles/x Once upon a time", "Did you mean --prompt 'Once upon a time'"),
    ("generate bundles/x -p Hello", "unknown flag -p. Did you mean --prompt"),
    ("generate bundles/x --max_new_tokens 20", "Did you mean --max-tokens"),
    ("generate bundles/x --max-tokens 99999999999", "it must be 0 or more tokens, and at most 1,000,000,000"),
    ("generate bundles/x --max-tokens many", "it must be a whole number .maximum tokens to generate"),
    ("generate bundles/x --num_beams 4", "Beam search is not supported"),
    ("generate bundles/x --do_sample", "Did you mean --temperature. With 0 the likeliest token"),
    ("serve bundles/x 8080", "set the server's address with --host and --port"),
    ("serve bundles/x --port http", "--port http: it must be a whole number .port to listen on"),
    ("serve bundles/x --port 70000", "--port 70000: it must be 0 ... 65535"),
    ("serve bundles/x --max_batch_size 8", "Did you mean --max-num-seqs"),
    ("serve bundles/x --served_model_name m", "Did you mean --name"),
    ("inspect data/x data/y", "cannot use 'data/y'.*Inspect one path at a time"),
    ("inspect data/x --max_length 5", "Did you mean --max-tokens"),
    ("verify data/x --workers 4", "Did you mean --num-workers"),
    ("verify data/x --verbose", "There is no such switch"),
    ("doctor --device cuda", "CUDA_VISIBLE_DEVICES"),
    ("doctor --timeout", "Did you mean --timeout-s"),
    ("report runs/x runs/y", "To compare several runs: `txl compare`"),
    ("report runs/x --output page.html", "Did you mean --out"),
    ("compare runs/x runs/x --output page.html", "Did you mean --out"),
    ("completion", "missing: bash, zsh or fish"),
    ("completion powershell", "it can be bash, zsh, fish"),
]
"""Names, flags and orders of words that people bring from other programs."""
LAUNCH: list[tuple[str, str]] = [
    ("launch --hostfile nohosts e.toml", "--hostfile nohosts: No such file or directory. .*`HOST slots=N`"),
    ("launch --hostfile=data e.toml", "--hostfile data: Is a directory"),
    ("launch -H texts/b e.toml", "texts/b is not a hostfile: line 1 must have the form `HOST slots=N`"),
    ("launch -Htexts/a.txt e.toml", "texts/a.txt names no machine"),
    ("launch --hostfile noise e.toml", "noise is not a hostfile, because the file is not text"),
    ("launch --hostfile twice e.toml", "twice: line 3 names node1 a second time"),
    ("launch --hostfile hosts e.toml --train.num_lanes 7", "num_lanes=7 must be divisible by .* = 5 . 16 = 80"),
    ("launch --hostfile hosts --num_nodes 1 e.toml --train.num_lanes 7", "num_lanes=7 .* = 2 . 16 = 32"),
    ("launch --hostfile hosts --num_gpus 3 e.toml --train.num_lanes 7", "num_lanes=7 .* = 6 . 16 = 96"),
    ("launch --master_port 99999999 e.toml", "--master_port 99999999: it must be a whole number from 1 to 65535"),
    ("launch --master_port=abc e.toml", "--master_port abc: it must be a whole number"),
    ("launch --num_accelerators two e.toml", "--num_accelerators two: it must be a whole number from 1"),
    ("launch --num_accelerators 0 e.toml", "--num_accelerators 0: it must be a whole number from 1"),
    ("launch --num_gpus -1 e.toml", "--num_gpus -1: it must be a whole number from 1"),
    ("launch --num_gpus --no_ssh e.toml", "--num_gpus needs a value"),
    ("launch --num_acelerators 2 e.toml", "unknown launcher flag --num_acelerators. Did you mean --num_accelerators?"),
    ("launch --num-gpus 2 e.toml", "Did you mean --num_gpus?"),
    ("launch --quite-unlike 2 e.toml", "unknown launcher flag --quite-unlike. See deepspeed --help"),
    ("launch 2 e.toml", "cannot use '2': only flags of the launcher can precede e.toml"),
    ("launch --include localhost:0 --num_gpus 1 e.toml", "chooses the ranks. Leave out --num_accelerators"),
    ("launch -i localhost:0 -e localhost:1 e.toml", "Leave out one"),
    ("launch --num_nodes 2 e.toml", "give the file with --hostfile"),
    ("launch e.toml --num_accelerators 2", "launcher flags go before .*: txl launch --num_accelerators 2 e.toml"),
    ("launch e.toml --master_port=7", "launcher flags go before .*: txl launch --master_port=7 e.toml"),
    (
        "launch --num_accelerators 2 --train.max_steps 5 e.toml",
        "settings go after the configuration file: txl launch e.toml --train.max_steps 5",
    ),
    ("launch --resume must e.toml", "settings go after .*: txl launch e.toml --resume must"),
    ("launch --num_accelerators 2 e.toml", "data.path data/stdlib does not exist"),
    ("launch e.toml --data.path runs/x", "data.path runs/x is a run"),
    ("launch e.toml --data.path data/x --resume runs/x", f"Give a checkpoint of the run: --resume {STEP}"),
    ("launch e.toml --data.path data/x --run.dir texts", "texts is not empty and is not a run directory"),
    ("launch e.toml --data.path data/x --optim.min_lr 1 --optim.lr 0.1", "optim.min_lr=1.0 must not exceed"),
    ("launch --num_gpus 3 e.toml --data.path data/x --train.num_lanes 8", "num_lanes=8 must be divisible by .* = 3"),
    ("launch nothing.toml", "cannot read the config file nothing.toml"),
]
"""What `txl launch` need not start ranks for."""
CALLS = PATHS + SETTINGS + FLAGS + LAUNCH + FOREIGN


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for place, names in FILES.items():
        for name in names:
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / name).touch()
    (tmp_path / "e.toml").touch()
    (tmp_path / "bad.toml").write_text("[train]\nnum_lanes = 0\n")
    (tmp_path / "texts/b").write_text("a line of a book\n")
    (tmp_path / "hosts").write_text("# two machines\nnode1 slots=2\n\nnode2 slots=3 # a smaller one\n")
    (tmp_path / "twice").write_text("node1 slots=2\nnode2 slots=2\nnode1 slots=2\n")
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("call", "remedy"), CALLS, ids=[call for call, _ in CALLS])
def test_a_wrong_call_is_answered_in_one_line_with_what_to_do(
    call: str, remedy: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    try:
        code = main(call.split())
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(f"txl {call.split()[0]}: error: ")
    assert len(captured.err.splitlines()) == 1, captured.err
    assert re.search(remedy, captured.err), captured.err
    assert sorted(folder.rglob("*")) == before


def test_wrong_paths_and_launches_are_refused_before_torch_is_imported(folder: Path) -> None:
    calls = [call.split() for call, _ in PATHS + LAUNCH]
    code = f"""
import contextlib, io, sys
from txl_dist.cli.main import main
for call in {calls!r}:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main(call)
    if "torch" in sys.modules:
        sys.exit(" ".join(call) + " imports torch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_several_wrong_settings_get_a_line_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "e.toml", "--train.num-lanes", "0", "--model.dropout", "1.5"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "--train.num-lanes 0" in lines[0]
    assert lines[1].startswith("--model.dropout 1.5: it must be")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("train", "num_lanes", "0"), ("model", "dropout", "1.5"), ("optim", "lr", "-1"), ("engine", "zero_stage", "4")],
)
def test_a_flag_out_of_range_says_what_the_file_says(
    section: str, key: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.toml").write_text(f"[{section}]\n{key} = {value}\n")
    assert main(["train", "own.toml"]) == 2
    in_file = capsys.readouterr().err.partition(": it must be ")[2]
    assert main(["train", "e.toml", f"--{section}.{key}", value]) == 2
    on_flag = capsys.readouterr().err.partition(": it must be ")[2]
    assert in_file == on_flag != ""


def test_train_alone_shows_its_usage_and_the_recipes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage: txl train CONFIG.toml")
    for recipe in (ROOT / "configs").glob("*.toml"):
        assert str(recipe) in shown
    (folder / "configs").mkdir()
    (folder / "configs/mine.toml").write_text("# Mine: a recipe.\n")
    assert main(["train"]) == 2
    assert re.search(r"\n  configs/mine.toml +Mine: a recipe\n", capsys.readouterr().err)


def test_where_a_package_is_missing_one_line_names_it_and_the_environment(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "txl_dist", "train"]  # -S: without site-packages
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": ""}, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"txl: error: .* has no package \w+\. Activate the project's environment .*\n", done.stderr)
    with pytest.raises(ModuleNotFoundError):
        missing_package(ModuleNotFoundError("a defect of ours", name="txl_dist.nowhere"))


def test_a_package_that_only_a_command_needs_is_named_in_one_line_too(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['generate', 'b']; "
    code += "from txl_dist.cli.main import run_and_exit; run_and_exit()"
    (tmp_path / "b").mkdir()
    for name in ("model.safetensors", "MANIFEST.json"):
        (tmp_path / "b" / name).touch()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"txl: error: {sys.executable} has no package torch. Activate")
    assert "Traceback" not in done.stderr


def test_an_old_python_is_told_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from txl_dist import __main__ as entry

    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    with pytest.raises(SystemExit) as stop:
        entry.run()
    assert stop.value.code == 2
    assert re.fullmatch(r"txl: error: this is Python 3\.10; 3\.11 or newer is needed\. .*\n", capsys.readouterr().err)
    source = Path(entry.__file__).read_text()
    assert "annotations" not in source, "no old Python could read it"
    compile(source, "__main__.py", "exec", dont_inherit=True)
