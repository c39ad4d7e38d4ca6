"""The peers' vocabularies as our tokenizers, ids unchanged.

    tokenizer.json          ours
    *.json                  a list of symbols, or an object of symbol: id (labml's, and those of characters)
    vocab.txt               a symbol per line
    cache.pt, vocab.bin     files of torch.save: the original's Corpus, a Vocab, a dict of its fields, a checkpoint of
                            NVIDIA's
    vocab.pkl               the same from pickle.dump: Hugging Face's

What a file does not say is told by its symbols: `<eos>` stands behind each line; without it `<S>` stands on both
sides of each; `<unk>` or `<UNK>` is what an unknown word becomes, and without them it is refused. None of these
vocabularies marks the end of a document, but GPT-2's, which NVIDIA's code can use.

What it gives up: the peers' own splitting of raw text (Hugging Face's moses): texts are split at blanks, as the
corpora are that these vocabularies were counted on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from txl_dist.convert.safe_unpickle import ZIP_START, Inert, read_any
from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import open_regular, parse_json, read_text
from txl_dist.tokenizers.base import END_OF_TEXT, Tokenizer, byte_symbols
from txl_dist.tokenizers.tokenizer import build_tokenizer, load_tokenizer
from txl_dist.tokenizers.word_tokenizer import END_OF_LINE

SENTENCE = "<S>"
"""Stands on both sides of each line of lm1b."""
UNKNOWNS = ("<unk>", "<UNK>")
PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
PICKLE_START = b"\x80"
_REMEDY = "Name the vocabulary that this model was trained with."


def read_vocabulary(path: Path, *, vocab_size: int) -> Tokenizer:
    """A vocabulary file of any kind. Raises DataError or CheckpointError if it is damaged or of another size."""
    with translate_errors(DataError, f"cannot read the vocabulary {path}", "Check the path."):
        with open_regular(path) as file:
            start = file.read(len(ZIP_START))
        if path.suffix in PICKLE_SUFFIXES or start.startswith((ZIP_START, PICKLE_START)):
            return tokenizer_of(read_any(path), where=str(path), vocab_size=vocab_size)
        what = f"the vocabulary {path} is neither text in UTF-8 nor a pickle"
        with translate_errors(DataError, what, _REMEDY, of=(UnicodeDecodeError,)):
            text = read_text(path)
    values = _json_of(text, path)
    if isinstance(values, dict) and isinstance(values.get("kind"), str):
        return _checked(load_tokenizer(path), where=str(path), vocab_size=vocab_size)
    if values is None:
        return _build(
            _plain(_symbols_of_lines(text, path), are_characters=False), where=str(path), vocab_size=vocab_size
        )
    return tokenizer_of(values, where=str(path), vocab_size=vocab_size)


def tokenizer_of(vocab: Any, *, where: str, vocab_size: int) -> Tokenizer:
    """A vocabulary that was read already: a Vocab, something that holds one, symbols, or a dict symbol: id.

    `where` names it in errors. Raises DataError if it is none, damaged, or of another size.
    """
    fields = _fields_of(vocab)
    if isinstance(fields.get("vocab"), Inert | dict):
        fields = _fields_of(fields["vocab"])  # of a Corpus or a checkpoint
    if isinstance(fields.get("tokenizer"), Inert | dict):
        values = _bpe(_fields_of(fields["tokenizer"]), where=where)
    elif isinstance(vocab, list | tuple):
        values = _plain(list(vocab), are_characters=_are_characters(vocab))
    elif "idx2sym" in fields or "sym2idx" in fields:
        values = _vocab(fields, where=where)
    elif isinstance(vocab, dict) and all(isinstance(value, int) for value in fields.values()):
        symbols = _in_order(fields, where=where)
        values = _plain(symbols, are_characters=_are_characters(symbols))
    else:
        raise DataError(f"{where} is a {type(vocab).__name__} without symbols, so no vocabulary. {_REMEDY}")
    return _build(values, where=where, vocab_size=vocab_size)


def identity_tokenizer(vocab_size: int) -> Tokenizer:
    """For a model that comes without a vocabulary: its words are the ids themselves, "17 4 0"."""
    values = {"kind": "word", "symbols": [str(i) for i in range(vocab_size)], "end_of_text": None}
    return build_tokenizer({**values, "line_end": None, "unknown": None})


def _json_of(text: str, path: Path) -> Any:
    """None where it is a list of lines."""
    try:
        return parse_json(text) if path.suffix == ".json" or text.lstrip()[:1] in ("[", "{") else None
    except ValueError as error:
        if path.suffix == ".json":
            raise DataError(f"the vocabulary {path} is not valid JSON: {error}. {_REMEDY}") from error
        return None


def _symbols_of_lines(text: str, path: Path) -> list[str]:
    """The first word of each line; a line that repeats an earlier one has no id of its own, as in the original."""
    lines = [line.split() for line in text.removesuffix("\n").split("\n")]
    if [] in lines:
        raise DataError(f"the vocabulary {path} has no symbol in line {lines.index([]) + 1}. {_REMEDY}")
    return list(dict.fromkeys(words[0] for words in lines))


def _fields_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, Inert):
        return vars(value)
    return value if isinstance(value, dict) else {}


def _vocab(fields: dict[Any, Any], *, where: str) -> dict[str, Any]:
    """The original's class Vocab, which the others copied."""
    symbols, ids = fields.get("idx2sym"), fields.get("sym2idx")
    if symbols is None:
        symbols = _in_order(ids, where=where)
    elif not isinstance(symbols, list) or (ids is not None and symbols != _in_order(ids, where=where)):
        raise DataError(f"{where}: idx2sym and sym2idx contradict each other. {_REMEDY}")
    if fields.get("delimiter") not in (None, "", " "):
        raise DataError(
            f"{where} splits words at {fields['delimiter']!r}; this program knows blanks. Write its symbols to a text "
            "file, one per line, and prepare texts with blanks."
        )
    are_characters = fields.get("delimiter") == ""
    several = [symbol for symbol in symbols if not _are_characters([symbol])]
    if are_characters and several:
        raise DataError(
            f"{where} is a vocabulary of characters, but has the symbols {several[:3]}, which this program cannot tell "
            "from their characters. Give no vocabulary and use ids."
        )
    return _plain(symbols, are_characters=are_characters, lower_case=bool(fields.get("lower_case", False)))


def _plain(symbols: list[Any], *, are_characters: bool, lower_case: bool = False) -> dict[str, Any]:
    """Values of a tokenizer of words or characters, by what its symbols tell."""
    unknown = next((symbol for symbol in UNKNOWNS if symbol in symbols), None)
    values = {"symbols": symbols, "end_of_text": None, "unknown": unknown, "lower_case": lower_case}
    if are_characters:
        return {**values, "kind": "char"}
    mark = SENTENCE if SENTENCE in symbols and END_OF_LINE not in symbols else None
    line_end = END_OF_LINE if END_OF_LINE in symbols else mark
    return {**values, "kind": "word", "line_start": mark, "line_end": line_end}


def _bpe(fields: dict[Any, Any], *, where: str) -> dict[str, Any]:
    """GPT-2's tokenizer as its class of 2019 keeps it, with the words made up to pad it."""
    encoder, ranks = fields.get("encoder"), fields.get("bpe_ranks")
    added = fields.get("added_tokens_encoder", fields.get("_added_tokens_encoder")) or {}
    if not (isinstance(encoder, dict) and isinstance(ranks, dict) and isinstance(added, dict)):
        raise DataError(f"{where} holds no byte-level BPE: it lacks encoder or bpe_ranks. {_REMEDY}")
    symbols = _in_order({**encoder, **added}, where=where)
    pairs = _in_order(ranks, where=f"{where}, merges")
    known = set(symbols)
    is_whole = all(
        isinstance(pair, tuple) and len(pair) == 2 and known.issuperset((*pair, "".join(pair))) for pair in pairs
    )
    if not is_whole or not known.issuperset(byte_symbols()):
        raise DataError(f"{where}: bytes or merges have no symbol in the vocabulary. {_REMEDY}")
    end_of_text = symbols.index(END_OF_TEXT) if END_OF_TEXT in known else None
    return {"kind": "bpe", "symbols": symbols, "merges": [" ".join(pair) for pair in pairs], "end_of_text": end_of_text}


def _in_order(ids: Any, *, where: str) -> list[Any]:
    """Keys by their values, which must be 0, 1, 2 ..."""
    values = [value for value in ids.values() if isinstance(value, int)] if isinstance(ids, dict) else []
    if not isinstance(ids, dict) or len(values) < len(ids) or sorted(values) != list(range(len(ids))):
        raise DataError(f"{where}: the ids are not 0, 1, 2 ... without a hole, each once. {_REMEDY}")
    return sorted(ids, key=ids.__getitem__)


def _are_characters(symbols: Iterable[Any]) -> bool:
    """Every symbol is one character, but for that of unknown ones."""
    return all(isinstance(symbol, str) and (len(symbol) == 1 or symbol in UNKNOWNS) for symbol in symbols)


def _build(values: dict[str, Any], *, where: str, vocab_size: int) -> Tokenizer:
    symbols = values["symbols"]
    if wrong := [symbol for symbol in symbols if not isinstance(symbol, str)]:
        raise DataError(f"{where}: the symbol {wrong[0]!r} is no text. {_REMEDY}")
    if twice := [symbol for symbol, count in Counter(symbols).items() if count > 1]:
        raise DataError(f"{where}: the symbol {twice[0]!r} occurs twice. {_REMEDY}")
    try:
        tokenizer = build_tokenizer(values)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where} makes no tokenizer ({type(error).__name__}: {error}). {_REMEDY}") from error
    return _checked(tokenizer, where=where, vocab_size=vocab_size)


def _checked(tokenizer: Tokenizer, *, where: str, vocab_size: int) -> Tokenizer:
    if tokenizer.vocab_size != vocab_size:
        raise DataError(f"{where} has {tokenizer.vocab_size} symbols, the model {vocab_size}. {_REMEDY}")
    return tokenizer
