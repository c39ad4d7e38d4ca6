"""Rule that says which token ids begin a word, so that whole words can be predicted together (XLNet)."""

from __future__ import annotations

import string

import numpy as np
import numpy.typing as npt

from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.characters import ByteTokenizer, CharTokenizer
from txl_dist.tokenizers.word_tokenizer import WordTokenizer

_MARKS = ("\u2581", "\u0120", "\u010a", "\u0109", " ", "\n", "\t")
"""Characters with which SentencePiece, byte-level tokenizers and texts mark the beginning of a word."""


def word_starts(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return for each token id whether it begins a word. The shape is [vocab_size].

    A piece of a subword tokenizer begins a word if it begins with a blank or an ASCII punctuation mark, as in XLNet's
    code. If no piece begins with a blank, this rule is not used. In that case, and for tokenizers of bytes, characters
    and words, every token begins a word.
    """
    starts = np.ones(tokenizer.vocab_size, dtype=bool)
    if isinstance(tokenizer, ByteTokenizer | CharTokenizer | WordTokenizer):
        return starts
    has_blank = False
    for i, symbol in enumerate(tokenizer.symbols):
        begins_blank = symbol.startswith(_MARKS)
        has_blank = has_blank or begins_blank
        starts[i] = begins_blank or symbol.startswith(tuple(string.punctuation))
    if not has_blank:
        starts.fill(True)
    return starts
