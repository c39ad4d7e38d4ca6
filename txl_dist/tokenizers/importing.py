"""Imports existing tokenizers: detects the kind of a file, and numbers the ids by their frequency in the given
texts."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

from txl_dist.errors import DataError, translate_errors
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.foreign import ForeignTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from txl_dist.tokenizers.tokenizer import read_tokenizer, tokenizer_bytes
from txl_dist.tokenizers.training import CountedTexts, Texts, count_ids

_SENTENCEPIECE_START = b"\n"
"""First byte of a sentencepiece model: the protocol buffer's field 1, with a length."""


def import_tokenizer(path: str | Path, texts: Texts, *, content: bytes | None = None) -> Tokenizer:
    """Read an existing tokenizer: Hugging Face's tokenizer.json, sentencepiece's .model, or a tokenizer.json of ours.

    The ids of another program's tokenizer are numbered by their frequency in the texts, and equally frequent ids keep
    their order. If that tokenizer has no token that ends a document, such as `<|endoftext|>` or XLNet's `<eod>`,
    an end-of-text is added. A tokenizer of ours is not changed. `content` is the content of the file, if the caller has
    read it. Raises DataError if the file is of another kind or
    damaged, if a package is missing, or if there is no text.
    """
    if content is None:
        content = tokenizer_bytes(path, remedy="Check the path.")
    if _is_ours(content):
        return read_tokenizer(content, name=str(path))
    unordered = _open_foreign(content, name=str(path))
    documents = CountedTexts(texts)
    counts = count_ids(unordered, documents)
    assert unordered.end_of_text is not None
    counts[unordered.end_of_text] = documents.count
    order = np.argsort(-counts, kind="stable")
    foreign_ids = [int(unordered.foreign_ids[i]) for i in order]
    end_of_text = order.tolist().index(unordered.end_of_text)
    return type(unordered)(unordered.content, foreign_ids=foreign_ids, end_of_text=end_of_text)


def open_tokenizer(path: str | Path, *, content: bytes | None = None) -> Tokenizer:
    """Read an existing tokenizer without texts. The ids of another program's tokenizer keep their order.

    `content` is the content of the file, if the caller has read it. Raises DataError if the file is not a tokenizer or
    is damaged, or if a package is missing.
    """
    if content is None:
        content = tokenizer_bytes(path, remedy="Check the path.")
    if _is_ours(content):
        return read_tokenizer(content, name=str(path))
    return _open_foreign(content, name=str(path))


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
    with translate_errors(DataError, f"{name} is not a tokenizer of a known kind", remedy, of=damage):
        if _is_json(content):
            return HuggingFaceTokenizer.in_foreign_order(content.decode("utf-8"))
        if not content.startswith(_SENTENCEPIECE_START):
            raise ValueError("the content is neither JSON nor a sentencepiece model")
        return SentencePieceTokenizer.in_foreign_order(base64.b64encode(content).decode())
