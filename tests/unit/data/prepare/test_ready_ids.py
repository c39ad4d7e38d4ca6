"""Token ids with a vocabulary list are prepared unchanged, and wrong ids are refused with their file and place."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.jobs import job_of
from txl_dist.config.load import load_config
from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.corpus import Corpus
from txl_dist.data.prepare import documents, run
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import CheckpointError, ConfigError, DataError, TxlError
from txl_dist.tokenizers.base import END_OF_TEXT
from txl_dist.tokenizers.listed import listed_tokenizer
from txl_dist.tokenizers.tokenizer import load_tokenizer
from txl_dist.train.checkpoint.read import check_checkpoint
from txl_dist.train.checkpoint.validate import read_state

NAMES = ["PAD_None", "Bar_None", *(f"Position_{i}" for i in range(16)), *(f"Pitch_{i}" for i in range(60, 72)), "é🎵"]


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "names.txt"
    path.write_text("\n".join(NAMES) + "\n", encoding="utf-8")
    return path


def some_documents(count: int = 60, *, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, len(NAMES), generator.integers(3, 30)).tolist() for _ in range(count)]


def as_lines(documents: list[Any]) -> str:
    return "".join(json.dumps(one) + "\n" for one in documents)


def prepared(folder: Path, names: Path, *inputs: Path, **settings: Any) -> Corpus:
    return prepare_corpus(folder / "out", inputs=inputs, vocab_list=names, num_workers=1, **settings).corpus


def ids_of(corpus: Corpus, split: str) -> list[list[int]]:
    return [document.tolist() for document in corpus.split(split).each_document()]


@pytest.mark.parametrize("end_of_text", [True, False])
def test_every_document_comes_back_with_the_ids_that_it_was_given(
    tmp_path: Path, names: Path, end_of_text: bool
) -> None:
    documents = some_documents()
    (tmp_path / "music.jsonl").write_text(as_lines(documents))
    corpus = prepared(tmp_path, names, tmp_path / "music.jsonl", valid_fraction=0.2, end_of_text=end_of_text)
    ends = [len(NAMES)] if end_of_text else []
    assert corpus.end_of_text == (len(NAMES) if end_of_text else None)
    found = ids_of(corpus, "train") + ids_of(corpus, "valid")
    assert sorted(found) == sorted([*one, *ends] for one in documents)
    assert len(ids_of(corpus, "valid")) > 0
    assert list(corpus.tokenizer.symbols) == [*NAMES, *[END_OF_TEXT] * end_of_text]
    assert (
        "its ids are names from a vocabulary list" in text_units([corpus.split("valid")], mask_documents=False).problem
    )


def test_arrays_lists_and_records_of_the_same_ids_are_the_same_corpus(tmp_path: Path, names: Path) -> None:
    array = np.random.default_rng(1).integers(0, len(NAMES), (40, 12))
    np.save(tmp_path / "a.npy", array.astype(np.uint8))
    (tmp_path / "b.jsonl").write_text(as_lines(array.tolist()))
    (tmp_path / "c.jsonl").write_text(as_lines([{"input_ids": row, "name": "x"} for row in array.tolist()]))
    sink = io.BytesIO()
    np.save(sink, np.asfortranarray(array.astype(">i4")))
    (tmp_path / "d.npy.gz").write_bytes(gzip.compress(sink.getvalue()))
    found = {}
    for name in ("a.npy", "b.jsonl", "c.jsonl", "d.npy.gz"):
        for block_bytes in (0, 64):
            own = tmp_path / f"{name}-{block_bytes}"
            own.mkdir()
            field = {"jsonl_field": "input_ids"} if name.startswith("c") else {}
            found[own.name] = prepared(own, names, tmp_path / name, block_bytes=block_bytes, **field).fingerprint
    assert len(set(found.values())) == 1, found


def test_an_array_of_one_dimension_is_a_document_whose_end_is_held_out_behind_a_whole_id(
    tmp_path: Path, names: Path
) -> None:
    names.write_text("".join(f"{'long' * 40}_{i}\n" for i in range(7)))
    ids = np.random.default_rng(2).integers(0, 7, 200)
    np.save(tmp_path / "piece.npy", ids)
    corpus = prepared(tmp_path, names, tmp_path / "piece.npy", valid_fraction=0.1)
    (train,), (valid,) = ids_of(corpus, "train"), ids_of(corpus, "valid")
    assert train[:-1] + valid[:-1] == ids.tolist()
    assert 15 <= len(valid) <= 25


def test_a_folder_gives_its_files_of_ids_and_names_of_files_say_splits(tmp_path: Path, names: Path) -> None:
    folder = tmp_path / "music"
    folder.mkdir()
    np.save(folder / "train.npy", np.arange(30).reshape(3, 10))
    (folder / "valid.jsonl").write_text("[1, 2, 3]\n")
    (folder / "notes.txt").write_text("no ids")
    corpus = prepared(tmp_path, names, folder)
    assert ids_of(corpus, "valid") == [[1, 2, 3, len(NAMES)]]
    assert len(ids_of(corpus, "train")) == 3


def test_the_vocabulary_reads_and_writes_names_joined_by_blanks(tmp_path: Path, names: Path) -> None:
    (tmp_path / "music.jsonl").write_text(as_lines(some_documents()))
    prepared(tmp_path, names, tmp_path / "music.jsonl")
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert tokenizer.kind == "listed"
    assert tokenizer.decode([1, 30, 18]) == "Bar_None é🎵 Pitch_60 "
    assert tokenizer.encode_prompt(" Bar_None\né🎵  Pitch_60").tolist() == [1, 30, 18]
    assert list(tokenizer.decode_stream([1, 30])) == ["Bar_None ", "é🎵 "]
    with pytest.raises(DataError, match="'Pitch_99' is not in the vocabulary"):
        tokenizer.encode("Bar_None Pitch_99")
    with pytest.raises(DataError, match="endoftext"):
        tokenizer.encode(END_OF_TEXT)


def test_names_that_never_occur_are_told(tmp_path: Path, names: Path) -> None:
    np.save(tmp_path / "few.npy", np.tile(np.arange(10), (30, 3)))
    summary = prepare_corpus(tmp_path / "out", inputs=[tmp_path / "few.npy"], vocab_list=names, valid_fraction=0.0)
    assert any("21 of the 31 names of the vocabulary list do not occur in train" in line for line in summary.lines())


BAD_LINES = {
    "[1, 2]\n[3, 31]\n": (
        "bad.jsonl, line 2, index 1: 31 is not an id of the vocabulary list, which has names for the 31 ids"
    ),
    "[1, -1]\n": "bad.jsonl, line 1, index 1: -1 is not an id",
    "[1, 2.0]\n": "bad.jsonl, line 1, index 1: 2.0 is not an id",
    "[true]\n": "bad.jsonl, line 1, index 0: True is not an id",
    '["Bar_None"]\n': "bad.jsonl, line 1, index 0: 'Bar_None' is not an id",
    "[1]\n\n[]\n": "bad.jsonl, line 3: the list of ids is empty",
    "[[1, 2], [3]]\n": "bad.jsonl, line 1, index 0: [1, 2] is not an id",
    "17\n": "bad.jsonl, line 1: found a number, not a list of ids",
    '{"ids": [1]}\n': "bad.jsonl, line 1: the record has no field 'text'.*--jsonl-field",
    "[1, 2\n": "bad.jsonl, line 1: not valid JSON",
    "[NaN]\n": "bad.jsonl, line 1",
    '[["a\\nb"]]\n': r"bad.jsonl, line 1, index 0: ['a\nb'] is not an id",
    '["a\\nb"]\n': r"bad.jsonl, line 1, index 0: 'a\nb' is not an id",
    "[1]\n[2, \udcff]\n": "bad.jsonl, line 2: not valid JSON.*byte 0xff in position 4",
}


@pytest.mark.parametrize("content", BAD_LINES)
def test_bad_lines_are_refused_by_file_line_and_index(tmp_path: Path, names: Path, content: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    assert_refused(tmp_path, names, tmp_path / "bad.jsonl", BAD_LINES[content])


BAD_ARRAYS: dict[str, tuple[Any, str]] = {
    "outside": (np.array([[1, 2], [3, 31]]), "bad.npy, row 2, index 1: 31 is not an id"),
    "outside in one": (np.array([1, 2, 99]), "bad.npy, index 2: 99 is not an id"),
    "negative": (np.array([[1, -2]]), "bad.npy, row 1, index 1: -2 is not an id"),
    "floats": (np.array([1.0, 2.0]), "bad.npy contains an array of float64 with shape [2]"),
    "booleans": (np.array([True]), "bad.npy contains an array of bool"),
    "cube": (np.zeros((2, 2, 2), dtype=int), "bad.npy contains an array of int64 with shape [2, 2, 2]"),
    "scalar": (np.array(5), "bad.npy contains an array of int64 with shape []"),
    "empty": (np.zeros((3, 0), dtype=int), "bad.npy contains no ids: its shape is [3, 0]"),
    "pickled": (np.array([[1], [2, 3]], dtype=object), "bad.npy is not a .npy file of numbers"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays_are_refused_by_file_row_and_index(tmp_path: Path, names: Path, name: str) -> None:
    array, message = BAD_ARRAYS[name]
    np.save(tmp_path / "bad.npy", array, allow_pickle=True)
    assert_refused(tmp_path, names, tmp_path / "bad.npy", message)


@pytest.mark.parametrize("cut", [0, 3, 40, 130])
def test_an_array_that_was_cut_or_is_none_is_refused(tmp_path: Path, names: Path, cut: int) -> None:
    np.save(tmp_path / "whole.npy", np.arange(20))
    (tmp_path / "bad.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:cut])
    assert_refused(tmp_path, names, tmp_path / "bad.npy", "bad.npy is not a .npy file of numbers")


BAD_HEADERS = {
    "open bracket": b"{'descr': '<i8', 'fortran_order': False, 'shape': (20,",
    "open quote": b"{'descr': '<i8",
    "huge shape": b"{'descr': '<i8', 'fortran_order': False, 'shape': (%d,), }" % 10**30,
    "deep": b"(" * 5_000 + b")" * 5_000,
    "unary deep": b"-" * 9_000 + b"1",
    "long": b"{'descr': '<i8', 'fortran_order': False, 'shape': (20,), }" + b" " * 20_000,
    "unknown type": b"{'descr': 'x9', 'fortran_order': False, 'shape': (20,), }",
    "no mapping": b"[1]",
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_an_array_with_a_damaged_header_is_refused(tmp_path: Path, names: Path, name: str) -> None:
    header = BAD_HEADERS[name] + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(160)
    (tmp_path / "bad.npy").write_bytes(content)
    assert_refused(tmp_path, names, tmp_path / "bad.npy", "bad.npy is not a .npy file of numbers")


@pytest.mark.parametrize("content", [b"PK\x03\x04 and no archive", b"PK\x05\x06" + bytes(18), b"text"])
def test_an_archive_and_what_only_begins_as_one_are_no_arrays(tmp_path: Path, names: Path, content: bytes) -> None:
    (tmp_path / "bad.npy").write_bytes(content)
    what = "bad.npy is a zip archive" if content.startswith(b"PK\x05") else "bad.npy is not a .npy file of numbers"
    assert_refused(tmp_path, names, tmp_path / "bad.npy", what)
    np.savez(tmp_path / "whole.npz", a=np.arange(9))
    (tmp_path / "bad.npy").write_bytes((tmp_path / "whole.npz").read_bytes())
    assert_refused(tmp_path, names, tmp_path / "bad.npy", "bad.npy is a zip archive")


@pytest.mark.parametrize("name", ["one.npy", "rows.npy", "lists.jsonl"])
def test_a_document_whose_names_are_too_long_is_refused_with_the_remedy(
    tmp_path: Path, names: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    names.write_text("b\né\n", encoding="utf-8")  # with its blank a name has two and three bytes
    ids = np.repeat([[0], [1]], 10_000, axis=1)
    if name == "lists.jsonl":
        (tmp_path / name).write_text(as_lines(ids.tolist()))
    else:
        np.save(tmp_path / name, ids[1] if name == "one.npy" else ids)
    monkeypatch.setattr(documents, "LONGEST_RECORD", 30_000)
    where = {"one.npy": name, "rows.npy": f"{name}, row 2", "lists.jsonl": f"{name}, line 2"}[name]
    message = f"{where} contains a document of 2 GiB or more.*one document per row of a two-dimensional array"
    assert_refused(tmp_path, names, tmp_path / name, message, valid_fraction=0.0)
    monkeypatch.setattr(documents, "LONGEST_RECORD", 30_001)
    assert prepared(tmp_path, names, tmp_path / name, valid_fraction=0.0).splits["train"].longest == 10_001


@pytest.mark.parametrize("settings", [{}, {"valid_fraction": 0.0}])
def test_files_without_ids_are_named(tmp_path: Path, names: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "blank.jsonl").write_text("\n \n\n")
    message = f"the inputs contain no ids for the train split: {tmp_path / 'blank.jsonl'}."
    assert_refused(tmp_path, names, tmp_path / "blank.jsonl", message, **settings)


def test_documents_too_short_for_an_end_to_be_held_out_are_measured_in_ids(tmp_path: Path, names: Path) -> None:
    (tmp_path / "short.jsonl").write_text("[1, 1, 1, 1, 1]\n")  # names of eight characters, and their blanks
    message = "The longest document has 5 ids. .* only if the document has at least about 223 ids."
    assert_refused(tmp_path, names, tmp_path / "short.jsonl", message)


def test_a_list_that_is_too_short_is_refused_by_the_first_id_outside(tmp_path: Path, names: Path) -> None:
    names.write_text("".join(f"{name}\n" for name in NAMES[:-1]), encoding="utf-8")
    np.save(tmp_path / "ids.npy", np.array([[1, 2, 3], [4, 5, 30]]))
    assert_refused(
        tmp_path, names, tmp_path / "ids.npy", "ids.npy, row 2, index 2: 30 is not an id.*names for the 30 ids"
    )


@pytest.mark.parametrize("changed", [[*NAMES, "one_more"], [*NAMES[:-1], "other"], NAMES[::-1]])
def test_a_corpus_of_another_list_in_the_way_is_refused_before_the_work(
    tmp_path: Path, names: Path, monkeypatch: pytest.MonkeyPatch, changed: list[str]
) -> None:
    source = tmp_path / "music.jsonl"
    source.write_text(as_lines(some_documents()))
    fingerprint = prepared(tmp_path, names, source).fingerprint
    names.write_text("".join(f"{name}\n" for name in changed), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(run, "make_tokenizer", None)
        with pytest.raises(DataError, match=r"another corpus is in [^\n]*--overwrite`\.$"):
            prepared(tmp_path, names, source)
    assert prepared(tmp_path, names, source, overwrite=True).fingerprint != fingerprint


def test_a_run_does_not_go_on_with_another_list(tmp_path: Path) -> None:
    golden = Path(__file__).parents[3] / "golden" / "checkpoint_v2" / "step_000000016"
    shutil.copytree(golden, tmp_path / "step")
    state = json.loads((golden / "state.json").read_text())
    own, longer = (listed_tokenizer(one, end_of_text=True) for one in (NAMES, [*NAMES, "one_more"]))
    (tmp_path / "step" / "state.json").write_text(json.dumps(state | {"tokenizer_fingerprint": own.fingerprint}))
    config, ranks = load_config(golden / "config.toml"), RankInfo(0, 2, 0, torch.device("cpu"), num_threads=1)
    assert check_checkpoint(read_state(tmp_path / "step"), job_of(config, ranks, tokenizer=own)) == []
    with pytest.raises(CheckpointError, match=r"^[^\n]*trained with another tokenizer[^\n]*$"):
        check_checkpoint(read_state(tmp_path / "step"), job_of(config, ranks, tokenizer=longer))


def assert_refused(folder: Path, names: Path, source: Path, message: str, **settings: Any) -> None:
    start, _, rest = message.partition(".*")
    with pytest.raises(TxlError) as caught:
        prepared(folder, names, source, **settings)
    assert start in str(caught.value)
    assert rest in str(caught.value)
    assert str(caught.value).isprintable()
    assert not (folder / "out").exists()


BAD_LISTS = {
    "a\n\nb\n": "line 2: the name of id 1 is empty",
    "a\nb c\n": "line 2: the name of id 1 is 'b c'",
    "a\nb\na\n": "line 3: the name of id 2 is 'a', but line 1 has the same name",
    "<|endoftext|>\n": "line 1: the name of id 0 is <|endoftext|>",
    "": "line 1: the name of id 0 is empty",
}


@pytest.mark.parametrize("content", BAD_LISTS)
def test_a_list_that_is_none_is_refused_by_its_line(tmp_path: Path, names: Path, content: str) -> None:
    names.write_text(content)
    np.save(tmp_path / "a.npy", np.zeros((9, 9), dtype=int))
    assert_refused(tmp_path, names, tmp_path / "a.npy", f"{names}, {BAD_LISTS[content]}")


def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path, names: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((9, 9), dtype=int))
    assert_refused(tmp_path, tmp_path / "none.txt", tmp_path / "a.npy", "cannot read the vocabulary list")
    names.write_bytes(b"a\xff\n")
    assert_refused(tmp_path, names, tmp_path / "a.npy", "cannot read the vocabulary list")


@pytest.mark.parametrize("which", ["list", "ids"])
def test_a_byte_order_mark_is_no_part_of_the_first_name_or_list(tmp_path: Path, names: Path, which: str) -> None:
    source = tmp_path / "music.jsonl"
    source.write_text(as_lines(some_documents()))
    fingerprint = prepared(tmp_path, names, source).fingerprint
    marked = names if which == "list" else source
    marked.write_bytes(b"\xef\xbb\xbf" + marked.read_bytes())
    assert prepared(tmp_path, names, source, overwrite=True).fingerprint == fingerprint


@pytest.mark.parametrize(
    "settings",
    [{"kind": "bpe"}, {"vocab_size": 9}, {"documents": "line"}, {"lower_case": True}, {"encoding_errors": "skip"}],
)
def test_settings_of_text_are_refused_beside_a_list(tmp_path: Path, names: Path, settings: dict[str, Any]) -> None:
    np.save(tmp_path / "a.npy", np.zeros((9, 9), dtype=int))
    flag = next(iter(settings)).replace("_", "-").replace("kind", "tokenizer")
    message = f"--{flag} cannot be used with token ids"
    assert_refused(tmp_path, names, tmp_path / "a.npy", message, **settings)


def test_ids_without_a_list_and_text_with_one_are_refused(tmp_path: Path, names: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((9, 9), dtype=int))
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ConfigError, match=r"a\.npy contains token ids\. Give a file .*--vocab-list"):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path / "a.npy"])
    assert_refused(
        tmp_path,
        names,
        tmp_path / "a.txt",
        "a.txt is not a file of token ids. With --vocab-list, give files whose names end in",
    )
    assert_refused(tmp_path, names, Path("-"), "--stdin-format jsonl", stdin_format="text")
