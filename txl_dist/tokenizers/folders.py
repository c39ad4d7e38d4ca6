"""Reads the tokenizer in a folder, in the layouts of model hubs and of `save_pretrained`.

    tokenizer.json                      any Hugging Face tokenizer, or ours in a corpus or an exported model (bundle)
    *.model                             a sentencepiece model (spiece.model, tokenizer.model)
    vocab.json  merges.txt              GPT-2's byte-level BPE in its older form
    snapshots/COMMIT/                   a model in huggingface_hub's cache: its newest commit that has one of these

A folder with vocab.txt alone is not supported, because vocab.txt does not state how text is split, or whether case is
kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import parse_json, read_bytes, read_text
from txl_dist.tokenizers.base import byte_symbols

TOKENIZER = "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"


def tokenizer_of_folder(folder: Path) -> bytes:
    """Return the content of the tokenizer file in a folder, or of a file made from its vocabulary and merges.

    Raises OSError if a file cannot be read. Raises DataError if the folder has no tokenizer, several tokenizers, or a
    tokenizer that must be converted first.
    """
    candidates = [folder, *_snapshots(folder)]
    for candidate in candidates:
        if (candidate / TOKENIZER).is_file():
            return read_bytes(candidate / TOKENIZER)
    has_vocabulary = False
    for candidate in candidates:
        models = sorted(candidate.glob("*.model"))
        if len(models) > 1:
            names = ", ".join(path.name for path in models)
            raise DataError(f"{candidate} holds several sentencepiece models ({names}). Name one of these files.")
        if models:
            return read_bytes(models[0])
        if (candidate / VOCABULARY).is_file() and (candidate / MERGES).is_file():
            return _byte_level_bpe(candidate).encode()
        has_vocabulary |= (candidate / "vocab.txt").is_file() or (candidate / VOCABULARY).is_file()
    if has_vocabulary:
        raise DataError(
            f"{folder} contains a vocabulary but no {TOKENIZER}, and only {TOKENIZER} says how text is split into "
            "symbols. Make this file: python -c "
            f'\'from transformers import AutoTokenizer as T; T.from_pretrained("{folder}").save_pretrained("NEW")\', '
            "and name the folder NEW."
        )
    raise DataError(
        f"{folder} is a folder without a tokenizer: neither {TOKENIZER}, nor a sentencepiece .model, nor {VOCABULARY} "
        f"with {MERGES}. Name the file or folder of a tokenizer."
    )


def _snapshots(folder: Path) -> list[Path]:
    """Return the folders of commits in a cache of huggingface_hub, the newest first. Empty for any other folder."""
    commits = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return sorted(commits, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _byte_level_bpe(folder: Path) -> str:
    """Return the text of a tokenizer.json for GPT-2's byte-level BPE, made from vocab.json and merges.txt.

    Raises DataError if a file is damaged, or if the vocabulary does not belong to a byte-level BPE.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    ids = _vocabulary(folder / VOCABULARY)
    with translate_errors(
        DataError, f"{folder / MERGES} is not a list of merges", "Copy the file again.", of=(ValueError,)
    ):
        merges = _merges(read_text(folder / MERGES))
        try:
            library = Library(models.BPE(vocab=ids, merges=merges))
        except Exception as error:  # the library raises nothing more particular
            raise ValueError(str(error)) from error
    if not set(byte_symbols()) <= ids.keys():
        raise DataError(
            f"{folder} holds no byte-level BPE: {VOCABULARY} has no symbol for some bytes. Give the tokenizer.json "
            "that transformers writes with save_pretrained."
        )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    merged = {"".join(pair) for pair in merges}
    special = []
    for symbol in ids:
        looks_special = symbol.startswith("<") and symbol.endswith(">") and len(symbol) > 2
        if looks_special and symbol not in merged:
            special.append(AddedToken(symbol, special=True, normalized=False))
    library.add_special_tokens(special)
    return str(library.to_str())


def _vocabulary(path: Path) -> dict[str, int]:
    """Return the ids in a vocab.json by symbol. Raises DataError if the file cannot be read or is damaged."""
    with translate_errors(DataError, f"{path} is not a vocabulary", "Copy the file again.", of=(OSError, ValueError)):
        values: Any = parse_json(read_bytes(path))
        if not isinstance(values, dict) or not all(type(i) is int and i >= 0 for i in values.values()):
            raise ValueError("the file is not a JSON object that gives an id of 0 or more for each symbol")
        return values


def _merges(text: str) -> list[tuple[str, str]]:
    """Return the pairs of symbols in a merges.txt, without its version line.

    Raises ValueError if a line is not two symbols with a blank between them.
    """
    pairs = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.rstrip("\r").split(" ")
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        if len(words) != 2 or not all(words):
            raise ValueError(f"line {number} is not two symbols with a blank between them")
        pairs.append((words[0], words[1]))
    return pairs
