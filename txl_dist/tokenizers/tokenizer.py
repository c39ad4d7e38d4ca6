"""The door to the tokenizers: what there is, and how one is read from its file.

    byte, char         one id per byte or code point                      characters.py
    word               one id per word between blanks, `<eos>`, `<unk>`   words.py
    listed             ready ids, each with a name                        listed.py
    bpe, unigram       byte-level pieces learnt from the corpus           subwords.py
    huggingface,       tokenizers that others made, their ids             foreign.py
    sentencepiece        renumbered by frequency

byte, bpe and unigram encode any text and give it back exactly; char and word know `<unk>`, or refuse what they do
not know, as listed does. What all share is in base.py, training in training.py.
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
KINDS: dict[str, type[Tokenizer]] = {each.kind: each for each in _CLASSES}
"""By the `kind` in the file; a plugin may add rows (`plugins.register_tokenizer`)."""
_REMEDY = "Give a tokenizer.json that `txl prepare` wrote, or prepare the corpus again."


class UnknownKindError(ValueError):
    """A tokenizer of a kind that this process does not know."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError naming the file if it is missing, damaged or of another format."""
    return read_tokenizer(tokenizer_bytes(path), name=str(path))


def tokenizer_bytes(path: str | Path, *, remedy: str = _REMEDY) -> bytes:
    """Read a tokenizer of any kind, a file or the folder that holds it; text without its byte order mark.

    Raises DataError.
    """
    with translate_errors(DataError, f"cannot read the tokenizer {path}", remedy, of=(OSError, UnicodeDecodeError)):
        content = tokenizer_of_folder(Path(path)) if Path(path).is_dir() else read_bytes(Path(path))
        return decode_text(content).encode() if has_mark(content) else content


def read_tokenizer(content: bytes, *, name: str) -> Tokenizer:
    """The tokenizer in the bytes of a tokenizer.json. Raises DataError as `load_tokenizer` does."""
    with translate_errors(DataError, f"the tokenizer {name} is not valid JSON", _REMEDY, of=(ValueError,)):
        values = parse_object(content)
    try:
        if values["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"the tokenizer {name} has format version {values['format_version']}, this program reads "
                f"{FORMAT_VERSION}. Prepare the corpus again, or use the program that wrote it."
            )
        return build_tokenizer(values)
    except UnknownKindError as error:
        raise DataError(f"the tokenizer {name} cannot be read: {error}.") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the tokenizer {name} is damaged ({type(error).__name__}: {error}). {_REMEDY}") from error


def build_tokenizer(values: dict[str, Any]) -> Tokenizer:
    """A tokenizer from the values of its file. Raises ValueError or KeyError if they contradict themselves."""
    if values["kind"] not in KINDS:
        raise UnknownKindError(
            f"unknown kind {values['kind']!r}, known are {', '.join(KINDS)}; one of a plugin needs the plugin, by "
            "--plugins NAME (for training: --run.plugins NAME)"
        )
    try:
        return KINDS[values["kind"]].from_values(values)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error  # the library tokenizers raises nothing more particular
