"""A written corpus contains its input, for any reader. Writing it again gives the same bytes, and damage is named."""

from __future__ import annotations

import json
import math
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from tests.helpers.corpora import random_texts, tiny_corpus, write_jsonl
from txl_dist.data.format import RECORD, SplitInfo, token_dtype
from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.lanes import hash64
from txl_dist.data.prepare.documents import Reading, content_digest, split_of
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.prepare.shard_writer import write_shard
from txl_dist.data.verify.verify import verify_corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.tokenizers.word_tokenizer import WordTokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return tiny_corpus(tmp_path)


def documents_of(corpus: Corpus, split: str) -> list[list[int]]:
    return [document.tolist() for document in corpus.split(split).each_document()]


def test_each_split_holds_its_documents_with_end_of_text_train_shuffled_held_out_in_input_order(corpus: Corpus) -> None:
    tokenizer = corpus.tokenizer
    texts = random_texts(count=60)
    splits = [
        split_of(content_digest(text.encode()), given_for="train", reading=Reading(valid_fraction=0.2))
        for text in texts
    ]
    shuffled = np.argsort(hash64(0, np.arange(60)), kind="stable").tolist()
    assert shuffled != sorted(shuffled)
    for split, order in (("train", shuffled), ("valid", range(60))):
        own = [texts[i] for i in order if splits[i] == split]
        assert documents_of(corpus, split) == [[*tokenizer.encode(text), tokenizer.end_of_text] for text in own]
        opened = corpus.split(split)
        assert opened.documents == len(own)
        assert opened.text_bytes == sum(len(text.encode()) for text in own)
        assert opened.longest == max(len(text.encode()) for text in own) + 1
        assert opened.tokens == opened.text_bytes + len(own) == opened.shard_tokens.sum() == len(opened.read_all())
        assert np.array_equal(opened.counts(), np.bincount(opened.read_all(), minlength=corpus.vocab_size))
    shard_tokens = corpus.split("train").shard_tokens
    assert len(shard_tokens) > 3
    assert shard_tokens.max() - shard_tokens.min() <= 2 * corpus.split("train").longest, "of about equal size"


def test_opening_a_corpus_looks_at_each_split_once_and_at_no_types_per_shard(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_corpus(corpus.folder)
    parsed: list[Any] = []
    parse, ask = SplitInfo.from_dict, get_type_hints
    monkeypatch.setattr(SplitInfo, "from_dict", lambda values: parsed.append("split") or parse(values))
    monkeypatch.setattr("txl_dist.io.files.get_type_hints", lambda kind: parsed.append(kind) or ask(kind))
    assert open_corpus(corpus.folder).split_names == corpus.split_names
    assert parsed == ["split"] * len(corpus.split_names)


def test_a_plain_webdataset_reads_every_shard_and_the_same_documents(tmp_path: Path) -> None:
    import webdataset

    texts = [*random_texts(count=30), "long " * 3000, *random_texts(count=30, seed=1)]
    corpus = tiny_corpus(tmp_path, texts=texts, shard_len=4000)
    for split in corpus.split_names:
        found, keys, firsts = [], [], []
        for shard in corpus.split(split).shards:
            for sample in webdataset.WebDataset(str(corpus.folder / shard.name), shardshuffle=False).decode():
                keys.append(sample["__key__"])
                starts = sample.get("docs.npy", np.zeros(1, dtype=np.uint32))
                firsts.append(len(found))
                assert sample["npy"].dtype == np.uint16
                assert starts.dtype == np.uint32
                found += [part.tolist() for part in np.split(sample["npy"], starts[1:].astype(int))]
        assert found == documents_of(corpus, split)
        assert keys == [f"{first:09d}" for first in firsts], "named by their first document"


def test_large_vocabularies_are_written_as_uint32(tmp_path: Path) -> None:
    assert token_dtype(65_536) == np.uint16
    documents = [np.arange(70_000), np.array([65_536, 1])]
    dtype = token_dtype(65_537)
    written = write_shard(tmp_path, "train-000000.tar", documents, first_document=0, dtype=dtype, vocab_size=70_001)
    records = np.fromfile(tmp_path / "train-000000.tar.idx", dtype=RECORD)
    raw = (tmp_path / "train-000000.tar").read_bytes()
    assert written.info.tokens == 70_002 == written.counts.sum()
    assert written.counts[65_536] == 2
    for record, document in zip(records, documents, strict=True):
        assert np.array_equal(np.frombuffer(raw, "<u4", count=record["tokens"], offset=record["offset"]), document)


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    first, second = tiny_corpus(tmp_path, name="a", kind="bpe"), tiny_corpus(tmp_path, name="b", kind="bpe")
    names = sorted(path.name for path in first.folder.iterdir())
    assert names == sorted(path.name for path in second.folder.iterdir())
    assert all((first.folder / name).read_bytes() == (second.folder / name).read_bytes() for name in names)
    assert first.fingerprint == second.fingerprint


def test_tar_headers_carry_no_time_and_no_pax(corpus: Corpus) -> None:
    for path in corpus.folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            assert all(member.mtime == 0 and not member.pax_headers for member in tar)


def test_an_intact_corpus_verifies(corpus: Corpus) -> None:
    assert verify_corpus(corpus.folder) == []


def cut_at_member_border(folder: Path) -> None:
    path = folder / "train-000001.tar"
    with tarfile.open(path) as tar:
        border = tar.getmembers()[-1].offset
    path.write_bytes(path.read_bytes()[:border])


def flip(name: str, *, at: int | None = None) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        records = np.fromfile(folder / "train-000001.tar.idx", dtype=RECORD)
        data[int(records["offset"][0]) + 2 if at is None else at] ^= 1
        (folder / name).write_bytes(data)

    return damage


DAMAGE = {
    "cut at a member border": (cut_at_member_border, r"train-000001\.tar has .* bytes"),
    "flipped payload bit": (flip("train-000001.tar"), r"train-000001\.tar, document 0 .*damaged"),
    "flipped record bit": (flip("train-000001.tar.idx", at=9), r"train-000001\.tar\.idx is damaged"),
    "missing tar": (lambda folder: (folder / "train-000001.tar").unlink(), r"cannot read .*train-000001\.tar:"),
    "missing records": (lambda folder: (folder / "train-000001.tar.idx").unlink(), r"train-000001\.tar\.idx"),
    "swapped shard": (
        lambda folder: shutil.copy(folder / "train-000000.tar", folder / "train-000001.tar"),
        r"train-000001\.tar",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_by_reading_and_named_with_a_remedy(corpus: Corpus, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(corpus.folder)
    with pytest.raises(DataError, match=message) as raised:
        open_corpus(corpus.folder).split("train").read_all()
    assert "txl prepare" in str(raised.value)
    assert str(raised.value) in verify_corpus(corpus.folder)


def test_a_flipped_header_bit_is_found_by_verify(corpus: Corpus) -> None:
    flip("train-000001.tar", at=3)(corpus.folder)
    (problem,) = verify_corpus(corpus.folder)
    assert "train-000001.tar" in problem
    assert "sha256" in problem


def test_an_edited_index_is_refused(corpus: Corpus) -> None:
    path = corpus.folder / "index.json"
    index = json.loads(path.read_text())
    index["end_of_text"] += 1
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match="edited"):
        open_corpus(corpus.folder)
    for content in ("{", "{}", json.dumps(index | {"format_version": 2})):
        path.write_text(content)
        with pytest.raises(DataError, match=r"index\.json"):
            open_corpus(corpus.folder)
    path.unlink()
    assert "not a readable corpus" in verify_corpus(corpus.folder)[0]


def test_another_tokenizer_in_the_folder_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    tiny_corpus(tmp_path, name="other", texts=["b" * length for length in range(1, 60)]).tokenizer.save(
        corpus.folder / "tokenizer.json"
    )
    with pytest.raises(DataError, match="not the tokenizer"):
        assert corpus.tokenizer.vocab_size


def test_ids_beyond_the_vocabulary_are_refused_even_with_a_matching_checksum(corpus: Corpus) -> None:
    corpus.vocab_size = 10
    with pytest.raises(DataError, match="outside the vocabulary of 10"):
        corpus.split("train").read_all()


def test_preparing_again_changes_nothing_unless_asked(tmp_path: Path) -> None:
    source, other = write_jsonl(tmp_path / "a.jsonl", random_texts(count=40)), tmp_path / "b.jsonl"
    write_jsonl(other, random_texts(count=40, seed=9))
    out = tmp_path / "out"
    first = prepare_corpus(out, inputs=[source], kind="byte")
    assert not first.is_unchanged
    assert prepare_corpus(out, inputs=[source], kind="byte").is_unchanged
    with pytest.raises(DataError, match="--overwrite"):
        prepare_corpus(out, inputs=[other], kind="byte")
    assert open_corpus(out).fingerprint == first.corpus.fingerprint
    replaced = prepare_corpus(out, inputs=[other], kind="byte", overwrite=True)
    assert replaced.corpus.fingerprint != first.corpus.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "out"], "no scratch is left"


def test_preparing_again_mends_a_damaged_corpus(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    flip("train-000001.tar")(corpus.folder)
    tiny_corpus(tmp_path)
    assert verify_corpus(corpus.folder) == []


def test_a_failed_preparation_leaves_nothing_but_finished_work(tmp_path: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text('{"text": "fine"}\n' * 50 + "{\n")
    given = tiny_corpus(tmp_path, name="given").folder / "tokenizer.json"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="line 51"):
        prepare_corpus(tmp_path / "out", inputs=[source], kind="byte")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(DataError, match="line 51"):
        prepare_corpus(tmp_path / "out", inputs=[source], tokenizer_path=given, block_bytes=100, valid_fraction=0.0)
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / ".out.prepare"])


def test_folders_and_files_that_are_no_corpus_are_never_replaced(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(count=40))
    for target in (tmp_path, source, source / "below"):
        with pytest.raises(DataError, match="another output folder"):
            prepare_corpus(target, inputs=[source], kind="byte", overwrite=True)
    assert source.exists()


def test_empty_and_damaged_documents_are_counted(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("" if i % 4 == 0 else "text " * i)
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    out = tmp_path / "out"
    summary = prepare_corpus(out, inputs=[tmp_path], kind="byte", valid_fraction=0.0, encoding_errors="skip")
    assert summary.corpus.statistics == {
        "documents_read": 21,
        "empty_documents_dropped": 5,
        "documents_with_replacements": 0,
        "documents_skipped": 1,
        "exact_duplicates": 0,
        "held_out_duplicates": 0,
        "duplicates_dropped": 0,
        "near_duplicates": 8,  # the same word again and again
    }
    assert summary.corpus.split_names == ("train",)
    assert summary.corpus.split("train").documents == 15
    assert "empty documents dropped: 5" in "\n".join(summary.lines())
    assert "left out" not in "\n".join(summary.lines())


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no text"):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path])
    (tmp_path / "a.txt").write_text("something")
    with pytest.raises(DataError, match="--valid PATH"):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path], kind="byte")


def test_held_out_text_and_the_tokenizer_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("aaab")
    (tmp_path / "valid.txt").write_text("bbb")
    settings: dict[str, Any] = {"inputs": [tmp_path / "train.txt"], "valid_inputs": [tmp_path / "valid.txt"]}
    first = prepare_corpus(tmp_path / "one", kind="char", **settings).corpus
    assert (first.split("train").documents, first.split("valid").tokens) == (1, 4)
    again = prepare_corpus(tmp_path / "two", tokenizer_path=tmp_path / "one" / "tokenizer.json", **settings).corpus
    assert again.fingerprint == first.fingerprint


def test_an_unknown_split_is_named_with_those_there_are(corpus: Corpus) -> None:
    with pytest.raises(DataError, match=r"'test'. Its splits are train, valid.*--valid PATH.*--data.eval_split"):
        corpus.split("test")


def test_files_of_other_suffixes_are_counted_but_change_no_fingerprint(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("text")
    settings: dict[str, Any] = {"kind": "byte", "valid_fraction": 0.0}
    first = prepare_corpus(tmp_path / "one", inputs=[texts], **settings)
    (texts / "a.html").write_text("text")
    (texts / "b.csv.gz").write_text("text")
    second = prepare_corpus(tmp_path / "two", inputs=[texts], **settings)
    assert (first.files_left_out, second.files_left_out) == (0, 2)
    assert "  files left out (suffix): 2" in second.lines()
    assert first.corpus.fingerprint == second.corpus.fingerprint


def test_a_text_given_twice_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    text, other = folder / "below" / "a.txt", tmp_path / "other.txt"
    text.write_text("text")
    other.write_text("other")
    link = tmp_path / "link.txt"
    link.symlink_to(text)
    relative = os.path.relpath(text)
    for inputs, valid_inputs in (
        ([text], [text]),
        ([text], [relative]),
        ([folder], [text]),
        ([folder], [folder / "below"]),
        ([text], [other, folder]),
        ([folder], [link]),
        (["stdlib"], ["stdlib"]),
        ([folder, text], []),
    ):
        with pytest.raises(DataError, match=r"given twice.*Give each file once"):
            prepare_corpus(tmp_path / "out", inputs=inputs, valid_inputs=valid_inputs, kind="byte")
    split = prepare_corpus(tmp_path / "out", inputs=[folder], valid_inputs=[other], kind="byte").corpus.split
    assert (split("train").documents, split("valid").documents) == (1, 1)


def test_impossible_and_meaningless_settings_are_refused_with_a_remedy(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(count=40))
    given = prepare_corpus(tmp_path / "corpus", inputs=[source], kind="byte").corpus.folder / "tokenizer.json"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"shard_len": 0}, "shard_len=0 must be 1 or more"),
        ({"valid_fraction": 1.0}, "valid_fraction=1.0 .* for instance 0.05"),
        ({"min_frequency": 0}, "min_frequency=0 must be 1 or more"),
        ({"tokenizer_path": given, "vocab_size": 300}, "--vocab-size cannot be used .* Remove"),
        ({"tokenizer_path": given, "min_frequency": 2}, "cannot be used .* Remove"),
        ({"tokenizer_path": given, "kind": "byte"}, "--tokenizer cannot be used .* Remove"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, "no text to train on"),
        ({"tokenizer_fraction": 0.0}, "tokenizer_fraction=0.0 must be above 0"),
        ({"num_workers": -1}, "num_workers and block_bytes must be 0 or more"),
    ]
    for settings, message in refused:
        with pytest.raises(ConfigError, match=message):
            prepare_corpus(tmp_path / "out", inputs=[source], **settings)
    with pytest.raises(DataError, match="no inputs"):
        prepare_corpus(tmp_path / "out", inputs=[])
    assert not (tmp_path / "out").exists()


def test_a_loss_in_bits_per_byte_and_per_character(tmp_path: Path) -> None:
    split = tiny_corpus(tmp_path, texts=["\u00e9" * 30, "a" * 40], valid_fraction=0.0).split("train")
    assert (split.tokens, split.text_bytes, split.text_characters) == (102, 100, 70)
    bits = text_units([split], mask_documents=False).bits(3 * math.log(2))
    assert bits == pytest.approx({"bits_per_byte": 3.06, "bits_per_character": 306 / 70})


def test_without_end_of_text_documents_join_without_a_mark_and_those_of_no_words_are_left_out(tmp_path: Path) -> None:
    words = WordTokenizer([*"abc"], end_of_text=None, line_end=None, unknown=None)
    words.save(tmp_path / "tokenizer.json")
    settings: dict[str, Any] = {"valid_fraction": 0.0, "tokenizer_path": tmp_path / "tokenizer.json"}
    source = write_jsonl(tmp_path / "texts.jsonl", ["a b\n", " \n\t\n", "", "c\na"])
    corpus = prepare_corpus(tmp_path / "corpus", inputs=[source], **settings).corpus
    assert documents_of(corpus, "train") == [[0, 1], [2, 0]]
    assert corpus.end_of_text is None
    assert json.loads((tmp_path / "corpus" / "index.json").read_text())["end_of_text"] is None
    assert corpus.statistics["empty_documents_dropped"] == 2
    assert corpus.tokenizer.fingerprint == words.fingerprint
    assert verify_corpus(tmp_path / "corpus") == []
    foreign = write_jsonl(tmp_path / "foreign.jsonl", ["a b d"])
    with pytest.raises(DataError, match="'d'"):
        prepare_corpus(tmp_path / "other", inputs=[foreign], **settings)
    blank = write_jsonl(tmp_path / "blank.jsonl", [" "])
    with pytest.raises(DataError, match="no text"):
        prepare_corpus(tmp_path / "other", inputs=[blank], **settings)
