"""Takes a tokenizer that others made: what the file is, how frequent its ids are here, our numbering."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

from txl_dist.errors import DataError, translate_errors
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.foreign import ForeignTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from txl_dist.tokenizers.tokenizer import read_tokenizer, tokenizer_bytes
from txl_dist.tokenizers.training import CountedTexts, Texts, count_ids

_FIRST_OF_A_MODEL = b"\n"
"""A sentencepiece model is a protocol buffer, whose first field is a list: field 1, of a length."""


def import_tokenizer(path: str | Path, texts: Texts) -> Tokenizer:
    """A tokenizer that exists already: Hugging Face's tokenizer.json or sentencepiece's .model, or one of ours.

    A foreign one is given ids in order of frequency in the texts, equally frequent ones in the foreign order, and an
    end-of-text if it has no `<|endoftext|>`. One of ours is taken as it is.
    Raises DataError if the file is neither, or damaged, or needs a package that is missing, or if there is no text.
    """
    content = tokenizer_bytes(path, remedy="Check the path.")
    if _is_ours(content):
        return read_tokenizer(content, name=str(path))
    first = _open_foreign(content, name=str(path))
    documents = CountedTexts(texts)
    counts = count_ids(first, documents)
    assert first.end_of_text is not None
    counts[first.end_of_text] = documents.count
    order = np.argsort(-counts, kind="stable")
    foreign_ids = [int(first.foreign_ids[i]) for i in order]
    return type(first)(first.content, foreign_ids=foreign_ids, end_of_text=order.tolist().index(first.end_of_text))


def open_tokenizer(path: str | Path) -> Tokenizer:
    """The same without texts: a foreign tokenizer keeps the order of its ids. Raises DataError as above."""
    content = tokenizer_bytes(path, remedy="Check the path.")
    read = read_tokenizer if _is_ours(content) else _open_foreign
    return read(content, name=str(path))


def _is_ours(content: bytes) -> bool:
    return _is_json(content) and b'"format_version"' in content and b'"kind"' in content


def _is_json(content: bytes) -> bool:
    return content.lstrip()[:1] == b"{"


def _open_foreign(content: bytes, *, name: str) -> ForeignTokenizer:
    remedy = (
        "Give the tokenizer.json of Hugging Face's library tokenizers, its folder, the .model of a sentencepiece "
        "model, or a tokenizer.json that `txl prepare` wrote."
    )
    damage = (KeyError, TypeError, ValueError, IndexError, AttributeError)
    with translate_errors(DataError, f"{name} is no tokenizer that this program knows", remedy, of=damage):
        if _is_json(content):
            return HuggingFaceTokenizer.in_foreign_order(content.decode("utf-8"))
        if not content.startswith(_FIRST_OF_A_MODEL):
            raise ValueError("it is neither JSON nor a sentencepiece model")
        return SentencePieceTokenizer.in_foreign_order(base64.b64encode(content).decode())
