"""Imported tokenizers keep their behaviour, and only their ids change, to the order of frequency. No text becomes a
special token."""

from __future__ import annotations

import base64
import builtins
import io
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordLevelTrainer, WordPieceTrainer

from tests.helpers.corpora import random_texts, tiny_corpus
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.errors import DataError
from txl_dist.tokenizers.base import END_OF_TEXT, Tokenizer
from txl_dist.tokenizers.foreign import ENDS_OF_DOCUMENT, HuggingFaceTokenizer
from txl_dist.tokenizers.importing import import_tokenizer, open_tokenizer
from txl_dist.tokenizers.subwords import PIECE_LEN
from txl_dist.tokenizers.tokenizer import load_tokenizer
from txl_dist.tokenizers.training import train_tokenizer

PROSE = "the cat sat on the mat and the dog saw the cat , didn't it ? caf\u00e9 \u4e2d\u6587 12 345 \n"
TEXTS = [*random_texts(count=30, seed=4), PROSE * 10, "a <s> b </s> c [SEP] d [UNK] f"]


def gpt2(*, special: tuple[str, ...] = (END_OF_TEXT, "<pad>"), add_prefix_space: bool = False) -> Library:
    library = Library(BPE(dropout=0.5))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXTS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False)
    )
    library.add_tokens(["<tool>"])
    library.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A {special[-1]}",
        special_tokens=[(token, library.token_to_id(token)) for token in {special[0], special[-1]}],
    )
    library.enable_truncation(5)
    library.enable_padding(length=100)
    return library


def bert() -> Library:
    library = Library(WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    library.train_from_iterator(TEXTS, WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    return library


def t5() -> Library:
    """Its special tokens are pieces of the model too, so text could be cut into them."""
    library = Library(Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    return library


def llama() -> Library:
    """Byte fallback, and a blank put before each text."""
    library = Library(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = (word for text in TEXTS for word in text.split())
    library.train_from_iterator(words, BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    values = json.loads(library.to_str())
    values["added_tokens"] = values["added_tokens"][:3]  # the bytes are ordinary tokens
    return Library.from_str(json.dumps(values))


def words() -> Library:
    library = Library(WordLevel(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<unk>", "<s>", "</s>", "[SEP]"]
    library.train_from_iterator(TEXTS, WordLevelTrainer(special_tokens=special, show_progress=False))
    return library


PIPELINES: dict[str, Callable[[], Library]] = {"gpt2": gpt2, "bert": bert, "t5": t5, "llama": llama, "words": words}


def sentencepiece_model(**settings: Any) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=400, minloglevel=2, **settings
    )
    return model.getvalue()


MODELS: dict[str, dict[str, Any]] = {
    "spm": {"hard_vocab_limit": False},
    "spm_bytes": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": [END_OF_TEXT, "<tool>"]},
}
ALL = [*PIPELINES, *MODELS]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreign")
    paths = {name: folder / f"{name}.json" for name in PIPELINES} | {name: folder / f"{name}.model" for name in MODELS}
    for name, make in PIPELINES.items():
        make().save(str(paths[name]))
    for name, settings in MODELS.items():
        paths[name].write_bytes(sentencepiece_model(**settings))
    return paths


@pytest.fixture(scope="module")
def tokenizers(files: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: import_tokenizer(path, lambda: TEXTS) for name, path in files.items()}


def theirs(path: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str], Callable[[int], str]]:
    """What their library makes of the file by itself: encode, decode, symbol of an id."""
    if path.suffix == ".model":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return processor.encode, processor.decode, processor.id_to_piece
    values = json.loads(path.read_text(encoding="utf-8"))
    values |= {"truncation": None, "padding": None}
    values["model"]["dropout"] = None
    library = Library.from_str(json.dumps(values))
    return (
        lambda text: library.encode(text, add_special_tokens=False).ids,
        lambda ids: library.decode(ids, skip_special_tokens=False),
        library.id_to_token,
    )


def gpt2_of_2019() -> Library:
    library = Library(BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings: dict[str, Any] = {"initial_alphabet": alphabet, "special_tokens": [END_OF_TEXT], "show_progress": False}
    library.train_from_iterator(TEXTS, BpeTrainer(vocab_size=400, **settings))
    return library


@pytest.mark.parametrize("name", list(PIPELINES))
def test_a_file_that_does_not_name_the_type_of_its_model_is_read_as_the_one_that_does(
    name: str, files: dict[str, Path], tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    values = json.loads(files[name].read_text(encoding="utf-8"))
    del values["model"]["type"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    untyped = import_tokenizer(tmp_path / "tokenizer.json", lambda: TEXTS)
    assert untyped.symbols == tokenizers[name].symbols
    assert (untyped.is_lossless, untyped.unknown_id) == (tokenizers[name].is_lossless, tokenizers[name].unknown_id)
    for text in ORDINARY:
        assert untyped.encode(text).tolist() == tokenizers[name].encode(text).tolist()
    untyped.save(tmp_path / "ours.json")
    assert load_tokenizer(tmp_path / "ours.json").fingerprint == untyped.fingerprint


def test_a_folder_stands_for_the_tokenizer_in_it(files: dict[str, Path], tmp_path: Path) -> None:
    library = gpt2_of_2019()
    for number, (name, path) in enumerate(files.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copy(path, folder / ("tokenizer.json" if path.suffix == ".json" else "spiece.model"))
        (folder / "config.json").write_text("{}")
        assert open_tokenizer(folder).fingerprint == open_tokenizer(path).fingerprint, name
    library.save(str(tmp_path / "whole.json"))
    expected = open_tokenizer(tmp_path / "whole.json")
    old = tmp_path / "old"
    old.mkdir()
    library.model.save(str(old))  # vocab.json, merges.txt
    cache = tmp_path / "models--gpt2" / "snapshots" / "607a30d"
    shutil.copytree(old, cache)
    for path in (old / "vocab.json", old / "merges.txt"):
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    for folder in (old, cache, cache.parents[1]):
        found = open_tokenizer(folder)
        assert found.symbols == expected.symbols
        assert found.is_lossless
        assert found.end_of_text == expected.end_of_text
        for text in ORDINARY:
            assert found.encode(text).tolist() == expected.encode(text).tolist()


def test_a_corpus_is_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, texts=["ab", "ba"], valid_fraction=0.0)
    again = prepare_corpus(
        tmp_path / "again", inputs=[tmp_path / "corpus.jsonl"], tokenizer_path=corpus.folder, valid_fraction=0.0
    )
    assert again.corpus.tokenizer.fingerprint == corpus.tokenizer.fingerprint


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "is a folder without a tokenizer"),
        (["config.json"], "is a folder without a tokenizer"),
        (["a.model", "b.model"], r"several sentencepiece models \(a\.model, b\.model\)"),
        (["vocab.txt"], r"no tokenizer\.json.*save_pretrained"),
        (["vocab.json"], r"no tokenizer\.json.*save_pretrained"),
        (["vocab.json", "merges.txt"], r"vocab\.json is not a vocabulary"),
    ],
)
def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("merges", ["a", "a b c", "a  b", "\u0120 zzz"])
def test_damaged_merges_are_refused(tmp_path: Path, merges: str) -> None:
    gpt2_of_2019().model.save(str(tmp_path))
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"merges\.txt is not a list of merges"):
        open_tokenizer(tmp_path)


ORDINARY = ["", "the cat", "Didn't THEY see?", PROSE, " \n\n  two  blanks ", "\U0001f680 \u0416\u4e2d", *TEXTS[:31]]


@pytest.mark.parametrize("name", ALL)
def test_text_is_cut_and_joined_as_their_library_does_it(
    name: str, files: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    encode, decode, symbol = theirs(files[name])
    tokenizer = tokenizers[name]
    for text, ids in zip(ORDINARY, tokenizer.encode_batch(ORDINARY), strict=True):
        expected = encode(text)
        assert ids.dtype == np.int32
        assert [tokenizer.symbols[i] for i in ids] == [symbol(i) for i in expected]
        assert tokenizer.decode(ids) == decode(expected)
        assert np.array_equal(ids, tokenizer.encode(text))
        assert np.array_equal(ids, tokenizer.encode_prompt(text))


@pytest.mark.parametrize("name", ALL)
def test_ids_are_in_order_of_frequency_with_end_of_text_among_them(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    counts = np.bincount(np.concatenate(tokenizer.encode_batch(TEXTS)), minlength=tokenizer.vocab_size)
    assert tokenizer.end_of_text is not None
    assert counts[tokenizer.end_of_text] == 0
    counts[tokenizer.end_of_text] = len(TEXTS)
    assert (np.diff(counts) <= 0).all()
    assert tokenizer.symbols.count(END_OF_TEXT) == 1
    has_own = name in ("gpt2", "spm_bytes")
    assert (-1 in json.loads(tokenizer.to_json())["foreign_ids"]) == (not has_own)


@pytest.mark.parametrize("name", ALL)
def test_the_saved_file_holds_all_that_is_needed(name: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizers[name].save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizers[name])
    assert loaded.fingerprint == tokenizers[name].fingerprint
    for text in ORDINARY:
        assert np.array_equal(loaded.encode(text), tokenizers[name].encode(text))
    # Bringing one of ours is bringing it unchanged.
    again = import_tokenizer(tmp_path / "tokenizer.json", lambda: ["other text"])
    assert again.fingerprint == loaded.fingerprint


@pytest.mark.parametrize("name", ALL)
def test_the_spelling_of_a_special_token_is_text(
    name: str, files: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    special = {END_OF_TEXT, "<pad>", "<s>", "</s>", "[SEP]", "[CLS]", "[PAD]"}
    spelled = ["x ".join(special), "".join(sorted(special)), *special, f"the cat{END_OF_TEXT}sat"]
    forbidden = {i for i, symbol in enumerate(tokenizer.symbols) if symbol in special}
    assert tokenizer.end_of_text in forbidden
    for text in spelled:
        ids = tokenizer.encode(text)
        assert not forbidden & set(ids.tolist())
        if name in ("gpt2", "spm_bytes"):
            assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("name", ALL)
def test_streamed_pieces_join_to_the_decoded_text_of_each_document(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.end_of_text is not None
    ids: list[int] = []
    for text in ORDINARY:
        ids += [*tokenizer.encode(text).tolist(), tokenizer.end_of_text]
    ids += tokenizer.encode(PROSE).tolist()
    pieces = list(tokenizer.decode_stream(ids))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len(pieces) > 100
    assert tokenizer.decode(ids).count(END_OF_TEXT) == len(ORDINARY)


@pytest.mark.parametrize("name", ALL)
def test_a_continuation_reads_as_it_would_behind_its_prompt(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.end_of_text is not None
    whole = tokenizer.encode("the cat sat on the mat").tolist()
    for cut in range(1, len(whole)):
        shown = tokenizer.decode(whole[:cut])
        after = [tokenizer.end_of_text, *whole[:cut]]
        assert shown + "".join(tokenizer.decode_stream(whole[cut:], after=after)) == tokenizer.decode(whole)


def test_a_character_of_several_ids_is_streamed_once_it_is_whole(tokenizers: dict[str, Tokenizer]) -> None:
    for name in ("gpt2", "llama", "spm_bytes"):
        ids = tokenizers[name].encode("a\U0001f680b").tolist()
        assert len(ids) >= 5
        pieces = list(tokenizers[name].decode_stream(ids))
        assert "\ufffd" not in "".join(pieces)
        assert any("\U0001f680" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("name", "is_cut"), [("gpt2", True), ("bert", True), ("words", True), ("t5", False), ("llama", False)]
)
def test_long_texts_are_cut_only_where_no_id_changes(
    name: str, is_cut: bool, files: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    generator = random.Random(3)
    vocabulary = [*PROSE.split(" "), "\n\n", "", " ", "Zebra", "a", "\u0416"]
    text = " ".join(generator.choices(vocabulary, k=60_000))
    pieces = tokenizer._cut(text)
    assert (len(pieces) > 1) == is_cut
    assert "".join(pieces) == text
    assert all(PIECE_LEN < len(piece) < PIECE_LEN + 1000 for piece in pieces[:-1]) or not is_cut
    encode, _, symbol = theirs(files[name])
    assert [tokenizer.symbols[i] for i in tokenizer.encode(text)] == [symbol(i) for i in encode(text)]


def gpt4() -> Library:
    """Splits by a regular expression of its own, in sequence with the byte alphabet."""
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    library = gpt2()
    from tokenizers import Regex

    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return library


def whole_lines() -> Library:
    library = gpt2()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return library


def with_lookbehind() -> Library:
    from tokenizers import Regex

    library = gpt2()
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?<=a) | "), behavior="isolated")
    return library


def with_wide_token() -> Library:
    library = gpt2()
    library.add_tokens([AddedToken("New York")])
    return library


@pytest.mark.parametrize(
    ("make", "is_cut"), [(gpt4, True), (whole_lines, False), (with_lookbehind, False), (with_wide_token, False)]
)
def test_a_pipeline_that_sees_across_words_is_not_cut(make: Callable[[], Library], is_cut: bool) -> None:
    tokenizer = HuggingFaceTokenizer.in_foreign_order(make().to_str())
    assert (len(tokenizer._cut("New York is a town. " * 5000)) > 1) == is_cut


def test_a_special_token_that_is_sought_in_normalised_text_is_not_found_either() -> None:
    library = bert()
    library.add_special_tokens([AddedToken("<|stop|>", normalized=True)])
    tokenizer = HuggingFaceTokenizer.in_foreign_order(library.to_str())
    ids = tokenizer.encode("the cat <|STOP|> sat").tolist()
    assert tokenizer.symbols.index("<|stop|>") not in ids
    assert len(ids) > 6


@pytest.mark.parametrize("end", ENDS_OF_DOCUMENT)
def test_a_files_own_end_of_a_document_is_end_of_text(end: str, tmp_path: Path) -> None:
    """Without it an id is added, and the vocabulary no longer fits a model of that tokenizer."""
    library = gpt2(special=(end, "<pad>"))
    library.save(str(tmp_path / "tokenizer.json"))
    opened = open_tokenizer(tmp_path / "tokenizer.json")
    assert opened.vocab_size == library.get_vocab_size(with_added_tokens=True)
    assert opened.end_of_text == library.token_to_id(end)
    by_frequency = import_tokenizer(tmp_path / "tokenizer.json", lambda: TEXTS)
    assert by_frequency.end_of_text is not None
    assert by_frequency.symbols[by_frequency.end_of_text] == end
    for tokenizer in (opened, by_frequency):
        ids = tokenizer.encode(f"the {end} cat").tolist()
        assert tokenizer.end_of_text not in ids, "its spelling is text"
        assert tokenizer.decode([*ids, tokenizer.end_of_text]) == f"the {end} cat{end}"
        tokenizer.save(tmp_path / "ours.json")
        assert load_tokenizer(tmp_path / "ours.json").fingerprint == tokenizer.fingerprint


def test_of_several_ends_of_a_document_the_first_in_the_list_is_taken(tmp_path: Path) -> None:
    gpt2(special=("<eod>", END_OF_TEXT)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.end_of_text is not None
    assert tokenizer.symbols[tokenizer.end_of_text] == END_OF_TEXT


def test_equally_frequent_ids_keep_their_foreign_order(files: dict[str, Path]) -> None:
    tokenizer = import_tokenizer(files["bert"], lambda: ["the"])
    foreign = json.loads(tokenizer.to_json())["foreign_ids"]
    assert tokenizer.symbols[0] == "the"
    assert foreign[1] == -1  # end-of-text, once too, behind it
    assert all(a < b for a, b in itertools.pairwise(foreign[2:]))


def test_what_is_no_tokenizer_is_refused_by_name(files: dict[str, Path], tmp_path: Path) -> None:
    broken = {
        "notes.txt": b"some text",
        "empty": b"",
        "list.json": b"[1, 2]",
        "other.json": b'{"model": 3}',
        "cut.json": files["gpt2"].read_bytes()[:-100],
        "cut.model": files["spm"].read_bytes()[:1000],
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} is not a tokenizer"):
            import_tokenizer(tmp_path / name, lambda: TEXTS)
    with pytest.raises(DataError, match=r"nowhere\.json"):
        import_tokenizer(tmp_path / "nowhere.json", lambda: TEXTS)
    with pytest.raises(DataError, match="no text"):
        import_tokenizer(files["gpt2"], lambda: ["", ""])


@pytest.mark.parametrize("name", ["gpt2", "spm"])
def test_a_damaged_permutation_is_refused(name: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    good = json.loads(tokenizers[name].to_json())
    ids, path = good["foreign_ids"], tmp_path / "tokenizer.json"
    changes: list[dict[str, Any]] = [
        {"foreign_ids": ids[1:]},
        {"foreign_ids": ids[:-1]},
        {"foreign_ids": [*ids, ids[0]]},
        {"foreign_ids": [ids[1], *ids[1:]]},
        {"foreign_ids": [*ids, 10**6]},
        {"end_of_text": 0 if good["end_of_text"] else 1},
        {"end_of_text": None},
        {"content": good["content"][:-50]},
    ]
    for change in changes:
        path.write_text(json.dumps(good | change))
        with pytest.raises(DataError, match=r"tokenizer\.json is damaged"):
            load_tokenizer(path)


@pytest.mark.parametrize("content", [b"Once upon a time.\n", b"\x00\x01", b""])
def test_a_text_is_not_taken_for_a_sentencepiece_model(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not a tokenizer of a known kind"):
        import_tokenizer(path, lambda: iter(["a b c"]))


def test_without_the_package_the_error_says_what_to_install(
    files: dict[str, Path], tokenizers: dict[str, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    tokenizers["spm"].save(tmp_path / "tokenizer.json")
    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(DataError, match="pip install sentencepiece"):
        import_tokenizer(files["spm"], lambda: TEXTS)
    with pytest.raises(DataError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_foreign_files_lie_in_ours_as_they_were(files: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    assert json.loads(tokenizers["gpt2"].to_json())["content"] == files["gpt2"].read_text(encoding="utf-8")
    content = json.loads(tokenizers["spm"].to_json())["content"]
    assert base64.b64decode(content) == files["spm"].read_bytes()


def test_our_own_kinds_spell_each_id_and_foreign_ones_need_not(tokenizers: dict[str, Tokenizer]) -> None:
    assert all(tokenizer.spellings is None for tokenizer in tokenizers.values())
    own = train_tokenizer("unigram", lambda: TEXTS, vocab_size=300)
    assert own.spellings is not None
    assert len(own.spellings) == own.vocab_size
