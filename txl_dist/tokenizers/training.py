"""Makes a tokenizer from the training split: choose the symbols, count them, number them by frequency.

Id 0 is the most frequent symbol of the training split: adaptive softmax cuts the vocabulary at ids, so an id must say
how frequent its symbol is. That holds for end-of-text too: it is as frequent as there are documents. Ties fall by the
symbol itself, so that the same text gives the same ids on every machine.

The texts are read once (byte, char, word) or twice (bpe, unigram: to learn the pieces, then to count what they
produce) and never held in memory, so `texts` is a function that starts a new pass. The result depends on nothing but
the texts and the arguments. Empty texts are no documents and are ignored.

What it gives up: unigram holds the suffixes of all distinct words while it learns; and what bpe and unigram learn is
the library's business, so that another version of it may learn other pieces.
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
"""Those of lm1b."""
BATCH_LEN = 1 << 20
"""Characters that are encoded at once."""


def train_tokenizer(kind: str, texts: Texts, **settings: Any) -> Tokenizer:
    """A tokenizer for the texts; the settings are the fields of `Learning`.

    `vocab_size` is the largest number of ids, all marks included: 0 means 4,096 for bpe and unigram and no limit for
    word; byte and char have the size they have. `min_frequency` is the fewest occurrences of a word, or of a BPE
    merge. Without `end_of_text` documents join without a mark, as the peers join theirs. `only_seen` gives byte and
    char no id for what the texts do not hold, and no `<unk>`. A word vocabulary always has its symbol for unknown
    words, which held-out text may need: where the text itself spells it, as WikiText and PTB do, it is that one.
    `sentence_marks` are lm1b's: `<S>` on both sides of each line, and `<UNK>`.
    Raises ConfigError for an impossible size or a setting that the kind does not have, DataError without text.
    """
    learning = Learning(**settings)
    learning.check_kind(kind)
    only_seen, end_of_text, min_frequency = learning.only_seen, learning.end_of_text, learning.min_frequency
    marks = SENTENCE_MARKS if learning.sentence_marks else PLAIN_MARKS
    num_marks = learning.num_marks(kind)
    max_size = learning.vocab_size - num_marks if learning.vocab_size else 0
    documents = CountedTexts(texts, lower_case=learning.lower_case)
    if (learn := LEARNT_KINDS[kind].learn) is not None:
        return _checked(learn(documents, learning), kind)
    values: dict[str, Any] = {"lower_case": learning.lower_case, "only_seen": only_seen, **marks}
    if kind == "byte":
        counts = _count_bytes(documents, only_seen=only_seen)
    elif kind == "char":
        values["unknown"] = None if only_seen else UNKNOWN
        counts = ({} if only_seen else {UNKNOWN: 0}) | Counter(chain.from_iterable(documents))
    elif kind == "word":
        # These spellings in a text are no words of their own: they count as the unknown.
        refused = {marks["unknown"]} | ({END_OF_TEXT} if end_of_text else set())
        counts = _count_words(documents, marks, refused, max_size=max_size, min_frequency=min_frequency)
    elif kind == "bpe":
        size = max_size or DEFAULT_SUBWORDS - num_marks
        counts, values["merges"] = _learn_bpe(documents, size=size, min_frequency=min_frequency)
    else:
        counts, values["scores"] = _learn_unigram(documents, size=max_size or DEFAULT_SUBWORDS - num_marks)
    if end_of_text:
        # Its literal spelling in a text was never counted as the symbol.
        counts |= {END_OF_TEXT: documents.count}
    return _number(kind, counts, values, end_of_text=end_of_text)


def _checked(tokenizer: Any, kind: str) -> Tokenizer:
    """Return a plugin's tokenizer. Raises ConfigError if it is of another kind, or not equal after it is read back."""
    if not isinstance(tokenizer, Tokenizer) or tokenizer.kind != kind:
        raise ConfigError(
            f"the plugin's tokenizer {kind!r} is a {type(tokenizer).__name__}: learn must return a Tokenizer of that "
            "kind. Correct the plugin."
        )
    again = read_tokenizer(tokenizer.to_json().encode(), name=f"{kind} of a plugin")
    if again.to_json() != tokenizer.to_json():
        raise ConfigError(
            f"the plugin's tokenizer {kind!r} reads another tokenizer from its own file. Correct its from_values."
        )
    return tokenizer


class CountedTexts:
    """Texts without the empty ones; `count` is their number in the last pass. Raises DataError if there is none."""

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
            raise DataError("there is no text to make a tokenizer from. Check the inputs and the split.")


def _number(kind: str, counts: dict[str, int], values: dict[str, Any], *, end_of_text: bool = False) -> Tokenizer:
    """The tokenizer with its ids in order of frequency; scores by symbol become a list, end-of-text having none."""
    symbols = by_frequency(counts)
    mark = symbols.index(END_OF_TEXT) if end_of_text else None
    scores = {"scores": [values["scores"].get(symbol) for symbol in symbols]} if "scores" in values else {}
    return build_tokenizer({**values, **scores, "kind": kind, "symbols": symbols, "end_of_text": mark})


def _count_bytes(texts: Iterable[str], *, only_seen: bool) -> dict[str, int]:
    total: npt.NDArray[np.int64] = np.zeros(256, dtype=np.int64)
    for text in texts:
        content = text.encode("utf-8", errors="surrogateescape")
        total += np.bincount(np.frombuffer(content, dtype=np.uint8), minlength=256)
    counts = zip(byte_symbols(), total.tolist(), strict=True)
    return {symbol: count for symbol, count in counts if count or not only_seen}


def _count_words(
    texts: Iterable[str], marks: dict[str, Any], refused: set[str], *, max_size: int, min_frequency: int
) -> dict[str, int]:
    start, end = marks["line_start"], marks["line_end"]
    words = Counter(chain.from_iterable(split_words(text, line_start=start, line_end=end) for text in texts))
    total = words.total()
    counts = {mark: words.pop(mark, 0) for mark in {start, end} - {None}}
    for spelling in refused:
        del words[spelling]
    counts |= most_frequent(words, max_size=max_size, min_frequency=min_frequency)
    return counts | {marks["unknown"]: total - sum(counts.values())}


def _learn_bpe(texts: CountedTexts, *, size: int, min_frequency: int) -> tuple[dict[str, int], list[str]]:
    """Counts by symbol, and the merges."""
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
    # A first numbering only serves to count.
    first = _number("bpe", model["vocab"], {"merges": merges})
    return dict(zip(first.symbols, count_ids(first, texts).tolist(), strict=True)), merges


def _learn_unigram(texts: CountedTexts, *, size: int) -> tuple[dict[str, int], dict[str, float]]:
    """Counts and scores by symbol; what the library leaves to the order of its hash tables is taken out."""
    from tokenizers.models import Unigram
    from tokenizers.trainers import UnigramTrainer

    trainer = UnigramTrainer(
        vocab_size=size, initial_alphabet=list(byte_symbols()), special_tokens=[], show_progress=False
    )
    scores: dict[str, float] = dict(_learn(Unigram(), trainer, texts)["vocab"])
    # Bytes that it did not learn get the lowest score plus 0.0001 for each before them, in any order; and sums of
    # probabilities differ in their last digits.
    lowest = min(scores.values())
    unlearnt = {symbol for symbol in byte_symbols() if scores[symbol] < lowest + 0.0001 * 256}
    scores = {symbol: round(lowest if symbol in unlearnt else score, 6) for symbol, score in scores.items()}
    first = _number("unigram", dict.fromkeys(scores, 0), {"scores": scores})
    return dict(zip(first.symbols, count_ids(first, texts).tolist(), strict=True)), scores


def _learn(model: Any, trainer: Any, texts: CountedTexts) -> dict[str, Any]:
    library = byte_level(model)
    library.train_from_iterator(chain.from_iterable(map(cut_pieces, texts)), trainer)
    learnt: dict[str, Any] = json.loads(library.to_str())["model"]
    return learnt


def count_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> npt.NDArray[np.int64]:
    """[V] int64: how often each id occurs in the texts."""
    total: npt.NDArray[np.int64] = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for batch in batches(texts, most_characters=BATCH_LEN):
        for ids in tokenizer.encode_batch(batch):
            total += np.bincount(ids, minlength=tokenizer.vocab_size)
    return total


def by_frequency(counts: Mapping[str, int]) -> list[str]:
    """The symbols, the most frequent one first, equally frequent ones in code point order."""
    return sorted(counts, key=lambda symbol: (-counts[symbol], symbol))


def most_frequent(counts: Mapping[str, int], *, max_size: int, min_frequency: int) -> dict[str, int]:
    """At most `max_size` symbols (0: no limit) that occur `min_frequency` times or more."""
    ranked = [symbol for symbol in by_frequency(counts) if counts[symbol] >= min_frequency]
    return {symbol: counts[symbol] for symbol in (ranked[:max_size] if max_size else ranked)}
