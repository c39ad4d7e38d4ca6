"""The command line: parse, load the configuration, call. No logic lives here.

Each verb is a function; tyro makes its flags and help from the signature. Heavy modules are imported inside the
functions, so that every `--help` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import FlagConversionOff, Positional

from txl_dist import __version__
from txl_dist.config import Config, load_config
from txl_dist.errors import ConfigError, DataError, TxlError


def prepare(
    inputs: Positional[tuple[str, ...]],
    /,
    out: Path,
    valid: tuple[str, ...] = (),
    valid_fraction: float = 0.05,
    tokenizer: Literal["byte", "char", "word", "bpe"] = "bpe",
    vocab_size: int = 0,
    min_frequency: int = 1,
    tokenizer_file: Path | None = None,
    jsonl_field: str = "text",
    encoding_errors: Literal["refuse", "replace", "skip"] = "refuse",
    shard_len: int = 2**25,
    overwrite: bool = False,
) -> None:
    """Turn text into a corpus: tar shards, index.json and tokenizer.json.

    Args:
        inputs: Files, folders, .jsonl, .gz; or `stdlib`, the source text of this Python's standard library.
        out: Folder of the corpus.
        valid: Inputs of the held-out split; without them documents are held out by a hash of their name.
        valid_fraction: Share of documents to hold out.
        tokenizer: Kind of tokenizer to train on the training split; ids are in frequency order.
        vocab_size: Largest vocabulary of word and bpe; 0 means 4096 for bpe and no limit for word.
        min_frequency: Fewest occurrences of a word, or of a bpe merge.
        tokenizer_file: Use this tokenizer.json instead of training one.
        jsonl_field: Field of a .jsonl record that holds the text.
        encoding_errors: What happens to a file that is not UTF-8.
        shard_len: Tokens per shard.
        overwrite: Replace another corpus in the way.
    """
    from txl_dist.data.prepare import prepare_corpus

    summary = prepare_corpus(
        out,
        inputs=inputs,
        valid_inputs=valid,
        valid_fraction=valid_fraction,
        kind=tokenizer,
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        tokenizer_path=tokenizer_file,
        jsonl_field=jsonl_field,
        encoding_errors=encoding_errors,
        shard_len=shard_len,
        overwrite=overwrite,
    )
    print("\n".join(summary.lines()))


@dataclass(frozen=True)
class TrainArguments:
    """Train, or continue a run. Settings come from defaults, then the file, then these flags."""

    config: Positional[Path]
    """TOML file; see configs/."""
    settings: Annotated[FlagConversionOff[Config], tyro.conf.arg(name="")]
    resume: str = "auto"
    """auto: continue the newest whole checkpoint, if any. must: insist on one. never: refuse one. Or its path."""
    dry_run: bool = False
    """Print the resolved configuration, batch arithmetic, parameters, memory and operations, and stop."""
    ranks: int = 1
    """Number of ranks that a dry run assumes."""
    init: str = ""
    """Bundle whose weights a new run begins with (short for --run.init)."""


def train(argv: Sequence[str]) -> None:
    """Train, or continue a run."""
    file = argv[0] if argv and not argv[0].startswith("-") else None
    settings = load_config(file) if file else Config()
    default = TrainArguments(config=Path(file or "CONFIG"), settings=settings)
    arguments = tyro.cli(TrainArguments, prog="txl train", args=argv, default=default)
    if file is None and arguments.config != default.config:
        raise ConfigError(f"the config file comes first: txl train {arguments.config} [--section.key value].")
    if file is None and _is_speaker():
        print("txl train: no config file; starting from the defaults", file=sys.stderr)
    settings = arguments.settings
    if arguments.init:
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"init": arguments.init})})
    if arguments.dry_run:
        from txl_dist.train.describe import dry_run

        print("\n".join(dry_run(settings, world_size=arguments.ranks)))
        return
    from txl_dist.train.loop import train as run_training

    run_training(settings, resume=arguments.resume)


def evaluate(
    target: Positional[Path],
    /,
    data: Path | None = None,
    split: str = "",
    memory_len: int = -1,
    segment_len: int = 0,
    num_lanes: int = 0,
    overlap_len: int = 0,
    clamp_len: int = -1,
    same_length: Literal["trained", "off", "memory", "memory_and_self"] = "trained",
    zero_memory: bool = False,
    without_memory: bool = False,
    baselines: bool = False,
    json: Path | None = None,
) -> None:
    """Score a held-out split with a trained run, a checkpoint or a bundle.

    Args:
        target: Run directory, checkpoint folder or bundle.
        data: Corpus; a run knows its own.
        split: Split to score; the default is the run's.
        memory_len: Tokens of memory; -1 means as trained.
        segment_len: Tokens per forward pass; 0 means as trained.
        num_lanes: Stripes that the split is cut into; 0 means as configured.
        overlap_len: Tokens before each segment that are run again, not scored, as context; only with --memory-len 0.
            0 means as configured.
        clamp_len: Distances above this many tokens share one encoding; -1 means as trained, 0 no clamping.
        same_length: Keys that a query sees: memory_len of them (memory: original PyTorch code and Hugging Face), one
            more (memory_and_self: NVIDIA and TensorFlow), all (off), or as trained.
        zero_memory: Begin with a memory of zeros that is attended, as Hugging Face and TensorFlow do.
        without_memory: Also score with memory off, to see what memory brings.
        baselines: Also score an order-0 model and a smoothed bigram table on the same split.
        json: Write the results to this file too.
    """
    from txl_dist.train.evaluation_report import Overrides, evaluate_trained

    overrides = Overrides(
        split=split,
        memory_len=memory_len,
        segment_len=segment_len,
        num_lanes=num_lanes,
        overlap_len=overlap_len,
        clamp_len=clamp_len,
        same_length=same_length,
        zero_memory=zero_memory,
        without_memory=without_memory,
    )
    lines = evaluate_trained(target, data=data, overrides=overrides, baselines=baselines, json_path=json)
    if lines:
        print("\n".join(lines))


def export(
    source: Positional[Path],
    out: Positional[Path],
    /,
    format: Literal["bundle", "huggingface"] = "bundle",
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
) -> None:
    """Write an inference bundle, proven by the engine's own losses, or a Hugging Face folder.

    Args:
        source: Run directory (its newest checkpoint), checkpoint folder or bundle.
        out: Folder to write; an older one of the same format is replaced.
        format: bundle: ours. huggingface: what TransfoXLLMHeadModel of transformers 4.46.3 loads.
        dtype: Type of the weights.
    """
    from txl_dist.train.export import export_bundle, export_to_huggingface

    if format == "huggingface":
        print(f"{out}: written from {export_to_huggingface(source, out, dtype=dtype)}, and read back bit for bit")
        return
    folder, error = export_bundle(source, out, dtype=dtype)
    print(f"{out}: written from {folder}; largest difference to its source on the probe {error:.2e} nats")


def import_(
    path: Positional[Path],
    out: Positional[Path],
    /,
    format: Literal["original", "nvidia", "huggingface", "labml"],
    vocab: Path | None = None,
    settings: Path | None = None,
    segment_len: int = 0,
    memory_len: int = -1,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
) -> None:
    """Make a bundle of another system's weights, without running any code in their files.

    Args:
        path: File or folder: model.pt or a state dict, checkpoint_last.pt, a Hugging Face folder, labml's state dict.
        out: Folder of the bundle; an older bundle there is replaced.
        format: Whose it is: original (kimiyoung/transformer-xl), nvidia (DeepLearningExamples), huggingface, labml.
        vocab: Vocabulary, where the weights come without: cache.pt, vocab.txt, vocab.pkl, vocab.bin, a JSON list or
            tokenizer.json. Without any, text is ids in decimal.
        settings: JSON object, under the other system's names, of what its file does not tell: {"n_head": 8, ...}.
        segment_len: Tokens per segment; 0 means as the file says.
        memory_len: Tokens of memory; -1 means as the file says.
        dtype: Type of the weights.
    """
    from txl_dist.convert.importer import import_model

    made = import_model(
        path,
        out,
        format=format,
        settings=settings,
        vocab=vocab,
        segment_len=segment_len,
        memory_len=memory_len,
        dtype=dtype,
    )
    print(
        f"{out}: {made.num_parameters:,} parameters, vocabulary {made.vocab_size:,}, segment {made.segment_len}, "
        f"memory {made.memory_len}"
    )
    if not made.has_vocabulary:
        print("no vocabulary came with it: text is ids in decimal (17 4 0); give one with --vocab")


def generate(
    bundle: Positional[Path],
    /,
    prompt: str = "",
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 1.0,
    seed: int = 0,
) -> None:
    """Continue a prompt with a bundle, streaming the text.

    Args:
        bundle: Folder that `txl export` wrote.
        prompt: Text to continue; empty begins a document.
        max_tokens: Most tokens to make.
        temperature: 0 takes the likeliest token; 1 samples from the model as it is.
        top_k: Keep only so many of the likeliest tokens; 0 keeps all.
        top_p: Keep only the likeliest tokens whose probabilities sum to this.
        seed: Seed of the sampling.
    """
    from txl_dist.infer import load

    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8 (character {error.start}). Give it as UTF-8.") from error
    pieces = load(bundle).generate(
        prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def verify(path: Positional[Path], /) -> None:
    """Check every hash of a corpus, a run, a checkpoint or a bundle; exit code 1 and a list if something is damaged.

    Args:
        path: Folder of a corpus, a run, a checkpoint or a bundle.
    """
    from txl_dist.data.verify import verify_corpus
    from txl_dist.manifest import MANIFEST, problems_of

    if not path.is_dir():
        raise DataError(f"{path} is no folder. Name a corpus, a run, a checkpoint or a bundle.")
    if (path / "config.toml").is_file() and not (path / MANIFEST).is_file():  # a run
        folders = sorted((path / "checkpoints").glob("step_?????????"))
        problems = [f"{folder}: {problem}" for folder in folders for problem in problems_of(folder)]
        problems = problems if folders else [f"{path} is a run without checkpoints"]
    elif (path / "txl_tokenizer.json").is_file():
        raise DataError(f"{path} is an export to Hugging Face, which has no manifest. Verify the bundle it came from.")
    elif (path / MANIFEST).is_file() or (path / "model.safetensors").is_file():
        problems = problems_of(path)
    else:
        problems = verify_corpus(path)
    print("\n".join(problems) if problems else f"{path}: whole")
    if problems:
        raise SystemExit(1)


VERBS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "train": train,
    "evaluate": evaluate,
    "export": export,
    "import": import_,
    "generate": generate,
    "verify": verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code: 0, or 2 for an error that the user can mend."""
    arguments = _without_launcher_flags(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    verb, *rest = arguments
    if verb == "--version":
        print(__version__)
        return 0
    if verb not in VERBS:
        print(f"txl: unknown verb {verb!r}.\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        if verb == "train":
            train(rest)
        else:
            tyro.cli(VERBS[verb], prog=f"txl {verb}", args=rest)
    except TxlError as error:
        if _should_print(error):
            print(f"txl {verb}: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run() -> None:
    """Entry point of the `txl` script."""
    try:
        code = main()
    except KeyboardInterrupt:
        print("txl: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output is gone; nobody is left to tell
        os._exit(141)
    except Exception:  # noqa: BLE001  a defect of ours: its traceback, and then the same way out
        traceback.print_exc()
        code = 1
    if "torch" in sys.modules:
        # Everything is written and all ranks have met. In about one exit of a hundred, native threads behind gloo
        # abort the interpreter while it takes itself apart (no Python frame is left), and the launcher would report
        # a finished run as failed: leave without that.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _should_print(error: TxlError) -> bool:
    """An error is printed once: by the rank that met it, or before ranks have joined, by one process per node."""
    if error.rank is None:
        return _is_speaker()
    return os.environ.get("RANK", "0") == str(error.rank)


def _is_speaker() -> bool:
    """Before ranks have joined, the first process of each node speaks."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _without_launcher_flags(arguments: Sequence[str]) -> list[str]:
    """The `deepspeed` launcher puts --local_rank=N in front of the verb; the environment says the same."""
    return [word for word in arguments if not word.startswith(("--local_rank=", "--local-rank="))]


def _usage() -> str:
    lines = ["usage: txl VERB ...   (also: python -m txl_dist VERB; deepspeed --module txl_dist train CONFIG)", ""]
    for name, function in VERBS.items():
        summary = (function.__doc__ or "").splitlines()[0]
        lines.append(f"  {name:<10} {summary}")
    return "\n".join([*lines, "", "txl VERB --help explains the flags of a verb."])
