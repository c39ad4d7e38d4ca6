"""Learned tokenizers: the conventions of other codes, exactly the symbols of the text, and independence of hash
order."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import random_texts
from txl_dist.errors import ConfigError, DataError
from txl_dist.tokenizers.base import END_OF_TEXT
from txl_dist.tokenizers.characters import CharTokenizer
from txl_dist.tokenizers.subwords import UnigramTokenizer
from txl_dist.tokenizers.tokenizer import build_tokenizer
from txl_dist.tokenizers.training import train_tokenizer
from txl_dist.tokenizers.word_tokenizer import WordTokenizer, split_words

TEXT = " \n = The Cat = \n \n the <unk> cat , the mat \n the\u00a0end\tcat\n" * 3 + "one dog <unk> \n a\n"


def original_counts(text: str, *, lower_case: bool) -> Counter[str]:
    """The Vocab of kimiyoung/transformer-xl: each line stripped and split, `<eos>` behind it."""
    counts: Counter[str] = Counter()
    for line in text.removesuffix("\n").split("\n"):
        line = line.strip()
        counts.update([*(line.lower() if lower_case else line).split(), "<eos>"])
    return counts


@pytest.mark.parametrize("lower_case", [False, True])
def test_words_are_counted_as_the_peers_count_them(lower_case: bool) -> None:
    theirs = original_counts(TEXT, lower_case=lower_case)
    tokenizer = train_tokenizer("word", lambda: [TEXT], end_of_text=False, lower_case=lower_case)
    assert tokenizer.end_of_text is None
    assert list(tokenizer.symbols) == sorted(theirs, key=lambda word: (-theirs[word], word))
    ids = tokenizer.encode(TEXT)
    assert len(ids) == theirs.total()
    assert np.bincount(ids).tolist() == [theirs[word] for word in tokenizer.symbols]


def test_words_are_limited_by_size_and_frequency_with_every_mark_counted() -> None:
    theirs = original_counts(TEXT, lower_case=False)
    frequent = train_tokenizer("word", lambda: [TEXT], end_of_text=False, min_frequency=3)
    assert set(frequent.symbols) == {word for word, count in theirs.items() if count >= 3} | {"<eos>", "<unk>"}
    for size in (3, 5, 7):
        assert train_tokenizer("word", lambda: [TEXT], end_of_text=False, vocab_size=size).vocab_size == size
    assert train_tokenizer("word", lambda: [TEXT], vocab_size=7).vocab_size == 7


def test_the_unknown_has_an_id_even_if_nothing_was_unknown() -> None:
    tokenizer = train_tokenizer("word", lambda: ["a b\n"], end_of_text=False)
    assert tokenizer.symbols == ("<eos>", "a", "b", "<unk>")
    assert tokenizer.encode("c").tolist() == [3, 0]


def test_sentence_marks_stand_on_both_sides_and_are_counted_so() -> None:
    tokenizer = train_tokenizer("word", lambda: ["a a\nb <UNK>\n"], double_eos=True, end_of_text=False)
    assert tokenizer.symbols == ("<S>", "a", "<UNK>", "b")
    assert tokenizer.encode("b c\n").tolist() == [0, 3, 2, 0]


def test_a_literal_end_of_text_is_a_word_of_its_own_where_there_is_no_such_mark() -> None:
    tokenizer = train_tokenizer("word", lambda: [f"{END_OF_TEXT} a\n"], end_of_text=False)
    assert tokenizer.end_of_text is None
    assert tokenizer.decode(tokenizer.encode(END_OF_TEXT)) == f"{END_OF_TEXT} \n"


def test_only_the_newline_ends_a_line() -> None:
    text = "a\x0bb\x0cc\u2028d\x85e\rf\r\ng"
    assert list(split_words(text)) == ["a", "b", "c", "d", "e", "f", "<eos>", "g", "<eos>"]
    assert list(split_words("\n\na\n")) == ["<eos>", "<eos>", "a", "<eos>"]
    assert list(split_words("")) == []


def test_words_of_a_long_text_are_never_a_list() -> None:
    text = "one two three four\n" * 100_000
    tokenizer = train_tokenizer("word", lambda: [text])
    tracemalloc.start()
    ids = tokenizer.encode(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(ids) == 500_000
    assert peak < 3 * ids.nbytes  # a list of words takes over ten times as much


def test_only_seen_bytes_have_ids_and_others_are_refused_by_name() -> None:
    texts = ["abba", "a\xe9"]
    tokenizer = train_tokenizer("byte", lambda: texts, observed_symbols=True, end_of_text=False)
    assert tokenizer.vocab_size == 4
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    with pytest.raises(DataError, match=r"byte '0x63' is not in the vocabulary"):
        tokenizer.encode("abc")
    assert build_tokenizer({"kind": "byte", "only_seen": True, "symbols": ["a"], "end_of_text": None}).vocab_size == 1
    with pytest.raises(ValueError, match="byte 0 has no symbol"):
        build_tokenizer({"kind": "byte", "symbols": ["a"], "end_of_text": None})


@pytest.mark.parametrize("observed_symbols", [False, True])
def test_bytes_that_are_no_utf8_are_encoded_as_they_were(observed_symbols: bool) -> None:
    content = bytes(range(256)) + "caf\u00e9 \u4e2d".encode() + b"\xe4\xb8"
    text = content.decode("utf-8", errors="surrogateescape")
    tokenizer = train_tokenizer("byte", lambda: [text], observed_symbols=observed_symbols)
    assert tokenizer.spellings is not None
    ids = tokenizer.encode(text).tolist()
    assert b"".join(tokenizer.spellings[i] for i in ids) == content
    assert tokenizer.decode(ids) == content.decode("utf-8", errors="replace")
    counts = np.bincount(ids, minlength=tokenizer.vocab_size)
    assert tokenizer.end_of_text is not None
    counts[tokenizer.end_of_text] = 1
    assert (np.diff(counts) <= 0).all()


def test_only_seen_characters_leave_no_place_for_the_unknown() -> None:
    tokenizer = train_tokenizer("char", lambda: ["Hello"], observed_symbols=True, end_of_text=False)
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.symbols == ("l", "H", "e", "o")
    with pytest.raises(DataError, match="character 'x'"):
        tokenizer.encode("Hex")
    lower = train_tokenizer("char", lambda: ["Hello"], observed_symbols=True, end_of_text=False, lower_case=True)
    assert lower.decode(lower.encode("HELLO")) == "hello"


def test_every_kind_can_do_without_end_of_text() -> None:
    for kind in ("byte", "char", "word", "bpe", "unigram"):
        tokenizer = train_tokenizer(kind, lambda: random_texts(count=5), end_of_text=False)
        assert tokenizer.end_of_text is None
        assert END_OF_TEXT not in tokenizer.symbols
        again = build_tokenizer({**tokenizer._values(), "kind": kind, "end_of_text": None})
        assert again.fingerprint == tokenizer.fingerprint


def test_unigram_learns_the_same_whatever_the_order_of_hash_tables() -> None:
    texts = random_texts(count=200, seed=8)
    found = {train_tokenizer("unigram", lambda: texts, vocab_size=500).fingerprint for _ in range(4)}
    assert len(found) == 1


def test_unigram_takes_the_most_probable_pieces() -> None:
    texts = ["low lower lowest new newer newest " * 20 + "".join(random.Random(1).choices("lowernst ", k=400))]
    tokenizer = train_tokenizer("unigram", lambda: texts, vocab_size=300)
    assert isinstance(tokenizer, UnigramTokenizer)
    score_of = {s: score for s, score in zip(tokenizer.symbols, tokenizer.scores, strict=True) if score is not None}

    def best(word: str) -> float:
        least = [0.0] + [-np.inf] * len(word)
        for end in range(1, len(word) + 1):
            options = (least[start] + score_of.get(word[start:end], -np.inf) for start in range(end))
            least[end] = max(options)
        return least[-1]

    for word in ("lowest", "newer", "slower", "stonewe"):
        pieces = [tokenizer.symbols[i] for i in tokenizer.encode(word)]
        assert "".join(pieces) == word
        assert sum(score_of[piece] for piece in pieces) == pytest.approx(best(word))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("byte", {"vocab_size": 300}, "vocab_size has no meaning"),
    ("byte", {"min_frequency": 2}, "min_frequency has no meaning"),
    ("char", {"min_frequency": 2}, "min_frequency has no meaning"),
    ("unigram", {"min_frequency": 2}, "min_frequency has no meaning"),
    ("byte", {"lower_case": True}, "lower_case has no meaning for a byte tokenizer, only for char and word"),
    ("bpe", {"lower_case": True}, "lower_case has no meaning"),
    ("word", {"observed_symbols": True}, "observed_symbols has no meaning"),
    ("bpe", {"observed_symbols": True}, "observed_symbols has no meaning"),
    ("char", {"double_eos": True}, "double_eos has no meaning"),
    ("word", {"vocab_size": 3}, "needs 4 or more"),
    ("word", {"vocab_size": 2, "end_of_text": False}, "needs 3 or more"),
    ("unigram", {"vocab_size": 256}, "needs 257 or more"),
    ("bpe", {"vocab_size": 255, "end_of_text": False}, "needs 256 or more"),
    ("word", {"min_frequency": 0}, "must be 1 or more"),
    ("word", {"vocab_size": -1}, "must be 0 or more"),
    ("syllable", {}, "Choose one of byte, char, word, bpe, unigram"),
]


@pytest.mark.parametrize(("kind", "settings", "expected"), REFUSED)
def test_settings_that_a_kind_does_not_have_are_refused_not_ignored(
    kind: Any, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        train_tokenizer(kind, lambda: ["a b c d e f g\n"], **settings)


def test_a_word_tokenizer_names_the_first_word_that_it_refuses() -> None:
    tokenizer = WordTokenizer(["a", "b"], end_of_text=None, line_end=None, unknown=None)
    with pytest.raises(DataError, match="word 'd'"):
        tokenizer.encode("a b\nb d c")
