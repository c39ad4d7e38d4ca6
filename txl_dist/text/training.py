"""Makes a tokenizer from the training split: choose the symbols, count them, number them by frequency.

The texts are read once (byte, char, word) or twice (bpe: to learn the merges, then to count what they produce) and
never held in memory, so `texts` is a function that starts a new pass. The result depends on nothing but the texts
and the arguments. Empty texts are no documents and are ignored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from txl_dist.errors import ConfigError, DataError
from txl_dist.text.tokenizer import (
    END_OF_LINE,
    END_OF_TEXT,
    UNKNOWN,
    Tokenizer,
    TokenizerKind,
    build_tokenizer,
    byte_symbols,
    cut_pieces,
    split_words,
)
from txl_dist.text.vocab import by_frequency, most_frequent

Texts = Callable[[], Iterable[str]]

DEFAULT_BPE_SIZE = 4096
BATCH_LEN = 1 << 20
"""Characters that are encoded at once."""


def train_tokenizer(kind: TokenizerKind, texts: Texts, *, vocab_size: int = 0, min_frequency: int = 1) -> Tokenizer:
    """A tokenizer for the texts.

    `vocab_size` is the largest number of ids, end-of-text included: 0 means 4,096 for bpe and no limit for word;
    byte and char have the size they have. `min_frequency` is the fewest occurrences of a word, or of a BPE merge.
    Raises ConfigError for an impossible size and DataError if there is no text.
    """
    if kind not in get_args(TokenizerKind):
        raise ConfigError(f"unknown tokenizer {kind!r}; choose one of {', '.join(get_args(TokenizerKind))}.")
    if kind in ("byte", "char") and vocab_size:
        raise ConfigError(f"vocab_size={vocab_size} has no meaning for a {kind} tokenizer; leave it out.")
    if min_frequency < 1:
        raise ConfigError(f"min_frequency={min_frequency} must be 1 or more; 1 keeps everything.")
    smallest = {"byte": 0, "char": 0, "word": 4, "bpe": 257}[kind]
    if vocab_size and vocab_size < smallest:
        raise ConfigError(f"vocab_size={vocab_size} is too small: a {kind} tokenizer needs {smallest} or more.")
    documents = _CountedTexts(texts)
    values: dict[str, Any] = {"kind": kind}
    if kind == "byte":
        counts = _count_bytes(documents)
    elif kind == "char":
        counts = {UNKNOWN: 0, **Counter(chain.from_iterable(documents))}
    elif kind == "word":
        counts = _count_words(documents, vocab_size=vocab_size, min_frequency=min_frequency)
    else:
        counts, values["merges"] = _learn_bpe(
            documents, vocab_size=vocab_size or DEFAULT_BPE_SIZE, min_frequency=min_frequency
        )
    if not documents.count:
        raise DataError("there is no text to train a tokenizer on. Check the inputs and the split.")
    # A literal <|endoftext|> in the text was never counted as the symbol: here its count is that of the documents.
    return _number({**counts, END_OF_TEXT: documents.count}, values)


class _CountedTexts:
    """Texts without the empty ones; `count` is their number in the last pass."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        self.count = 0
        for text in self._texts():
            if text:
                self.count += 1
                yield text


def _number(counts: dict[str, int], values: dict[str, Any]) -> Tokenizer:
    symbols = by_frequency(counts)
    return build_tokenizer({**values, "symbols": symbols, "end_of_text": symbols.index(END_OF_TEXT)})


def _count_bytes(texts: Iterable[str]) -> dict[str, int]:
    total: npt.NDArray[np.int64] = np.zeros(256, dtype=np.int64)
    for text in texts:
        total += np.bincount(np.frombuffer(text.encode("utf-8"), dtype=np.uint8), minlength=256)
    return dict(zip(byte_symbols(), total.tolist(), strict=True))


def _count_words(texts: Iterable[str], *, vocab_size: int, min_frequency: int) -> dict[str, int]:
    words = Counter(chain.from_iterable(map(split_words, texts)))
    total = words.total()
    lines = words.pop(END_OF_LINE, 0)
    # These spellings in a text are no words of their own: they count as <unk>.
    del words[UNKNOWN], words[END_OF_TEXT]
    # Three places are taken: end-of-text, <eos>, and <unk> for every occurrence that has no id of its own.
    kept = most_frequent(words, max_size=vocab_size - 3 if vocab_size else 0, min_frequency=min_frequency)
    return {**kept, END_OF_LINE: lines, UNKNOWN: total - lines - sum(kept.values())}


def _learn_bpe(texts: Iterable[str], *, vocab_size: int, min_frequency: int) -> tuple[dict[str, int], list[str]]:
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    library = LibraryTokenizer(BPE())
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,  # end-of-text is not the library's business
        min_frequency=min_frequency,
        initial_alphabet=list(byte_symbols()),
        special_tokens=[],
        show_progress=False,
    )
    library.train_from_iterator(chain.from_iterable(map(cut_pieces, texts)), trainer)
    model = json.loads(library.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    # A first numbering only serves to count.
    first = _number({**model["vocab"], END_OF_TEXT: 0}, {"kind": "bpe", "merges": merges})
    total: npt.NDArray[np.int64] = np.zeros(first.vocab_size, dtype=np.int64)
    for batch in batches_of_text(texts):
        for ids in first.encode_batch(batch):
            total += np.bincount(ids, minlength=first.vocab_size)
    return dict(zip(first.symbols, total.tolist(), strict=True)), merges


def batches_of_text(texts: Iterable[str], *, batch_len: int = BATCH_LEN) -> Iterator[list[str]]:
    """Lists of consecutive texts, each list closed once it holds `batch_len` characters."""
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= batch_len:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
