"""Verbs that make, look into and prove corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from txl_dist.errors import DataError


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
