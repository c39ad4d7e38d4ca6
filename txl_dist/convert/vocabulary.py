"""Import of other programs' vocabularies as tokenizers, with ids unchanged.

    tokenizer.json          a tokenizer of this package
    *.json                  a list of symbols, or an object {symbol: id}, as labml's code writes it
    vocab.txt               a symbol per line
    cache.pt, vocab.bin     files of torch.save: a Corpus or Vocab of the original code, a dict of a Vocab's fields, or
                            a checkpoint of NVIDIA's code
    vocab.pkl               the same objects from pickle.dump, as Hugging Face writes them

A file does not state which symbols are special, so the spelling decides. The symbol `<eos>` ends each line. If there is
no `<eos>` but a symbol `<S>`, this symbol is at both ends of each line. The symbol `<unk>` or `<UNK>` stands for
unknown words. In a vocabulary without either symbol, unknown words raise DataError. Only GPT-2's vocabulary, which
NVIDIA's code can use, has a mark for the end of a document.

The other programs' own splitting of raw text (Hugging Face's moses) is not imported. Texts are split at blanks, as in
the corpora of these vocabularies.
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
"""Mark at both ends of each line, in vocabularies of the lm1b corpus."""
UNKNOWNS = ("<unk>", "<UNK>")
PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
PICKLE_START = b"\x80"
_REMEDY = "Name the vocabulary that this model was trained with."


def read_vocabulary(path: Path, *, vocab_size: int) -> Tokenizer:
    """Read a vocabulary file of any supported kind as a tokenizer. The ids stay the same.

    Raises DataError or CheckpointError if the file is damaged, or if the vocabulary does not have the expected size.
    """
    with translate_errors(DataError, f"cannot read the vocabulary {path}", "Check the path."):
        with open_regular(path) as file:
            start = file.read(len(ZIP_START))
        if path.suffix in PICKLE_SUFFIXES or start.startswith((ZIP_START, PICKLE_START)):
            return tokenizer_of(read_any(path), where=str(path), vocab_size=vocab_size)
        what = f"the vocabulary {path} is neither text in UTF-8 nor a pickle"
        with translate_errors(DataError, what, _REMEDY, of=(UnicodeDecodeError,)):
            text = read_text(path)
    values = _parse_if_json(text, path)
    if isinstance(values, dict) and isinstance(values.get("kind"), str):
        return _check_size(load_tokenizer(path), where=str(path), vocab_size=vocab_size)
    if values is None:
        words = _plain_values(_symbols_of_lines(text, path), are_characters=False)
        return _build(words, where=str(path), vocab_size=vocab_size)
    return tokenizer_of(values, where=str(path), vocab_size=vocab_size)


def tokenizer_of(vocab: Any, *, where: str, vocab_size: int) -> Tokenizer:
    """Build a tokenizer from a vocabulary in memory. `where` names the vocabulary in errors.

    The vocabulary is an object of class Vocab, an object that contains a Vocab in its field `vocab`, a list of symbols,
    or a dict from symbols to ids. Raises DataError for any other object, for a damaged vocabulary, or if the size is
    not the expected size.
    """
    fields = _fields_of(vocab)
    if isinstance(fields.get("vocab"), Inert | dict):
        fields = _fields_of(fields["vocab"])  # a Corpus or a checkpoint has a Vocab
    if isinstance(fields.get("tokenizer"), Inert | dict):
        values = _bpe_values(_fields_of(fields["tokenizer"]), where=where)
    elif isinstance(vocab, list | tuple):
        values = _plain_values(list(vocab), are_characters=_are_characters(vocab))
    elif "idx2sym" in fields or "sym2idx" in fields:
        values = _vocab_values(fields, where=where)
    elif isinstance(vocab, dict) and all(isinstance(value, int) for value in fields.values()):
        symbols = _in_order(fields, where=where)
        values = _plain_values(symbols, are_characters=_are_characters(symbols))
    else:
        raise DataError(f"{where} is a {type(vocab).__name__} without symbols, not a vocabulary. {_REMEDY}")
    return _build(values, where=where, vocab_size=vocab_size)


def identity_tokenizer(vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a model without a vocabulary. Its words are the ids in decimal, as in "17 4 0"."""
    return build_tokenizer(
        {
            "kind": "word",
            "symbols": [str(i) for i in range(vocab_size)],
            "end_of_text": None,
            "line_end": None,
            "unknown": None,
        }
    )


def _parse_if_json(text: str, path: Path) -> Any:
    """Return the content of a JSON file, or None if the file is a list of lines."""
    first_character = text.lstrip()[:1]
    is_json = path.suffix == ".json" or first_character in ("[", "{")
    if not is_json:
        return None
    try:
        return parse_json(text)
    except ValueError as error:
        if path.suffix == ".json":
            raise DataError(f"the vocabulary {path} is not valid JSON: {error}. {_REMEDY}") from error
        return None


def _symbols_of_lines(text: str, path: Path) -> list[str]:
    """Return the first word of each line. A line that repeats an earlier word has no id, as in the original code."""
    lines = [line.split() for line in text.removesuffix("\n").split("\n")]
    if [] in lines:
        raise DataError(f"the vocabulary {path} has no symbol in line {lines.index([]) + 1}. {_REMEDY}")
    return list(dict.fromkeys(words[0] for words in lines))


def _fields_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, Inert):
        return vars(value)
    if isinstance(value, dict):
        return value
    return {}


def _vocab_values(fields: dict[Any, Any], *, where: str) -> dict[str, Any]:
    """Return a tokenizer's values, read from the fields of the original code's class Vocab or a copy of it."""
    symbols = fields.get("idx2sym")
    ids = fields.get("sym2idx")
    if symbols is None:
        symbols = _in_order(ids, where=where)
    elif not isinstance(symbols, list) or (ids is not None and symbols != _in_order(ids, where=where)):
        raise DataError(f"{where}: idx2sym and sym2idx contradict each other. {_REMEDY}")
    if fields.get("delimiter") not in (None, "", " "):
        raise DataError(
            f"{where} splits words at {fields['delimiter']!r}, but txl_dist splits words only at blanks. Write the "
            "symbols of the vocabulary to a text file, one per line, and separate words by blanks in texts."
        )
    are_characters = fields.get("delimiter") == ""
    longer = [symbol for symbol in symbols if not _are_characters([symbol])]
    if are_characters and longer:
        raise DataError(
            f"{where} is a vocabulary of characters, but also has longer symbols: {longer[:3]}. txl_dist cannot "
            "read such a vocabulary. Remove --vocab, and write texts as ids."
        )
    return _plain_values(symbols, are_characters=are_characters, lower_case=bool(fields.get("lower_case", False)))


def _plain_values(symbols: list[Any], *, are_characters: bool, lower_case: bool = False) -> dict[str, Any]:
    """Return the values of a tokenizer of words or characters. Symbols such as `<eos>` become the tokenizer's special
    marks."""
    unknowns = [symbol for symbol in UNKNOWNS if symbol in symbols]
    values = {
        "symbols": symbols,
        "end_of_text": None,
        "unknown": unknowns[0] if unknowns else None,
        "lower_case": lower_case,
    }
    if are_characters:
        return {**values, "kind": "char"}
    line_start = line_end = None
    if END_OF_LINE in symbols:
        line_end = END_OF_LINE
    elif SENTENCE in symbols:
        line_start = line_end = SENTENCE
    return {**values, "kind": "word", "line_start": line_start, "line_end": line_end}


def _bpe_values(fields: dict[Any, Any], *, where: str) -> dict[str, Any]:
    """Return a tokenizer's values, read from GPT-2's tokenizer class of 2019, including the words that were added to
    pad the vocabulary."""
    encoder = fields.get("encoder")
    ranks = fields.get("bpe_ranks")
    added = fields.get("added_tokens_encoder", fields.get("_added_tokens_encoder")) or {}
    if not (isinstance(encoder, dict) and isinstance(ranks, dict) and isinstance(added, dict)):
        raise DataError(
            f"{where} holds no byte-level BPE: the attribute encoder or bpe_ranks is missing or not a dict. {_REMEDY}"
        )
    symbols = _in_order({**encoder, **added}, where=where)
    pairs = _in_order(ranks, where=f"{where}, merges")
    symbol_set = set(symbols)
    is_complete = symbol_set.issuperset(byte_symbols())
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not symbol_set.issuperset((*pair, "".join(pair))):
            is_complete = False
    if not is_complete:
        raise DataError(f"{where}: some bytes or merges have no symbol in the vocabulary. {_REMEDY}")
    if END_OF_TEXT in symbol_set:
        end_of_text = symbols.index(END_OF_TEXT)
    else:
        end_of_text = None
    merges = [" ".join(pair) for pair in pairs]
    return {"kind": "bpe", "symbols": symbols, "merges": merges, "end_of_text": end_of_text}


def _in_order(ids: Any, *, where: str) -> list[Any]:
    """Return the keys in the order of their values. Raises DataError if the values are not 0, 1, 2 ..."""
    if isinstance(ids, dict):
        values = [value for value in ids.values() if isinstance(value, int)]
        wanted = list(range(len(ids)))
        if sorted(values) == wanted:
            return sorted(ids, key=ids.__getitem__)
    raise DataError(f"{where}: the ids must be 0, 1, 2 ... without a gap or a repetition. {_REMEDY}")


def _are_characters(symbols: Iterable[Any]) -> bool:
    """Return True if every symbol is one character, except the symbol for unknown characters."""
    for symbol in symbols:
        if not isinstance(symbol, str):
            return False
        if len(symbol) != 1 and symbol not in UNKNOWNS:
            return False
    return True


def _build(values: dict[str, Any], *, where: str, vocab_size: int) -> Tokenizer:
    """Build a tokenizer from its values, and check its symbols.

    Raises DataError if symbols are not text or occur twice, or if their number is not the expected number.
    """
    for symbol in values["symbols"]:
        if not isinstance(symbol, str):
            raise DataError(f"{where}: the symbol {symbol!r} is not text. {_REMEDY}")
    for symbol, count in Counter(values["symbols"]).items():
        if count > 1:
            raise DataError(f"{where}: the symbol {symbol!r} occurs twice. {_REMEDY}")
    try:
        tokenizer = build_tokenizer(values)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: no tokenizer can be made from this vocabulary ({type(error).__name__}: {error}). {_REMEDY}"
        ) from error
    return _check_size(tokenizer, where=where, vocab_size=vocab_size)


def _check_size(tokenizer: Tokenizer, *, where: str, vocab_size: int) -> Tokenizer:
    if tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"{where} has {tokenizer.vocab_size} symbols, but the model has {vocab_size} token ids. {_REMEDY}"
        )
    return tokenizer
