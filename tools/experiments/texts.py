"""The text of a split, byte for byte, for programs that do not use tokens."""

from __future__ import annotations

import hashlib

from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.shards import CorpusIndex, Split
from txl_dist.errors import DataError

END_OF_DOCUMENT = b"\xff"


def marked_text(split: Split) -> bytes:
    """Return the text of a split as compressors get it, with a byte FF in place of each end-of-text token.

    Raises DataError if bits per byte are not defined for the split, or if the text itself contains FF.
    """
    if problem := text_units([split], mask_documents=False).problem:
        raise DataError(f"{problem}: bits per byte need a text and a lossless tokenizer, for example byte.")
    corpus, marks = split.corpus, 0
    parts = list[bytes]()
    for document in split.each_document():
        ids = document.tolist()
        is_ended = ids[-1] == corpus.end_of_text
        parts.append(_spelled(ids[:-1] if is_ended else ids, corpus) + END_OF_DOCUMENT * is_ended)
        marks += is_ended
    text = b"".join(parts)
    if (text.count(END_OF_DOCUMENT), len(text)) != (marks, split.text_bytes + marks):
        raise DataError(
            f"{corpus.name} ({split.name}) has {len(text) - marks:,} bytes, {text.count(END_OF_DOCUMENT) - marks} of "
            f"them FF, but its index says {split.text_bytes:,} bytes of UTF-8. Prepare the corpus again from text."
        )
    return text


def _spelled(ids: list[int], corpus: CorpusIndex) -> bytes:
    spellings = corpus.tokenizer.spellings
    return corpus.tokenizer.decode(ids).encode() if spellings is None else b"".join([spellings[i] for i in ids])


def mark_of_text(text: bytes) -> str:
    """Return the first 12 digits of the text's sha256, which identify the text in rows."""
    return hashlib.sha256(text).hexdigest()[:12]
