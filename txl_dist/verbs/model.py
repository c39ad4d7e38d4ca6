"""Verbs about trained models: evaluate, export, import, generate."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from txl_dist.console import say, write_text
from txl_dist.errors import ConfigError


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
    from txl_dist.train.export import export_bundle, export_to_huggingface

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

    if any((bundle / name).exists() for name in ("config.toml", "state.json")):
        raise ConfigError(
            f"{bundle} is a run or a checkpoint. Write `txl export {bundle} BUNDLE`, then generate with BUNDLE."
        )
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8 (character {error.start}). Give it as UTF-8.") from error
    pieces = load(bundle).generate(
        prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    for piece in itertools.chain([prompt], pieces, ["\n"]):
        write_text(piece)
