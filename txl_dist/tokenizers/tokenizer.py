"""Table of the kinds of tokenizers, and reading of any tokenizer from its file.

    byte, char         one id per byte or code point                      characters.py
    word               one id per word between blanks, `<eos>`, `<unk>`   word_tokenizer.py
    listed             existing ids, each with a name                     listed.py
    bpe, unigram       byte-level pieces learnt from the corpus           subwords.py
    huggingface,       tokenizers of other programs, their ids            foreign.py
    sentencepiece        renumbered by frequency

The kinds byte, bpe and unigram encode any text, and decode it to the same bytes. The kinds char and word encode an
unknown symbol as `<unk>`. If a vocabulary of these kinds has no `<unk>`, an unknown symbol raises DataError, and so
does an unknown name in the kind listed. The base classes are in base.py, and training is in training.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import decode_text, has_mark, parse_object, read_bytes
from txl_dist.tokenizers.base import FORMAT_VERSION, Tokenizer
from txl_dist.tokenizers.characters import ByteTokenizer, CharTokenizer
from txl_dist.tokenizers.folders import tokenizer_of_folder
from txl_dist.tokenizers.foreign import HuggingFaceTokenizer, SentencePieceTokenizer
from txl_dist.tokenizers.listed import ListedTokenizer
from txl_dist.tokenizers.subwords import BpeTokenizer, UnigramTokenizer
from txl_dist.tokenizers.word_tokenizer import WordTokenizer

_CLASSES: tuple[type[Tokenizer], ...] = (
    ByteTokenizer,
    CharTokenizer,
    WordTokenizer,
    ListedTokenizer,
    BpeTokenizer,
    UnigramTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
KINDS: dict[str, type[Tokenizer]] = {tokenizer_class.kind: tokenizer_class for tokenizer_class in _CLASSES}
"""Classes of tokenizers by the `kind` in the file. A plugin can add kinds (`plugins.register_tokenizer`)."""
_REMEDY = "Give a tokenizer.json that `txl prepare` wrote, or prepare the corpus again."


class UnknownKindError(ValueError):
    """Error for a kind of tokenizer that neither this package nor a loaded plugin has."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError with the file's name if it is missing, damaged or of another format."""
    return read_tokenizer(tokenizer_bytes(path), name=str(path))


def tokenizer_bytes(path: str | Path, *, remedy: str = _REMEDY) -> bytes:
    """Return the content of a tokenizer's file, of any kind, from the file itself or the folder that contains it.

    A byte order mark is removed. Raises DataError with `remedy` if the tokenizer cannot be read.
    """
    path = Path(path)
    with translate_errors(DataError, f"cannot read the tokenizer {path}", remedy, of=(OSError, UnicodeDecodeError)):
        if path.is_dir():
            content = tokenizer_of_folder(path)
        else:
            content = read_bytes(path)
        if has_mark(content):
            return decode_text(content).encode()
        return content


def read_tokenizer(content: bytes, *, name: str) -> Tokenizer:
    """Build a tokenizer from the content of a tokenizer.json. `name` is the file's name in messages.

    Raises DataError if the content is damaged or of another format version.
    """
    with translate_errors(DataError, f"the tokenizer {name} is not valid JSON", _REMEDY, of=(ValueError,)):
        values = parse_object(content)
    try:
        if values["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"the tokenizer {name} has format version {values['format_version']}, but this version of txl_dist "
                f"reads format version {FORMAT_VERSION}. Prepare the corpus again, or use the version of txl_dist that "
                "prepared it."
            )
        return build_tokenizer(values)
    except UnknownKindError as error:
        raise DataError(f"the tokenizer {name} cannot be read: {error}.") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the tokenizer {name} is damaged ({type(error).__name__}: {error}). {_REMEDY}") from error


def build_tokenizer(values: dict[str, Any]) -> Tokenizer:
    """Build a tokenizer from the values of its file. Raises ValueError or KeyError if the values are inconsistent."""
    if values["kind"] not in KINDS:
        raise UnknownKindError(
            f"unknown kind {values['kind']!r}. Known kinds are {', '.join(KINDS)}. If a plugin adds this "
            "kind, load the plugin with --plugins NAME (for training: --run.plugins NAME)"
        )
    try:
        return KINDS[values["kind"]].from_values(values)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error  # the library tokenizers raises nothing more particular
