"""A vocabulary of another code becomes a tokenizer with the same ids, marks and unknown word, or an error that names
the file."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from txl_dist.convert.safe_unpickle import read_any
from txl_dist.convert.vocabulary import identity_tokenizer, read_vocabulary, tokenizer_of
from txl_dist.errors import CheckpointError, DataError
from txl_dist.tokenizers.base import END_OF_TEXT
from txl_dist.tokenizers.subwords import BpeTokenizer
from txl_dist.tokenizers.training import train_tokenizer
from txl_dist.tokenizers.word_tokenizer import WordTokenizer

SYMBOLS = ["<eos>", "the", "<unk>", "cat", "The"]
SENTENCES = ["<S>", "</S>", "<UNK>", "the", "cat"]


class Vocab:
    """The fields of the original's class."""

    def __init__(self, symbols: list[str], *, lower_case: bool = False, delimiter: str | None = None) -> None:
        self.counter = Counter({symbol: 3 for symbol in symbols})
        self.special = ["<eos>"]
        self.min_freq, self.max_size, self.vocab_file = 0, None, None
        self.lower_case, self.delimiter = lower_case, delimiter
        self.idx2sym = symbols
        self.sym2idx = OrderedDict((symbol, i) for i, symbol in enumerate(symbols))


class Corpus:
    """What the original caches."""

    def __init__(self, vocab: Vocab) -> None:
        self.dataset, self.vocab, self.train = "wt103", vocab, torch.arange(9)


class OpenAIVocab:
    """The fields of NVIDIA's class."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.EOT, self.max_size = tokenizer, 1, None


class GPT2Tokenizer:
    """The fields of the class of pytorch_transformers."""

    def __init__(self, encoder: dict[str, int], ranks: dict[Any, int], added: dict[str, int]) -> None:
        self.encoder, self.bpe_ranks, self.added_tokens_encoder = encoder, ranks, added


@pytest.fixture(autouse=True)
def _classes_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = {
        "vocabulary": (Vocab, OpenAIVocab),
        "data_utils": (Corpus,),
        "pytorch_transformers": (GPT2Tokenizer,),
    }
    for home, kinds in homes.items():
        module = ModuleType(home)
        for kind in kinds:
            monkeypatch.setattr(kind, "__module__", home)
            setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, home, module)


def write_text(path: Path, symbols: list[str]) -> Path:
    path.write_text("".join(f"{symbol} 17\n" for symbol in symbols), encoding="utf-8")
    return path


def write_pickle(path: Path, content: Any) -> Path:
    path.write_bytes(pickle.dumps(content))
    return path


def write_torch(path: Path, content: Any, *, is_zip: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    return path


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_every_way(folder: Path, symbols: list[str]) -> list[Path]:
    vocab = Vocab(symbols)
    ids = vocab.sym2idx
    return [
        write_text(folder / "vocab.txt", symbols),
        write_json(folder / "list.json", symbols),
        write_json(folder / "ids.json", ids),
        write_pickle(folder / "vocab.pkl", vars(vocab)),
        write_pickle(folder / "object.pkl", vocab),
        write_pickle(folder / "only_ids.pkl", {"sym2idx": ids}),
        write_pickle(folder / "only_symbols.pkl", {"idx2sym": symbols}),
        write_pickle(folder / "no_suffix", dict(ids)),
        write_torch(folder / "cache.pt", Corpus(vocab)),
        write_torch(folder / "cache_legacy.pt", Corpus(vocab), is_zip=False),
        write_torch(folder / "vocab.bin", vars(vocab), is_zip=False),
        write_torch(folder / "checkpoint_last.pt", {"model_state": {}, "vocab": vocab}),
    ]


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_every_kind_of_file_gives_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizers = [read_vocabulary(path, vocab_size=5) for path in write_every_way(tmp_path, SYMBOLS)]
    assert {tokenizer.fingerprint for tokenizer in tokenizers} == {tokenizers[0].fingerprint}
    tokenizer = tokenizers[0]
    assert tokenizer.symbols == tuple(SYMBOLS)
    assert tokenizer.end_of_text is None
    assert tokenizer.encode("the cat sat\n\nThe").tolist() == [1, 3, 2, 0, 0, 4, 0]


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_vocabulary_of_sentences_has_its_mark_on_both_sides_of_each_line(tmp_path: Path) -> None:
    for path in write_every_way(tmp_path, SENTENCES):
        tokenizer = read_vocabulary(path, vocab_size=5)
        assert tokenizer.encode("the cat\nsat\n").tolist() == [0, 3, 4, 0, 0, 2, 0]
        assert tokenizer.encode_prompt("the").tolist() == [0, 3]


def test_without_marks_and_unknown_word_lines_do_not_count_and_other_words_are_refused(tmp_path: Path) -> None:
    tokenizer = read_vocabulary(write_text(tmp_path / "vocab.txt", ["60", "10", "a"]), vocab_size=3)
    assert tokenizer.encode("60 a\n\n10 60\n").tolist() == [0, 2, 1, 0]
    with pytest.raises(DataError, match="'61'"):
        tokenizer.encode("60 61")


def test_lower_case_is_taken_from_the_object(tmp_path: Path) -> None:
    vocab = Vocab(["<eos>", "the", "<unk>"], lower_case=True)
    tokenizer = read_vocabulary(write_pickle(tmp_path / "vocab.pkl", vocab), vocab_size=3)
    assert tokenizer.encode("The THE\n").tolist() == [1, 1, 0]


def test_characters_stay_characters_in_lists_and_where_nothing_delimits_them(tmp_path: Path) -> None:
    paths = [
        write_json(tmp_path / "list.json", ["b", " ", "a", "\n", "\u4e2d"]),
        write_json(tmp_path / "ids.json", {"a": 2, "b": 0, " ": 1, "\u4e2d": 4, "\n": 3}),
        write_pickle(tmp_path / "vocab.pkl", Vocab(["b", " ", "a", "\n", "\u4e2d"], delimiter="")),
    ]
    for path in paths:
        tokenizer = read_vocabulary(path, vocab_size=5)
        assert tokenizer.kind == "char"
        assert tokenizer.encode("ab \u4e2d\n").tolist() == [2, 0, 1, 4, 3]
        assert tokenizer.decode([2, 0, 1, 4, 3]) == "ab \u4e2d\n"
        with pytest.raises(DataError, match="'c'"):
            tokenizer.encode("abc")
    known = read_vocabulary(write_json(tmp_path / "unknown.json", ["b", "<unk>"]), vocab_size=2)
    assert known.encode("bcb").tolist() == [0, 1, 0]


def test_words_of_one_character_are_words_where_the_file_is_one_of_words(tmp_path: Path) -> None:
    paths = [
        write_text(tmp_path / "vocab.txt", ["_", "a", "b"]),
        write_pickle(tmp_path / "vocab.pkl", Vocab(["_", "a", "b"])),
    ]
    for path in paths:
        assert read_vocabulary(path, vocab_size=3).encode("a b _ a\n").tolist() == [1, 2, 0, 1]


def test_a_text_file_may_begin_like_json_and_repeats_take_no_id(tmp_path: Path) -> None:
    path = write_text(tmp_path / "vocab.txt", ["[", "a", "[", "{", "a", "b"])
    assert read_vocabulary(path, vocab_size=4).symbols == ("[", "a", "{", "b")
    (tmp_path / "windows.txt").write_bytes(b"a 1\r\nb 2\r\n")
    assert read_vocabulary(tmp_path / "windows.txt", vocab_size=2).symbols == ("a", "b")


def test_our_own_file_is_read_as_it_is(tmp_path: Path) -> None:
    ours = train_tokenizer("word", lambda: ["the cat\nthe dog\n"])
    ours.save(tmp_path / "tokenizer.json")
    read = read_vocabulary(tmp_path / "tokenizer.json", vocab_size=ours.vocab_size)
    assert read.fingerprint == ours.fingerprint
    with pytest.raises(DataError, match=r"tokenizer\.json has 6 symbols, but the model has 7"):
        read_vocabulary(tmp_path / "tokenizer.json", vocab_size=7)


# --- GPT-2's byte-level BPE, as NVIDIA's code keeps it


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    tokenizer = train_tokenizer("bpe", lambda: ["the cat sat on the mat\n" * 9], vocab_size=270)
    assert isinstance(tokenizer, BpeTokenizer)
    return tokenizer


def openai_vocab(bpe: BpeTokenizer, **changes: Any) -> OpenAIVocab:
    encoder = {symbol: i for i, symbol in enumerate(bpe.symbols)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(bpe.merges)}
    added = {"madeupword000000000": len(encoder)}
    fields: dict[str, Any] = {"encoder": encoder, "ranks": ranks, "added": added, **changes}
    return OpenAIVocab(GPT2Tokenizer(**fields))


def test_a_bpe_inside_a_vocab_gives_the_same_ids_with_its_padding_and_end_of_text(
    bpe: BpeTokenizer, tmp_path: Path
) -> None:
    path = write_torch(tmp_path / "checkpoint_best.pt", {"vocab": openai_vocab(bpe)})
    size = bpe.vocab_size + 1
    tokenizer = tokenizer_of(read_any(path)["vocab"], where=f"{path}: vocab", vocab_size=size)
    assert read_vocabulary(path, vocab_size=size).fingerprint == tokenizer.fingerprint
    assert tokenizer.symbols == (*bpe.symbols, "madeupword000000000")
    assert tokenizer.end_of_text == bpe.end_of_text
    for text in ("the cat sat", "caf\u00e9 \u4e2d\n", END_OF_TEXT):
        assert tokenizer.encode(text).tolist() == bpe.encode(text).tolist()
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_bpe_with_missing_bytes_merges_or_ids_is_refused(bpe: BpeTokenizer, tmp_path: Path) -> None:
    encoder = {symbol: i for i, symbol in enumerate(bpe.symbols)}
    without_a = {symbol: i for i, symbol in enumerate(symbol for symbol in bpe.symbols if symbol != "a")}
    size = bpe.vocab_size + 1
    cases: list[dict[str, Any]] = [
        {"added": {"madeupword000000000": size}},
        {"added": {"two words": size - 1}},
        {"encoder": without_a, "added": {}},
        {"encoder": None},
        {"ranks": {("t", "q"): 0}},
        {"ranks": {("t", "h"): 1}},
        {"ranks": {"th": 0}},
        {"encoder": {**encoder, b"bytes": size - 1}, "added": {}},
    ]
    for changes in cases:
        path = write_pickle(tmp_path / "bad.pkl", openai_vocab(bpe, **changes))
        with pytest.raises(DataError, match=r"bad\.pkl"):
            read_vocabulary(path, vocab_size=size)


# --- errors


def test_another_size_than_the_models_is_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocab\.txt has 5 symbols, but the model has 7"):
        read_vocabulary(write_text(tmp_path / "vocab.txt", SYMBOLS), vocab_size=7)


def test_damaged_contradictory_and_foreign_vocabularies_are_named(tmp_path: Path) -> None:
    contradictory = Vocab(["a", "b"])
    contradictory.idx2sym = ["b", "a"]
    (tmp_path / "blank.txt").write_text("a\n\nb\n")
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9\nb\n".encode("latin1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "broken.json").write_text("[1,")
    (tmp_path / "cut.pkl").write_bytes(pickle.dumps(vars(Vocab(["a", "b"])))[:-9])
    (tmp_path / "folder.txt").mkdir()
    write_json(tmp_path / "twice.json", ["a", "a"])
    write_json(tmp_path / "hole.json", {"a": 0, "b": 2})
    write_json(tmp_path / "shared.json", {"a": 0, "b": 0})
    write_json(tmp_path / "numbers.json", [1, 2])
    write_json(tmp_path / "settings.json", {"n_layer": "two"})
    write_json(tmp_path / "ours.json", {"kind": "word", "symbols": ["a", "b"]})
    write_json(tmp_path / "number.json", 2)
    write_pickle(tmp_path / "contradictory.pkl", contradictory)
    write_pickle(tmp_path / "repeated.pkl", {"idx2sym": ["a", "a"]})
    write_pickle(tmp_path / "delimited.pkl", Vocab(["a", "b"], delimiter=","))
    write_pickle(tmp_path / "several.pkl", Vocab(["a", "<eos>"], delimiter=""))
    write_pickle(tmp_path / "no_text.pkl", {"idx2sym": ["a", None]})
    write_pickle(tmp_path / "no_list.pkl", {"idx2sym": "ab"})
    write_pickle(tmp_path / "no_dict.pkl", {"sym2idx": ["a", "b"]})
    write_pickle(tmp_path / "nothing.pkl", None)
    write_torch(tmp_path / "weights.pt", {"word_emb": torch.ones(2)})
    names = sorted(path.name for path in tmp_path.iterdir())
    for name in [*names, "missing.txt", "missing.pkl"]:
        with pytest.raises((DataError, CheckpointError)) as raised:
            read_vocabulary(tmp_path / name, vocab_size=2)
        assert name in str(raised.value)


def test_a_vocabulary_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.pkl").write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path / "marker") + b"'\ntR.")
    with pytest.raises(CheckpointError, match=r"vocab\.pkl contains os\.system"):
        read_vocabulary(tmp_path / "vocab.pkl", vocab_size=2)
    assert not (tmp_path / "marker").exists()


def test_without_a_vocabulary_the_words_are_the_ids() -> None:
    tokenizer = identity_tokenizer(20)
    assert isinstance(tokenizer, WordTokenizer)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (20, None)
    assert tokenizer.encode("17 4\n0\n").tolist() == [17, 4, 0]
    assert tokenizer.encode_prompt("17 4").tolist() == [17, 4]
    assert tokenizer.decode([17, 4, 0]) == "17 4 0 "
    with pytest.raises(DataError, match="'20'"):
        tokenizer.encode("20")
