"""Verbs about trained models: evaluate, export, import, generate."""

from __future__ import annotations

import itertools
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from txl_dist.console import say, write_text
from txl_dist.errors import ConfigError
from txl_dist.ops.evaluation_settings import Outputs, Overrides
from txl_dist.run_files import TRAINED, Kind, kind_of, require


def evaluate(
    target: Positional[Path],
    /,
    overrides: Annotated[Overrides, arg(name="")],
    outputs: Annotated[Outputs, arg(name="")],
    data: str = "",
    baselines: bool = False,
) -> None:
    """Score a held-out split with a trained run, a checkpoint or a bundle.

    Args:
        target: Run directory, checkpoint folder or bundle.
        overrides: How the evaluation differs from training.
        outputs: Files that are written.
        data: Corpus, a folder or URL; a run knows its own.
        baselines: Also score an order-0 model and a smoothed bigram table on the same split.
    """
    kind = require(target, *TRAINED)
    overrides.check(target, is_bundle=kind is Kind.BUNDLE, data=data)
    outputs.check(overrides)
    if data:
        require(data, Kind.CORPUS, what="--data")
    _say(f"scoring {target}, {kind.value}" + (f", on {data}" if data else ""))
    from txl_dist.ops.evaluate.evaluate import evaluate_trained

    lines = evaluate_trained(target, data=data, overrides=overrides, baselines=baselines, outputs=outputs)
    if lines:
        say("\n".join(lines))


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
    kind = require(source, *TRAINED)
    _require_output(out, Kind.BUNDLE if format == "bundle" else Kind.HUGGINGFACE)
    _say(f"exporting {source}, {kind.value}")
    from txl_dist.ops.export import export_bundle, export_to_huggingface

    if format == "huggingface":
        say(f"{out}: written from {export_to_huggingface(source, out, dtype=dtype)}, and read back bit for bit")
        return
    folder, error = export_bundle(source, out, dtype=dtype)
    say(f"{out}: written from {folder}; largest difference to its source on the probe {error:.2e} nats")


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
    _require_foreign(path, format=format)
    _require_output(out, Kind.BUNDLE)
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
    say(
        f"{out}: {made.num_parameters:,} parameters, vocabulary {made.vocab_size:,}, segment {made.segment_len}, "
        f"memory {made.memory_len}"
    )
    if not made.has_vocabulary:
        say("no vocabulary came with it: text is ids in decimal (17 4 0); give one with --vocab")


def generate(
    source: Positional[Path],
    /,
    prompt: str = "",
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 1.0,
    seed: int = 0,
) -> None:
    """Continue a prompt with a bundle, a run or a checkpoint, streaming the text.

    Args:
        source: Bundle, run directory (its newest whole checkpoint) or checkpoint folder.
        prompt: Text to continue; empty begins a document.
        max_tokens: Most tokens to make.
        temperature: 0 takes the likeliest token; 1 samples from the model as it is.
        top_k: Keep only so many of the likeliest tokens; 0 keeps all.
        top_p: Keep only the likeliest tokens whose probabilities sum to this.
        seed: Seed of the sampling.
    """
    kind = require(source, *TRAINED)
    rules = [
        ("--max-tokens", max_tokens, max_tokens >= 0, "0 or more tokens"),
        ("--temperature", temperature, 0 <= temperature < math.inf, "0 or more"),
        ("--top-k", top_k, top_k >= 0, "0 or more tokens; 0 keeps all"),
        ("--top-p", top_p, 0 < top_p <= 1, "above 0 and at most 1; 1 keeps all"),
        ("--seed", seed, 0 <= seed < 2**63, "0 or more and below 2**63"),
    ]
    for flag, value, holds, rule in rules:
        if not holds:
            raise ConfigError(f"{flag} {value}: it must be {rule}.")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8 (character {error.start}). Give it as UTF-8.") from error
    _say(f"generating up to {max_tokens} tokens with {source}, {kind.value}; seed {seed}")
    from txl_dist.log import start_logging
    from txl_dist.ops.export import load_trained

    start_logging()
    pieces = load_trained(source).generate(
        prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    for piece in itertools.chain([prompt], pieces, ["\n"]):
        write_text(piece)


def _say(what: str) -> None:
    """Before torch is imported, which takes seconds: that it begins, and with what. One process of a job says it."""
    if os.environ.get("RANK", "0") == "0":
        say(f"{what} ...", to=sys.stderr)


def _require_output(out: Path, kind: Kind) -> None:
    """Only what is of the same kind is ever replaced."""
    another = "Choose another output folder."
    if kind_of(out) is not Kind.NOTHING:  # what is no folder of ours at all, the writer refuses
        require(out, kind, remedies=dict.fromkeys(Kind, another))


def _require_foreign(path: Path, *, format: str) -> None:
    """Refuse what is ours already. Raises ConfigError."""
    kind = kind_of(path)
    if kind is Kind.HUGGINGFACE and format != "huggingface":
        raise ConfigError(f"{path} is {kind.value}, not weights of {format}. Give --format huggingface.")
    ours = "It is ours already: `txl export {path} BUNDLE` makes a bundle of it."
    if kind not in (Kind.HUGGINGFACE, Kind.NOTHING):
        instead = {Kind.RUN: ours, Kind.CHECKPOINT: ours}
        require(path, Kind.HUGGINGFACE, remedies=instead)
    if not os.path.lexists(path):
        raise ConfigError(f"{path} does not exist. Name the file or folder with the weights.")
