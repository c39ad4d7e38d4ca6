"""The tokenizer in a folder, as hubs and `save_pretrained` lay it out.

    tokenizer.json                      of any tokenizer of Hugging Face; ours, of a corpus or a bundle
    *.model                             a sentencepiece model (spiece.model, tokenizer.model)
    vocab.json  merges.txt              GPT-2's byte-level BPE in its older form
    snapshots/COMMIT/                   a model in the cache of huggingface_hub: its newest commit that has one of these

What it gives up: vocab.txt alone, which does not say how text is split and in which case.
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
    """The bytes of the tokenizer file in a folder, or of the one that its vocabulary and merges make.

    Raises OSError, and DataError for a folder that has none, several, or one that must be converted first.
    """
    places = [folder, *_snapshots(folder)]
    for place in places:
        if (place / TOKENIZER).is_file():
            return read_bytes(place / TOKENIZER)
    for place in places:
        models = sorted(place.glob("*.model"))
        if len(models) > 1:
            names = ", ".join(path.name for path in models)
            raise DataError(f"{place} holds several sentencepiece models ({names}). Name one of them.")
        if models:
            return read_bytes(models[0])
        if (place / VOCABULARY).is_file() and (place / MERGES).is_file():
            return _byte_level_bpe(place).encode()
    if any((place / name).is_file() for place in places for name in ("vocab.txt", VOCABULARY)):
        raise DataError(
            f"{folder} holds a vocabulary without {TOKENIZER}, which would say how text is split. Make one: python -c "
            f'\'from transformers import AutoTokenizer as T; T.from_pretrained("{folder}").save_pretrained("NEW")\', '
            "and name NEW."
        )
    raise DataError(
        f"{folder} is a folder without a tokenizer: neither {TOKENIZER}, nor a sentencepiece .model, nor {VOCABULARY} "
        f"with {MERGES}. Name the file or folder of a tokenizer."
    )


def _snapshots(folder: Path) -> list[Path]:
    """Folders of commits in the cache of huggingface_hub, the newest first; none elsewhere."""
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _byte_level_bpe(folder: Path) -> str:
    """The text of a tokenizer.json of GPT-2's kind. Raises DataError for another kind, or what is damaged."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    ids = _vocabulary(folder / VOCABULARY)
    with translate_errors(DataError, f"{folder / MERGES} is no list of merges", "Copy it again.", of=(ValueError,)):
        merges = _merges(read_text(folder / MERGES))
        try:
            library = Library(models.BPE(vocab=ids, merges=merges))
        except Exception as error:  # the library raises nothing more particular
            raise ValueError(str(error)) from error
    if not set(byte_symbols()) <= ids.keys():
        raise DataError(
            f"{folder} holds no byte-level BPE: {VOCABULARY} lacks symbols of bytes. Give the tokenizer.json that "
            "transformers writes with save_pretrained."
        )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    marks = [symbol for symbol in ids if symbol.startswith("<") and symbol.endswith(">") and len(symbol) > 2]
    made = {"".join(pair) for pair in merges}
    library.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks if mark not in made])
    return str(library.to_str())


def _vocabulary(path: Path) -> dict[str, int]:
    """Symbol -> id. Raises DataError."""
    with translate_errors(DataError, f"{path} is no vocabulary", "Copy it again.", of=(OSError, ValueError)):
        values: Any = parse_json(read_bytes(path))
        if not isinstance(values, dict) or not all(type(i) is int and i >= 0 for i in values.values()):
            raise ValueError("it holds no object of symbols and ids")
        return values


def _merges(text: str) -> list[tuple[str, str]]:
    """The pairs of a list of merges, without its line of the version. Raises ValueError."""
    pairs = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.rstrip("\r").split(" ")
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        if len(words) != 2 or not all(words):
            raise ValueError(f"line {number} is not two symbols with a blank between them")
        pairs.append((words[0], words[1]))
    return pairs
