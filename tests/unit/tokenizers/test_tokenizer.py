"""Properties of all tokenizers: exact round trips, ids by frequency, one file, and no accidental end-of-text token."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import ALPHABET, random_text, random_texts
from txl_dist.errors import ConfigError, DataError
from txl_dist.tokenizers.base import END_OF_TEXT, Tokenizer
from txl_dist.tokenizers.characters import CharTokenizer
from txl_dist.tokenizers.subwords import cut_pieces
from txl_dist.tokenizers.tokenizer import load_tokenizer
from txl_dist.tokenizers.training import train_tokenizer
from txl_dist.tokenizers.word_tokenizer import WordTokenizer

KINDS = ("byte", "char", "word", "bpe", "unigram")
TEXTS = [*random_texts(count=40), "the cat sat on the mat\n" * 20, "the <unk> cat\n"]


def make(kind: Any, texts: list[str] = TEXTS) -> Tokenizer:
    return train_tokenizer(kind, lambda: texts, vocab_size=300 if kind in ("bpe", "unigram") else 0)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: make(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram"])
def test_any_unicode_text_comes_back_exactly(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    generator = random.Random(1)
    everything = [chr(p) for p in range(0x110000) if not 0xD800 <= p < 0xE000]
    for _ in range(50):
        text = "".join(generator.choices(everything, k=50)) + random_text(generator, length=50)
        assert tokenizers[kind].decode(tokenizers[kind].encode(text)) == text


def test_seen_characters_come_back_and_others_become_one_replacement_each(tokenizers: dict[str, Tokenizer]) -> None:
    text = random_text(random.Random(2), length=300)
    char = tokenizers["char"]
    assert char.decode(char.encode(text)) == text
    assert char.decode(char.encode("t\u3042e\U0001f680")) == "t\ufffde\ufffd"


def test_words_carry_line_ends_and_unknown_words(tokenizers: dict[str, Tokenizer]) -> None:
    word = tokenizers["word"]
    assert word.decode(word.encode("the  cat\n\n neverseen <unk>")) == "the cat \n\n<unk> <unk> \n"
    assert len(word.encode("")) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_in_descending_frequency_with_end_of_text_among_them(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    counts = np.bincount(np.concatenate(tokenizer.encode_batch(TEXTS)), minlength=tokenizer.vocab_size)
    assert counts[tokenizer.end_of_text] == 0
    counts[tokenizer.end_of_text] = len(TEXTS)
    assert (np.diff(counts) <= 0).all()
    ties = [(a, b) for i, (a, b) in enumerate(itertools.pairwise(tokenizer.symbols)) if counts[i] == counts[i + 1]]
    assert all(a < b for a, b in ties)


@pytest.mark.parametrize("kind", KINDS)
def test_end_of_text_is_never_encoded_from_its_spelling(kind: str) -> None:
    texts = [f"a {END_OF_TEXT} b{END_OF_TEXT}"] * 30
    tokenizer = make(kind, texts)
    assert tokenizer.end_of_text not in tokenizer.encode(texts[0])
    assert END_OF_TEXT in tokenizer.decode([tokenizer.end_of_text])


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_loads_equal_and_its_fingerprint_is_the_hash_of_the_file(
    tokenizers: dict[str, Tokenizer], kind: str, tmp_path: Path
) -> None:
    tokenizer = tokenizers[kind]
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    assert loaded.to_json() == tokenizer.to_json()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == loaded.fingerprint
    assert (loaded.kind, loaded.vocab_size, loaded.end_of_text) == (kind, tokenizer.vocab_size, tokenizer.end_of_text)
    for text in TEXTS:
        assert np.array_equal(loaded.encode(text), tokenizer.encode(text))


@pytest.mark.parametrize("kind", KINDS)
def test_training_twice_gives_the_same_tokenizer(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert make(kind).fingerprint == tokenizers[kind].fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_batches_encode_as_texts_do(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    for text, ids in zip(["", *TEXTS], tokenizers[kind].encode_batch(["", *TEXTS]), strict=True):
        assert np.array_equal(ids, tokenizers[kind].encode(text))


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_pieces_join_to_the_decoded_text_even_for_broken_utf8(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    generator = random.Random(3)
    for _ in range(50):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(40)]
        assert "".join(tokenizer.decode_stream(ids)) == tokenizer.decode(ids)


def test_a_character_is_streamed_only_when_its_last_byte_is_there(tokenizers: dict[str, Tokenizer]) -> None:
    byte = tokenizers["byte"]
    assert list(byte.decode_stream(byte.encode("a\u4e2db"))) == ["a", "\u4e2d", "b"]


def test_byte_has_all_bytes_whatever_was_seen() -> None:
    assert make("byte", ["a"]).vocab_size == 257


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_subwords_keep_to_their_size_and_compress(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert tokenizers[kind].vocab_size == 300
    assert len(tokenizers[kind].encode("the cat sat on the mat")) < 15


def test_word_vocabulary_is_cut_by_size_and_frequency() -> None:
    texts = ["a a a a b b b c c d\n"]
    small = train_tokenizer("word", lambda: texts, vocab_size=5)
    assert sorted(small.symbols) == sorted(["a", "b", "<unk>", "<eos>", END_OF_TEXT])
    frequent = train_tokenizer("word", lambda: texts, min_frequency=3)
    assert Counter(frequent.symbols) == Counter(small.symbols)


def test_pieces_join_to_the_text_and_end_at_lines_then_blanks_then_anywhere() -> None:
    generator = random.Random(4)
    for _ in range(200):
        text = random_text(generator, length=generator.randint(0, 60), alphabet="ab \n")
        pieces = cut_pieces(text, piece_len=7)
        assert "".join(pieces) == text
        assert all(0 < len(piece) <= 7 for piece in pieces)
    assert cut_pieces("ab\ncd\nef", piece_len=7) == ["ab\ncd\n", "ef"]
    assert cut_pieces("ab cd efgh", piece_len=7) == ["ab cd", " efgh"]
    assert cut_pieces("abcdefghi", piece_len=7) == ["abcdefg", "hi"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_long_text_in_one_line_comes_back(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    text = random_text(random.Random(5), length=150_000, alphabet=ALPHABET.replace("\n", ""))
    assert tokenizers[kind].decode(tokenizers[kind].encode(text)) == text


def test_a_damaged_foreign_or_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    good, unigram = (json.loads(make(kind).to_json()) for kind in ("byte", "unigram"))
    cases = [
        "{",
        "[]",
        "{}",
        json.dumps(good | {"format_version": 99}),
        json.dumps(good | {"kind": "sentencepiece"}),
        json.dumps(good | {"end_of_text": 999}),
        json.dumps(good | {"symbols": good["symbols"][1:]}),
        json.dumps(good | {"symbols": good["symbols"][:-1]}),
        json.dumps(unigram | {"scores": unigram["scores"][1:]}),
        json.dumps(unigram | {"scores": [None, *unigram["scores"][1:]]}),
        json.dumps({"format_version": 1, "kind": "huggingface", "content": "{}", "foreign_ids": [], "end_of_text": 0}),
    ]
    for content in cases:
        path.write_text(content)
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            load_tokenizer(path)
    with pytest.raises(DataError, match=r"nowhere\.json"):
        load_tokenizer(tmp_path / "nowhere.json")


def test_impossible_requests_are_refused() -> None:
    for kind in KINDS:
        with pytest.raises(DataError, match="no text"):
            make(kind, ["", ""])
    with pytest.raises(ConfigError, match="257"):
        train_tokenizer("bpe", lambda: TEXTS, vocab_size=100)
    with pytest.raises(ConfigError, match="no meaning"):
        train_tokenizer("char", lambda: TEXTS, vocab_size=100)


def test_a_prompt_of_words_does_not_end_its_line_and_its_continuation_stands_apart() -> None:
    tokenizer = train_tokenizer("word", lambda: ["one two\nthree"])
    whole = tokenizer.encode("one two").tolist()
    assert tokenizer.encode_prompt("one two").tolist() == whole[:-1]
    assert tokenizer.encode_prompt("one two\n").tolist() == whole
    assert tokenizer.encode_prompt("").tolist() == []
    assert [tokenizer.joint(text) for text in ("one", "one ", "one\n", "")] == [" ", "", "", ""]


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "unigram"])
def test_a_prompt_of_any_other_kind_is_its_text(kind: str) -> None:
    tokenizer = train_tokenizer(kind, lambda: ["one two\nthree"])
    assert tokenizer.encode_prompt("one two").tolist() == tokenizer.encode("one two").tolist()
    assert tokenizer.joint("one") == ""


def test_files_without_the_newer_settings_keep_their_bytes_and_fingerprints(
    tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    texts = ["the cat\n"]
    assert make("word", texts).to_json() == (
        '{"end_of_text":1,"format_version":1,"kind":"word","symbols":["<eos>","<|endoftext|>","cat","the","<unk>"]}'
    )
    extras = {"bpe": {"merges"}, "unigram": {"scores"}}
    for kind, tokenizer in tokenizers.items():
        keys = {"format_version", "kind", "symbols", "end_of_text"} | extras.get(kind, set())
        assert set(json.loads(tokenizer.to_json())) == keys


SYMBOLS = ["<S>", "</S>", "<UNK>", "a", "b", "The"]
SETTINGS: list[dict[str, Any]] = [
    {"line_start": "<S>", "line_end": "<S>", "unknown": "<UNK>"},
    {"line_start": "<S>", "line_end": "</S>", "unknown": None},
    {"line_end": None, "unknown": "<UNK>", "lower_case": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_words_survive_the_file_and_are_in_it_only_where_they_differ(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = WordTokenizer(SYMBOLS, end_of_text=None, **settings)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode("a b\nb").tolist() == tokenizer.encode("a b\nb").tolist()
    written = json.loads(tokenizer.to_json())
    assert written["end_of_text"] is None
    assert set(written) - {"format_version", "kind", "symbols", "end_of_text"} == set(settings)


def test_marks_stand_before_and_behind_each_line_and_show_as_one_newline_behind_it() -> None:
    both = WordTokenizer(SYMBOLS, end_of_text=None, **SETTINGS[0])
    assert both.encode("a b\n\nc").tolist() == [0, 3, 4, 0, 0, 0, 0, 2, 0]
    assert both.encode_prompt("a b").tolist() == [0, 3, 4]
    assert both.encode("").tolist() == []
    apart = WordTokenizer(SYMBOLS, end_of_text=None, **SETTINGS[1])
    assert apart.encode("a b\nThe\n").tolist() == [0, 3, 4, 1, 0, 5, 1]
    assert apart.decode(apart.encode("a b\nThe\n")) == "a b \nThe \n"
    without = WordTokenizer(SYMBOLS, end_of_text=None, **SETTINGS[2])
    assert without.encode("a B\n\nThe").tolist() == [3, 4, 2]
    assert without.encode_prompt("a b").tolist() == [3, 4]


def test_without_a_symbol_for_the_unknown_it_is_refused_by_name() -> None:
    word = WordTokenizer(SYMBOLS, end_of_text=None, **SETTINGS[1])
    with pytest.raises(DataError, match="word 'c'"):
        word.encode("a b\na c")
    char = CharTokenizer(["a", "\u4e2d"], end_of_text=None, unknown=None)
    assert char.encode("a\u4e2da").tolist() == [0, 1, 0]
    for character in ("b", "\x00", "\U0001f680"):
        with pytest.raises(DataError, match="character"):
            char.encode(f"a{character}")
    assert CharTokenizer(["a", "<unk>"], end_of_text=None, lower_case=True).encode("Ab").tolist() == [0, 1]


def test_a_tokenizer_without_end_of_text_encodes_its_literal_spelling_as_any_word() -> None:
    tokenizer = WordTokenizer([END_OF_TEXT, "a"], end_of_text=None, line_end=None, unknown=None)
    assert tokenizer.encode(f"a {END_OF_TEXT}").tolist() == [1, 0]


def test_settings_that_name_no_symbol_make_a_damaged_file(tmp_path: Path) -> None:
    good = json.loads(WordTokenizer(SYMBOLS, end_of_text=None, **SETTINGS[0]).to_json())
    path = tmp_path / "tokenizer.json"
    for change in ({"line_start": "<s>"}, {"line_end": "<eos>"}, {"unknown": "<unk>"}, {"line_end": 3}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(DataError, match=r"tokenizer\.json is damaged"):
            load_tokenizer(path)
