"""Input without a validation split: the ends of a few documents are used, for any workers, kills and copies."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.helpers.corpora import random_text, write_jsonl
from tests.unit.data.prepare.test_prepare import killed
from txl_dist.data.format import PREPARED_NAME
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare import preparation as job
from txl_dist.data.prepare import run as prepare
from txl_dist.data.prepare import validation_split as held_out
from txl_dist.data.prepare.documents import (
    SHORTEST_TAIL,
    Document,
    Reading,
    content_digest,
    cut_tails,
    pieces_of,
)
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.prepare.validation_split import hold_out
from txl_dist.data.verify.verify import verify_corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.tokenizers.learning import MOST_IDS

WORDS = ("memory", "of", "a", "lane", "is", "the", "last", "that", "it", "read")


def prose(length: int, *, seed: int = 0) -> str:
    """Words, lines and paragraphs."""
    generator = random.Random(seed)
    text = ""
    while len(text) < length:
        text += generator.choice(WORDS) + generator.choices([" ", ". ", "\n", "\n\n"], [20, 3, 2, 1])[0]
    return text[:length]


def content_of(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != PREPARED_NAME
    }


def texts_in(folder: Path, split: str) -> list[str]:
    corpus = open_corpus(folder)
    decode = corpus.tokenizer.decode
    return [decode(document[:-1].tolist()) for document in corpus.split(split).each_document()]


def test_one_text_file_prepares_with_the_documented_command_and_its_end_is_held_out(tmp_path: Path) -> None:
    text = prose(30_000)
    (tmp_path / "my.txt").write_text(text)
    summary = prepare_corpus(tmp_path / "out", inputs=[tmp_path / "my.txt"])
    (train,), (valid,) = texts_in(tmp_path / "out", "train"), texts_in(tmp_path / "out", "valid")
    assert train + valid == text
    assert len(valid) / len(text) == pytest.approx(0.05, rel=0.25)
    assert train.endswith("\n\n")
    assert not verify_corpus(tmp_path / "out")
    said = "\n".join(summary.lines())
    assert "too few to hold out whole documents: the end of " in said
    assert "my.txt is held out (valid 0.05)" in said
    assert "--valid PATH" in said
    assert summary.corpus.statistics["documents_cut"] == 1


def test_the_tokenizer_is_not_learnt_from_what_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab " * 1000 + "\n\n" + "xy " * 300)
    corpus = prepare_corpus(tmp_path / "out", inputs=[tmp_path / "a.txt"], kind="word", valid_fraction=0.2).corpus
    assert "ab" in corpus.tokenizer.symbols
    assert "xy" not in corpus.tokenizer.symbols


@pytest.mark.slow
def test_ends_are_held_out_alike_by_any_number_of_workers_size_of_parts_and_from_stdin_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [prose(4_000 * number, seed=number) for number in (1, 2, 3)] + ["short"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    settings: dict[str, Any] = {"kind": "bpe", "vocab_size": 300, "test_fraction": 0.1, "shard_len": 2_000}
    prepare_corpus(tmp_path / "one", inputs=[source], **settings, num_workers=1)
    for number, block_bytes in ((2, 3_000), (3, 100), (1, 5_000)):
        prepare_corpus(tmp_path / str(number), inputs=[source], **settings, num_workers=number, block_bytes=block_bytes)
        assert content_of(tmp_path / str(number)) == content_of(tmp_path / "one")
    with source.open("rb") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", type("Stdin", (), {"buffer": stream, "fileno": stream.fileno})())
        prepare_corpus(tmp_path / "piped", inputs=["-"], stdin_format="jsonl", **settings)
    assert content_of(tmp_path / "piped") == content_of(tmp_path / "one")
    pieces = {split: texts_in(tmp_path / "one", split) for split in ("train", "valid", "test")}
    assert [len(own) for own in pieces.values()] == [4, 3, 3]
    assert sum(len(piece) for own in pieces.values() for piece in own) == sum(map(len, texts))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A given one, of bytes."""
    (tmp_path / "other.txt").write_text("any text")
    prepare_corpus(tmp_path / "given", inputs=[tmp_path / "other.txt"], kind="byte", valid_fraction=0.0)
    return tmp_path / "given" / "tokenizer.json"


def test_a_stream_with_a_given_tokenizer_is_held_out_of_as_the_same_file_is(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.txt").write_text(prose(30_000))
    settings: dict[str, Any] = {"tokenizer_path": tokenizer, "test_fraction": 0.1}
    prepare_corpus(tmp_path / "file", inputs=[tmp_path / "my.txt"], **settings)
    for workers in (1, 2):
        with (tmp_path / "my.txt").open("rb") as stream, monkeypatch.context() as patch:
            patch.setattr("sys.stdin", type("Stdin", (), {"buffer": stream, "fileno": stream.fileno})())
            summary = prepare_corpus(tmp_path / f"stdin-{workers}", inputs=["-"], num_workers=workers, **settings)
        assert content_of(tmp_path / f"stdin-{workers}") == content_of(tmp_path / "file")
        assert "the end of - is held out (valid 0.05, test 0.1)" in "\n".join(summary.remarks)
    piped = {"inputs": [f"pipe:cat {tmp_path}/my.txt"], "allow_protocols": ("pipe",)}
    prepare_corpus(tmp_path / "piped", **piped, **settings)
    assert content_of(tmp_path / "piped") == content_of(tmp_path / "file")


@pytest.mark.parametrize("most", [1, 500, 1 << 17])
def test_a_stream_longer_than_what_is_kept_of_it_goes_by_the_hash_and_is_read_once(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [prose(300, seed=number) for number in range(100)])
    monkeypatch.setattr(job, "MOST_BEGUN", most)
    settings: dict[str, Any] = {"tokenizer_path": tokenizer, "block_bytes": 2_000, "valid_fraction": 0.2}
    prepare_corpus(tmp_path / "file", inputs=[source], **settings)
    command = f"pipe:echo run >> {tmp_path}/runs; cat {source}"
    piped = {"inputs": [command], "stdin_format": "jsonl", "allow_protocols": ("pipe",), **settings}
    kept: list[int] = []

    def find(begun: Any) -> Any:
        kept.append(sum(path.stat().st_size for path in tmp_path.glob(".*.prepare/begun-*")))
        return encode(begun)

    encode = prepare.encode_part
    for workers in (1, 2):
        with monkeypatch.context() as patch:
            if workers == 1:  # what other processes run has to be a function of a module
                patch.setattr(prepare, "encode_part", find)
            prepare_corpus(tmp_path / f"piped-{workers}", num_workers=workers, **piped)
        assert content_of(tmp_path / f"piped-{workers}") == content_of(tmp_path / "file")
    assert (tmp_path / "runs").read_text() == "run\n" * 2
    assert 0 < max(kept) <= most


def test_an_endless_document_with_a_given_tokenizer_is_refused_once_what_is_kept_is_full_and_its_command_ended(
    tmp_path: Path, tokenizer: Path
) -> None:
    settings: dict[str, Any] = {"tokenizer_path": tokenizer, "allow_protocols": ("pipe",)}
    remedy = (
        r"64 MiB or more.* `--valid PATH`.* `--valid-fraction 0`.* `--documents line`.* or save the input as a file and"
    )
    with pytest.raises(DataError, match=rf"^pipe:echo .* is one document.*{remedy}"):
        prepare_corpus(tmp_path / "out", inputs=[f"pipe:echo $$ > {tmp_path}/pid; yes"], **settings)
    with pytest.raises(ProcessLookupError):
        os.killpg(int((tmp_path / "pid").read_text()), 0)
    assert not list(tmp_path.glob(".out.prepare"))


def test_a_tokenizer_of_others_is_learnt_from_the_whole_of_a_stream_whose_beginning_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number} common {'rare ' * 3 * (number > 50)}" for number in range(100)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    vocab = {word: number for number, word in enumerate(("<unk>", "rare", "common"))}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "theirs.json"))
    monkeypatch.setattr(job, "MOST_BEGUN", 500)
    settings: dict[str, Any] = {"tokenizer_path": tmp_path / "theirs.json", "valid_fraction": 0.2}
    prepare_corpus(tmp_path / "file", inputs=[source], **settings)
    piped = {"inputs": [f"pipe:cat {source}"], "stdin_format": "jsonl", "allow_protocols": ("pipe",)}
    prepare_corpus(tmp_path / "piped", **piped, **settings)
    assert content_of(tmp_path / "piped") == content_of(tmp_path / "file")


def test_after_a_kill_in_the_midst_the_same_ends_are_held_out(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [prose(5_000, seed=number) for number in range(4)])
    settings: dict[str, Any] = {"inputs": [str(source)], "kind": "byte", "block_bytes": 5_000, "num_workers": 1}
    prepare_corpus(tmp_path / "expected", **settings)
    killed(tmp_path / "out", settings, "encode_part", 2)
    assert prepare_corpus(tmp_path / "out", **settings).parts_kept == 2
    assert content_of(tmp_path / "out") == content_of(tmp_path / "expected")


def test_parts_of_another_way_to_hold_out_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(prose(5_000))
    settings: dict[str, Any] = {"inputs": [folder], "kind": "byte", "block_bytes": 1, "num_workers": 1}

    def failing(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("txl_dist.data.prepare.run._assemble", failing)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(tmp_path / "out", **settings)
    for number in range(60):  # many files now, so that whole ones are held out
        (folder / f"b{number}.txt").write_text(f"text {number}")
    summary = prepare_corpus(tmp_path / "out", **settings)
    assert summary.parts_kept == 0
    assert "documents_cut" not in summary.corpus.statistics
    assert prepare_corpus(tmp_path / "new", **settings).corpus.fingerprint == summary.corpus.fingerprint


@pytest.mark.parametrize("duplicates", ["report", "drop"])
def test_equal_text_is_never_on_two_sides_where_ends_are_held_out(tmp_path: Path, duplicates: Any) -> None:
    long = prose(9_000)
    ((_, _), (_, end)) = cut_tails(long, {"valid": 0.05})
    other = prose(9_000 - 450, seed=1).rstrip() + "\n\n" + end
    texts = [long, end, other, long, "short"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    corpus = prepare_corpus(tmp_path / "out", inputs=[source], kind="byte", duplicates=duplicates).corpus
    train, valid = texts_in(tmp_path / "out", "train"), texts_in(tmp_path / "out", "valid")
    assert not set(train) & set(valid)
    assert end in valid
    assert "short" in train
    kept = "".join(train + valid)
    if duplicates == "report":
        assert len(kept) == sum(map(len, texts))
    else:  # only what is equal goes, not what was cut from the same document
        assert sorted(set(train + valid)) == sorted(train + valid)
        assert any(text.startswith(other[:8_000]) for text in train)
    assert corpus.statistics["held_out_duplicates"] == 0


def test_random_documents_and_shares_are_cut_into_their_whole_text_with_no_text_on_two_sides() -> None:
    generator, num_refused = random.Random(7), 0
    for _ in range(300):
        pool = [random_text(generator, length=generator.randint(1, 3000)) for _ in range(generator.randint(1, 4))]
        texts = generator.choices([*pool, pool[0][-45:], "a" * 400, "b" * 399 + "\n", " \n" * 300], k=len(pool))
        reading = Reading(valid_fraction=generator.choice([0.05, 0.3, 0.5]), test_fraction=generator.choice([0, 0.2]))
        documents = [Document(f"d{i}", i, text) for i, text in enumerate(texts)]
        try:
            reading = hold_out(lambda documents=documents: iter(documents), reading, inputs=["x"]).reading
        except DataError:  # too short, or nothing but copies of ends
            num_refused += 1
            continue
        splits: dict[str, set[str]] = {"train": set(), "valid": set(), "test": set()}
        ordinals: list[int] = []
        for document in documents:
            own = pieces_of(document, given_for="train", reading=reading)
            assert "".join(piece.document.text for piece in own) == document.text
            ordinals += [piece.document.ordinal for piece in own]
            for piece in own:
                assert piece.digest == content_digest(piece.document.text.encode())
                splits[piece.split].add(piece.document.text)
        assert sorted(set(ordinals)) == ordinals
        assert (
            not splits["train"] & splits["valid"] | splits["train"] & splits["test"] | splits["valid"] & splits["test"]
        )
        wanted = {"train", "valid", *(["test"] if reading.test_fraction else [])}
        assert {name for name, own in splits.items() if own} == wanted
    assert num_refused < 150


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("a" * 1_890 + "\n\n" + "b" * 108, "b" * 108),  # a paragraph
        ("a" * 1_890 + "\r\n\r\n" + "b" * 106, "b" * 106),
        ("a" * 1_889 + "\n" + "b" * 110, "b" * 110),  # a line
        ("a" * 1_889 + " " + "b" * 110, "b" * 110),  # a word
        ("a" * 1_900 + "b" * 100, "b" * 100),  # a character
        ("\u4e2d" * 1_900 + "\U0001f600" * 100, "\U0001f600" * 100),
        ("a" * 1_890 + "\n\n" + "b" * 6 + "\n" + "c" * 101, "b" * 6 + "\n" + "c" * 101),  # paragraphs before lines
        ("a" * 1_700 + "\n\n" + "b" * 298, "b" * 100),  # a border too far away
    ],
)
def test_a_cut_lies_behind_the_paragraph_else_the_line_else_the_word_that_ends_near(text: str, end: str) -> None:
    assert cut_tails(text, {"valid": 0.05}) == [("train", text[: -len(end)]), ("valid", end)]


@pytest.mark.slow
def test_many_documents_are_held_out_whole_as_ever_and_the_search_ends_with_the_first_of_each_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {number} " * 400 for number in range(4_000)])
    read: list[str] = []

    def counting(documents: Any, reading: Reading, **given: Any) -> Any:
        def pass_over() -> Any:
            for document in documents():
                read.append(document.where)
                yield document

        return held_out.hold_out(pass_over, reading, **given)

    monkeypatch.setattr(job, "hold_out", counting)
    summary = prepare_corpus(tmp_path / "out", inputs=[source], kind="byte")
    assert len(read) < 200
    assert summary.remarks == ()
    assert sum(map(len, texts_in(tmp_path / "out", "valid"))) > 0
    assert all(text in {f"text {n} " * 400 for n in range(4_000)} for text in texts_in(tmp_path / "out", "valid"))


def test_a_text_too_small_to_cut_is_refused_before_a_tokenizer_is_learnt_and_says_from_what_size_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "train_tokenizer", never)
    (tmp_path / "a.txt").write_text("a" * (20 * SHORTEST_TAIL - 1))
    for fraction, flag, needed in ((0.05, "valid", "2,000"), (0.02, "valid", "5,000")):
        with pytest.raises(
            DataError,
            match=rf"1,999 characters.* document has at least {needed} characters.*{flag} PATH.*--{flag}-fraction 0`",
        ):
            prepare_corpus(tmp_path / "out", inputs=[tmp_path / "a.txt"], valid_fraction=fraction)
    for name in "cd":
        (tmp_path / f"{name}.txt").write_text("one line\n")
    with pytest.raises(
        DataError,
        match=r"documents in the inputs: 2\..* 9 characters.* 2,000 characters.*--valid PATH.*--valid-fraction 0`",
    ):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path / "c.txt", tmp_path / "d.txt"])
    (tmp_path / "b.txt").write_text("\n" * 5_000)
    with pytest.raises(DataError, match="no text for the train split"):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path / "b.txt"])
    assert not (tmp_path / "out").exists()


def never(*_: Any, **__: Any) -> Any:
    """In place of learning a tokenizer."""
    raise AssertionError("a tokenizer was learnt before it was refused")


@pytest.mark.parametrize(
    "other",
    [
        {"inputs": ["b.txt"]},
        {"inputs": ["a.txt"], "kind": "byte", "vocab_size": 0},
        {"inputs": ["a.txt"], "vocab_size": 290},
        {"inputs": ["a.txt"], "test_fraction": 0.1},
        {"inputs": ["a.txt"], "valid_fraction": 0.2},
        {"inputs": ["a.txt"], "valid_inputs": ["b.txt"]},
    ],
)
def test_another_corpus_in_the_way_is_refused_before_a_tokenizer_is_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("\n" + prose(6_000))
    Path("b.txt").write_text(prose(6_000, seed=1))
    settings: dict[str, Any] = {"inputs": ["a.txt"], "vocab_size": 300}
    fingerprint = prepare_corpus("out", **settings).corpus.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(job, "train_tokenizer", never)
        with pytest.raises(DataError, match=r"another corpus is in .*--overwrite"):
            prepare_corpus("out", **{**settings, **other})
    assert prepare_corpus("out", **settings).is_unchanged
    assert prepare_corpus("out", overwrite=True, **{**settings, **other}).corpus.fingerprint != fingerprint


def test_the_same_command_finds_its_corpus_whatever_its_held_out_text_begins_with(tmp_path: Path) -> None:
    for number, first in enumerate(("", "\n\n", "\u00e9")):
        source = write_jsonl(tmp_path / f"{number}.jsonl", [first, *(f"text {i}" for i in range(60))])
        for kind in ("byte", "word"):
            settings: dict[str, Any] = {"inputs": [source], "kind": kind, "valid_fraction": 0.3}
            for end_of_text in (True, False):
                out = tmp_path / f"{number}-{kind}-{end_of_text}"
                assert not prepare_corpus(out, end_of_text=end_of_text, **settings).is_unchanged
                assert prepare_corpus(out, end_of_text=end_of_text, **settings).is_unchanged


@pytest.mark.parametrize("vocab_size", [100, MOST_IDS + 1, 10**12, 10**30])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_an_impossible_vocabulary_is_refused_before_any_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, vocab_size: int
) -> None:
    monkeypatch.setattr("txl_dist.data.prepare.preparation.read_parts", never)
    (tmp_path / "a.txt").write_text(prose(6_000))
    with pytest.raises(ConfigError, match=rf"vocab_size={vocab_size} is too (small: .* or more|large: .* smaller)"):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path / "a.txt"], kind=kind, vocab_size=vocab_size)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_vocabulary_that_the_text_cannot_fill_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 3_000)
    summary = prepare_corpus(tmp_path / "out", inputs=[tmp_path / "a.txt"])
    assert f"the vocabulary has {summary.corpus.vocab_size} ids instead of 4,096" in "\n".join(summary.lines())
