"""Training of a tokenizer on the training split: choose the symbols, count them, and number them by frequency.

Id 0 is the most frequent symbol of the training split. Ids are in order of frequency because adaptive softmax cuts the
vocabulary at ids. End-of-text is numbered like any other symbol, with the number of documents as its frequency. Equally
frequent symbols are in code point order, so that the same text gives the same ids on every machine.

The texts are never in memory as a whole. They are read once for byte, char and word. For bpe and unigram they are read
twice, to learn the pieces and then to count them. So `texts` is a function that starts a new pass. The result depends
only on the texts and the arguments. Empty texts do not count as documents.

Limitations: unigram keeps the suffixes of all distinct words in memory. The library `tokenizers` learns bpe and
unigram, so another version of the library can learn other pieces.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from txl_dist.errors import ConfigError, DataError
from txl_dist.tokenizers.base import END_OF_TEXT, UNKNOWN, Tokenizer, batches, byte_symbols
from txl_dist.tokenizers.learning import LEARNT_KINDS, Learning
from txl_dist.tokenizers.subwords import byte_level, cut_pieces
from txl_dist.tokenizers.tokenizer import build_tokenizer, read_tokenizer
from txl_dist.tokenizers.word_tokenizer import END_OF_LINE, split_words

Texts = Callable[[], Iterable[str]]

DEFAULT_SUBWORDS = 4096
PLAIN_MARKS: dict[str, Any] = {"line_start": None, "line_end": END_OF_LINE, "unknown": UNKNOWN}
SENTENCE_MARKS: dict[str, Any] = {"line_start": "<S>", "line_end": "<S>", "unknown": "<UNK>"}
"""Symbols of the corpus lm1b: at the start of each line, at the end of each line, and for unknown words."""
BATCH_LEN = 1 << 20
"""Number of characters that are encoded at once."""


def train_tokenizer(kind: str, texts: Texts, **settings: Any) -> Tokenizer:
    """Train a tokenizer on the texts. The settings are the fields of `Learning`.

    `vocab_size` is the maximum number of ids, all marks included. 0 means 4,096 for bpe and unigram, and no limit for
    word. The kinds byte and char do not use it. `min_frequency` is the minimum number of occurrences of a word, or of a
    BPE merge. Without `end_of_text` documents are joined without a mark, as in other code bases. With
    `observed_symbols` byte and char have no id for symbols that the texts lack, and no `<unk>`.

    A word vocabulary always has a symbol for unknown words, because validation text can contain unknown words. If the
    text itself spells that symbol, as WikiText and PTB do, both share one id. `double_eos` sets the marks of lm1b:
    `<S>` at both ends of each line, and `<UNK>`. Raises ConfigError for an impossible size or a setting that the kind
    does not have, and DataError if there is no text.
    """
    learning = Learning(**settings)
    learning.check_kind(kind)
    only_seen = learning.observed_symbols
    end_of_text = learning.end_of_text
    min_frequency = learning.min_frequency
    if learning.double_eos:
        marks = SENTENCE_MARKS
    else:
        marks = PLAIN_MARKS
    num_marks = learning.num_marks(kind)
    if learning.vocab_size:
        max_size = learning.vocab_size - num_marks
    else:
        max_size = 0
    num_subwords = max_size or DEFAULT_SUBWORDS - num_marks
    documents = CountedTexts(texts, lower_case=learning.lower_case)
    learn = LEARNT_KINDS[kind].learn
    if learn is not None:
        return _check_plugin_tokenizer(learn(documents, learning), kind)
    values: dict[str, Any] = {"lower_case": learning.lower_case, "only_seen": only_seen, **marks}
    counts: dict[str, int]
    if kind == "byte":
        counts = _count_bytes(documents, only_seen=only_seen)
    elif kind == "char":
        if only_seen:
            values["unknown"] = None
        else:
            values["unknown"] = UNKNOWN
        if only_seen:
            counts = {}
        else:
            counts = {UNKNOWN: 0}
        counts |= Counter(chain.from_iterable(documents))
    elif kind == "word":
        # A text's own spellings of these symbols are not words: they count as unknown.
        not_words = {marks["unknown"]}
        if end_of_text:
            not_words.add(END_OF_TEXT)
        counts = _count_words(documents, marks, not_words, max_size=max_size, min_frequency=min_frequency)
    elif kind == "bpe":
        counts, values["merges"] = _learn_bpe(documents, size=num_subwords, min_frequency=min_frequency)
    else:
        counts, values["scores"] = _learn_unigram(documents, size=num_subwords)
    if end_of_text:
        # The literal spelling of end-of-text in a text was never counted as the symbol.
        counts |= {END_OF_TEXT: documents.count}
    return _number(kind, counts, values, end_of_text=end_of_text)


def _check_plugin_tokenizer(tokenizer: Any, kind: str) -> Tokenizer:
    """Return a plugin's tokenizer after checking it.

    Raises ConfigError if the tokenizer is of another kind, or differs after it is written and read again.
    """
    if not isinstance(tokenizer, Tokenizer) or tokenizer.kind != kind:
        raise ConfigError(
            f"the function learn of the plugin's tokenizer {kind!r} returned a {type(tokenizer).__name__}. It must "
            f"return a Tokenizer whose kind is {kind!r}. Correct the plugin."
        )
    again = read_tokenizer(tokenizer.to_json().encode(), name=f"{kind} of a plugin")
    if again.to_json() != tokenizer.to_json():
        raise ConfigError(
            f"the plugin's tokenizer {kind!r} changes when it is written to a file and read again. Correct from_values "
            "of the plugin."
        )
    return tokenizer


class CountedTexts:
    """Texts for training a tokenizer, without empty texts. `count` is the number of texts in the last pass.

    A pass raises DataError at its end if there was no text.
    """

    def __init__(self, texts: Texts, *, lower_case: bool = False) -> None:
        self._texts = texts
        self._lower_case = lower_case
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        self.count = 0
        for text in self._texts():
            if text:
                self.count += 1
                yield text.lower() if self._lower_case else text
        if not self.count:
            raise DataError(
                "there is no text to train a tokenizer on. Check the inputs, and which split each input belongs to."
            )


def _number(kind: str, counts: dict[str, int], values: dict[str, Any], *, end_of_text: bool = False) -> Tokenizer:
    """Build the tokenizer whose ids are in order of frequency. Scores by symbol become a list in the order of ids.

    End-of-text has no score.
    """
    symbols = by_frequency(counts)
    values = {**values, "kind": kind, "symbols": symbols, "end_of_text": None}
    if end_of_text:
        values["end_of_text"] = symbols.index(END_OF_TEXT)
    if "scores" in values:
        values["scores"] = [values["scores"].get(symbol) for symbol in symbols]
    return build_tokenizer(values)


def _count_bytes(texts: Iterable[str], *, only_seen: bool) -> dict[str, int]:
    total: npt.NDArray[np.int64] = np.zeros(256, dtype=np.int64)
    for text in texts:
        content = text.encode("utf-8", errors="surrogateescape")
        total += np.bincount(np.frombuffer(content, dtype=np.uint8), minlength=256)
    counts = {}
    for symbol, count in zip(byte_symbols(), total.tolist(), strict=True):
        if count or not only_seen:
            counts[symbol] = count
    return counts


def _count_words(
    texts: Iterable[str], marks: dict[str, Any], not_words: set[str], *, max_size: int, min_frequency: int
) -> dict[str, int]:
    """Return the counts of line marks, words and the unknown word, by symbol.

    A word counts as the unknown word if it is rare, if it is not among the `max_size` most frequent words, or if it is
    in `not_words`.
    """
    start = marks["line_start"]
    end = marks["line_end"]
    words: Counter[str] = Counter()
    for text in texts:
        words.update(split_words(text, line_start=start, line_end=end))
    total = words.total()
    counts = {mark: words.pop(mark, 0) for mark in {start, end} - {None}}
    for spelling in not_words:
        del words[spelling]
    counts |= most_frequent(words, max_size=max_size, min_frequency=min_frequency)
    num_unknown = total - sum(counts.values())
    return counts | {marks["unknown"]: num_unknown}


def _learn_bpe(texts: CountedTexts, *, size: int, min_frequency: int) -> tuple[dict[str, int], list[str]]:
    """Learn a byte-level BPE. Returns (counts by symbol, merges)."""
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        initial_alphabet=list(byte_symbols()),
        special_tokens=[],
        show_progress=False,
    )
    model = _learn(BPE(), trainer, texts)
    merges = [" ".join(pair) for pair in model["merges"]]
    # The order of ids does not matter for counting.
    counting = _number("bpe", model["vocab"], {"merges": merges})
    return _count_symbols(counting, texts), merges


def _learn_unigram(texts: CountedTexts, *, size: int) -> tuple[dict[str, int], dict[str, float]]:
    """Learn a unigram vocabulary. Returns (counts by symbol, scores by symbol).

    Scores that depend on the order of the library's hash tables are replaced, so that the result is reproducible.
    """
    from tokenizers.models import Unigram
    from tokenizers.trainers import UnigramTrainer

    trainer = UnigramTrainer(
        vocab_size=size, initial_alphabet=list(byte_symbols()), special_tokens=[], show_progress=False
    )
    scores: dict[str, float] = dict(_learn(Unigram(), trainer, texts)["vocab"])
    # The library gives bytes that it did not learn the lowest score, plus 0.0001 for each one before, in any order.
    # And its sums of probabilities differ in their last digits.
    lowest = min(scores.values())
    unlearnt = {symbol for symbol in byte_symbols() if scores[symbol] < lowest + 0.0001 * 256}
    for symbol, score in scores.items():
        scores[symbol] = round(lowest if symbol in unlearnt else score, 6)
    counting = _number("unigram", dict.fromkeys(scores, 0), {"scores": scores})
    return _count_symbols(counting, texts), scores


def _learn(model: Any, trainer: Any, texts: CountedTexts) -> dict[str, Any]:
    """Train a model of the library `tokenizers`, and return the object `model` of the library's tokenizer.json."""
    library = byte_level(model)
    library.train_from_iterator(chain.from_iterable(map(cut_pieces, texts)), trainer)
    learnt: dict[str, Any] = json.loads(library.to_str())["model"]
    return learnt


def _count_symbols(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    counts = count_ids(tokenizer, texts)
    return dict(zip(tokenizer.symbols, counts.tolist(), strict=True))


def count_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> npt.NDArray[np.int64]:
    """Return how often each id occurs in the texts, [V] int64."""
    total: npt.NDArray[np.int64] = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for batch in batches(texts, most_characters=BATCH_LEN):
        for ids in tokenizer.encode_batch(batch):
            total += np.bincount(ids, minlength=tokenizer.vocab_size)
    return total


def by_frequency(counts: Mapping[str, int]) -> list[str]:
    """Return the symbols, the most frequent first. Equally frequent symbols are in code point order."""
    return sorted(counts, key=lambda symbol: (-counts[symbol], symbol))


def most_frequent(counts: Mapping[str, int], *, max_size: int, min_frequency: int) -> dict[str, int]:
    """Return the counts of the `max_size` most frequent symbols that occur `min_frequency` times or more.

    A `max_size` of 0 means no limit.
    """
    ranked = [symbol for symbol in by_frequency(counts) if counts[symbol] >= min_frequency]
    if max_size:
        ranked = ranked[:max_size]
    return {symbol: counts[symbol] for symbol in ranked}
