"""Tars of other programs become a corpus in place, or are refused by name. They are never changed or extracted."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import random_texts, tiny_corpus
from txl_dist.cli.main import main
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare.reindex import find_tars, reindex_corpus, split_tars
from txl_dist.data.verify.verify import strangers, verify_corpus
from txl_dist.errors import DataError
from txl_dist.tokenizers.characters import CharTokenizer

END = 3


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """a, b, a character of two bytes, end-of-text, unknown."""
    path = tmp_path / "letters.json"
    CharTokenizer(["a", "b", "\u00e9", "<|endoftext|>", "<unk>"], end_of_text=END).save(path)
    return path


def npy(values: Any, dtype: str = "<u2", **settings: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, dtype=dtype, **settings))
    return buffer.getvalue()


def write_tar(path: Path, members: Sequence[tuple[str | tarfile.TarInfo, bytes]], **settings: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", **settings) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def foreign_tars(folder: Path) -> Path:
    """Two splits, packed and single samples, headers of every format, members that are no tokens."""
    write_tar(
        folder / "train-000000.tar",
        [
            ("a.json", b"{}"),
            ("a.npy", npy([0, 1, END])),
            ("b.docs.npy", npy([0, 2, 2, 3], "<u4")),
            ("b.npy", npy([0, END, END, 2, 2, END])),
            ("b.txt", b"text"),
        ],
        format=tarfile.USTAR_FORMAT,
    )
    long_name = "folder/" * 30 + "c.npy"
    write_tar(folder / "train-000010.tar", [(long_name, npy([1, 1, END]))], format=tarfile.PAX_FORMAT)
    write_tar(folder / "train-9.tar", [(long_name, npy([0, 0, 0, END])), ("d.npy", npy([]))], format=tarfile.GNU_FORMAT)
    write_tar(folder / "test-0.tar", [("a.npy", npy([2, END]))])
    return folder


def test_foreign_tars_become_a_corpus_that_can_be_read_and_verified(tmp_path: Path, tokenizer: Path) -> None:
    folder = foreign_tars(tmp_path / "tars")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    summary = reindex_corpus(folder, tokenizer_path=tokenizer)
    assert {name: (folder / name).read_bytes() for name in before} == before
    corpus = open_corpus(folder)
    assert corpus.split_names == ("test", "train")
    train = corpus.split("train")
    assert [shard.name for shard in train.shards] == ["train-000000.tar", "train-9.tar", "train-000010.tar"]
    assert [document.tolist() for document in train.each_document()] == [
        [0, 1, END],
        [0, END],
        [END],
        [2, 2, END],
        [0, 0, 0, END],
        [1, 1, END],
    ]
    assert (train.documents, train.tokens, train.longest) == (6, 16, 4)
    assert (train.text_bytes, train.text_characters) == (12, 10)
    assert train.counts().tolist() == [5, 3, 2, 6, 0]
    assert corpus.statistics == {"empty_documents_dropped": 2, "unended_documents": 0}
    assert (summary.ignored, summary.num_unended) == ({".json": 1, ".txt": 1}, 0)
    assert verify_corpus(folder) == []
    assert strangers(corpus) == []


def test_a_corpus_of_ours_gets_the_same_files_again(tmp_path: Path) -> None:
    texts = [*random_texts(count=40), "long " * 1000]
    corpus = tiny_corpus(tmp_path, texts=texts, shard_len=2500)
    copy = Path(shutil.copytree(corpus.folder, tmp_path / "copy"))
    (corpus.folder / "prepared.json").unlink()  # how the text was prepared says nothing of an index of tars
    summary = reindex_corpus(copy, tokenizer_path=copy / "tokenizer.json", overwrite=True)
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in corpus.folder.iterdir())
    for path in corpus.folder.iterdir():
        if path.name != "index.json":
            assert (copy / path.name).read_bytes() == path.read_bytes(), path.name
    old, new = (json.loads((folder / "index.json").read_text()) for folder in (corpus.folder, copy))
    assert new["splits"] == old["splits"]
    assert (summary.ignored, summary.num_unended) == ({}, 0)


def test_samples_of_plain_webdataset_with_its_default_headers_are_read(tmp_path: Path, tokenizer: Path) -> None:
    import webdataset

    (tmp_path / "tars").mkdir()
    documents = [[0] * n + [END] for n in range(30)]
    with webdataset.TarWriter(str(tmp_path / "tars" / "mine.tar")) as writer:
        for i, document in enumerate(documents):
            writer.write({"__key__": f"sample{i}", "npy": np.array(document, np.uint16), "json": {"i": i}})
    reindex_corpus(tmp_path / "tars", tokenizer_path=tokenizer)
    train = open_corpus(tmp_path / "tars").split("train")
    assert [document.tolist() for document in train.each_document()] == documents
    assert verify_corpus(tmp_path / "tars") == []


def link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("b.npy")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


GOOD = ("a.npy", npy([0, END]))
TOO_DEEP = b"\x93NUMPY\x01\x00" + (500).to_bytes(2, "little") + b"{'descr': " + b"(" * 300 + b" " * 190
REFUSED: dict[str, tuple[list[tuple[str | tarfile.TarInfo, bytes]], str]] = {
    "a name with ..": ([GOOD, ("x/../../b.npy", npy([0]))], r"'x/\.\./\.\./b\.npy': its name leads out"),
    "an absolute name": ([GOOD, ("/tmp/b.npy", npy([0]))], r"'/tmp/b\.npy': its name leads out"),
    "a symbolic link": ([GOOD, (link(tarfile.SYMTYPE), b"")], r"'b\.npy': it is a link"),
    "a hard link": ([GOOD, (link(tarfile.LNKTYPE), b"")], r"'b\.npy': it is a link"),
    "a device": ([GOOD, (link(tarfile.CHRTYPE), b"")], r"'b\.npy': it is not a file"),
    "a pipe": ([GOOD, (link(tarfile.FIFOTYPE), b"")], r"'b\.npy': it is not a file"),
    "a pickle": ([GOOD, ("b.npy", npy([{}], "O"))], r"b\.npy contains an array of type \|O"),
    "signed ids": (
        [("b.npy", npy([0], "<i8"))],
        r"b\.npy contains an array of type <i8\. Write the ids as little-endian uint16",
    ),
    "big-endian ids": ([("b.npy", npy([0], ">u2"))], r"b\.npy contains an array of type >u2"),
    "floats": ([("b.npy", npy([0], "<f4"))], r"b\.npy contains an array of type <f4"),
    "two dimensions": ([("b.npy", npy([[0, 1], [1, 0]]))], r"b\.npy has the shape \(2, 2\)"),
    "Fortran order": ([("b.npy", npy([[0, 1], [1, 0]], order="F"))], r"shape \(2, 2\) in Fortran order"),
    "two types": (
        [GOOD, ("b.npy", npy([0], "<u4"))],
        r"sample b contains ids of type uint32, but .* sample a contains ids of type uint16",
    ),
    "ids too large": ([GOOD, ("b.npy", npy([5]))], r"sample b: id 5 is outside the vocabulary of 5.*tokenizer-file"),
    "no npy": ([GOOD, ("b.npy", b"abc")], r"b\.npy is damaged: its npy header"),
    "a header of Python": ([("b.npy", TOO_DEEP)], r"b\.npy is damaged: its npy header"),
    "values missing": ([GOOD, ("b.npy", npy([0, 1])[:-2])], r"b\.npy is damaged or cut: .* says 2 values"),
    "starts alone": (
        [GOOD, ("b.docs.npy", npy([0], "<u4"))],
        r"tokens b\.npy do not stand directly before or after b\.docs\.npy",
    ),
    "starts that fall": ([("b.docs.npy", npy([0, 2, 1], "<u4")), ("b.npy", npy([0] * 3))], r"starts .* must ascend"),
    "starts too large": ([("b.docs.npy", npy([0, 4], "<u4")), ("b.npy", npy([0] * 3))], r"starts .* must ascend"),
    "starts behind 0": ([("b.docs.npy", npy([1], "<u4")), ("b.npy", npy([0] * 3))], r"starts .* must ascend"),
    "a key with a dot": ([("b.v1.npy", npy([0]))], r"b\.v1\.npy: the key of a sample ends at the first dot"),
    "a key twice": ([GOOD, ("b.npy", npy([0])), GOOD], r"sample a: a\.npy occurs twice"),
    "no tokens": ([("a.json", b"{}")], r"contain no tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tar_of_tokens_is_refused_and_leaves_nothing(name: str, tmp_path: Path, tokenizer: Path) -> None:
    members, message = REFUSED[name]
    folder = tmp_path / "tars"
    write_tar(folder / "train-000000.tar", [GOOD] if members[0] == GOOD else [("z.json", b"")])
    path = write_tar(folder / "train-000001.tar", members)
    with pytest.raises(DataError, match=message) as raised:
        reindex_corpus(folder, tokenizer_path=tokenizer)
    assert path.name in str(raised.value) or name == "no tokens"
    assert sorted(each.name for each in folder.iterdir()) == ["train-000000.tar", "train-000001.tar"]


def test_nothing_in_a_tar_is_unpickled(tmp_path: Path, tokenizer: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap()], dtype=object), allow_pickle=True)
    write_tar(tmp_path / "tars" / "a.tar", [GOOD, ("b.npy", buffer.getvalue()), ("c.pkl", buffer.getvalue())])
    with pytest.raises(DataError, match="contains an array of type"):
        reindex_corpus(tmp_path / "tars", tokenizer_path=tokenizer)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_cut_anywhere_is_refused(tar_format: int, tmp_path: Path, tokenizer: Path) -> None:
    members = [("folder/" * 30 + f"{i}.npy", npy([0] * 700)) for i in range(3)]
    path = write_tar(tmp_path / "tars" / "a.tar", members, format=tar_format)
    content = path.read_bytes()
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    for length in [*range(0, end, 512), *range(100, end, 1700), end + 512]:
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"a\.tar"):
            reindex_corpus(path.parent, tokenizer_path=tokenizer)


@pytest.mark.slow
def test_no_flipped_bit_in_a_header_is_more_than_an_error(tmp_path: Path, tokenizer: Path) -> None:
    path = write_tar(tmp_path / "tars" / "a.tar", [("a.npy", npy([0] * 9)), ("b.npy", npy([1] * 9))])
    content = path.read_bytes()
    for offset, bit in itertools.product(range(0, 1024 + 128, 7), range(8)):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            corpus = reindex_corpus(path.parent, tokenizer_path=tokenizer, overwrite=True).corpus
        except DataError:
            continue
        documents = [document.tolist() for document in corpus.split("train").each_document()]
        if offset < 512 + 128:  # behind it lie the tokens themselves, which nothing proves yet
            assert documents == [[0] * 9, [1] * 9]


def test_two_tars_joined_into_one_file_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    path = write_tar(tmp_path / "tars" / "a.tar", [GOOD])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DataError, match="contains more data after the end of the tar"):
        reindex_corpus(path.parent, tokenizer_path=tokenizer)


def test_an_index_is_replaced_only_on_request_and_only_by_a_good_one(tmp_path: Path, tokenizer: Path) -> None:
    folder = foreign_tars(tmp_path / "tars")
    first = reindex_corpus(folder, tokenizer_path=tokenizer).corpus
    with pytest.raises(DataError, match="--overwrite"):
        reindex_corpus(folder, tokenizer_path=tokenizer)
    again = reindex_corpus(folder, tokenizer_path=tokenizer, overwrite=True).corpus
    assert again.fingerprint == first.fingerprint
    write_tar(folder / "train-11.tar", [GOOD])
    write_tar(folder / "valid-0.tar", [("a.npy", npy([9]))])
    with pytest.raises(DataError, match=r"valid-0\.tar"):
        reindex_corpus(folder, tokenizer_path=tokenizer, overwrite=True)
    assert open_corpus(folder).fingerprint == first.fingerprint
    assert [problem for problem in verify_corpus(folder) if "train-11" not in problem] == []
    assert strangers(first) == ["train-11.tar", "valid-0.tar"]


def test_documents_that_do_not_end_and_tars_without_tokens_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    write_tar(tmp_path / "tars" / "a.tar", [("a.npy", npy([0, END])), ("b.npy", npy([0, 1]))])
    write_tar(tmp_path / "tars" / "b.tar", [("a.json", b"{}")])
    summary = reindex_corpus(tmp_path / "tars", tokenizer_path=tokenizer)
    assert (summary.num_unended, summary.num_without_tokens) == (1, 1)
    lines = "\n".join(summary.lines())
    for line in (
        "members ignored: 1 .json",
        "tars without tokens, left out: 1",
        "without an end-of-text token at the end: 1",
    ):
        assert line in lines
    assert [shard.name for shard in summary.corpus.split("train").shards] == ["a.tar"]
    assert verify_corpus(tmp_path / "tars") == []


def test_tars_are_found_by_name_and_those_elsewhere_or_compressed_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    names = ["other.tar", "TRAIN-3.TAR", "train-2.tar", "train-10.tar", "._x.tar"]
    for name in names:
        write_tar(folder / name, [])
    (folder / "notes.txt").write_text("")
    (folder / "train-2.tar.idx").write_text("")
    assert [path.name for path in find_tars(folder)] == ["TRAIN-3.TAR", "other.tar", "train-2.tar", "train-10.tar"]
    assert find_tars(folder, [folder]) == find_tars(folder)
    assert find_tars(folder, [folder / "train-2.tar"]) == [folder / "train-2.tar"]
    elsewhere = write_tar(tmp_path / "train-1.tar", [])
    with pytest.raises(DataError, match=r"is not in .* Set the output to the folder that contains the tars"):
        find_tars(folder, [elsewhere])
    for name in ("train-3.tar.gz", "train-3.TAR.GZ", "train-3.tgz"):
        compressed = write_tar(folder / name, [])
        with pytest.raises(DataError, match=rf"{name} is not an uncompressed \.tar file.*gunzip"):
            find_tars(folder)
        compressed.unlink()
    with pytest.raises(DataError, match="is not a folder"):
        find_tars(elsewhere)
    with pytest.raises(DataError, match=r"cannot read .*train-99\.tar"):
        find_tars(folder, [folder / "train-99.tar"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.tar file"):
        find_tars(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *[(f"{word}{number}.tar", "valid") for word in ("valid", "validation", "val", "dev") for number in ("", "_0")],
        *[(f"{word}.tar", "valid") for word in ("eval", "evaluation", "heldout", "held-out-00", "holdout_3", "devset")],
        *[(name, "valid") for name in ("my-valid-000.tar", "VAL-00.tar", "Dev.TAR", "wiki.valid.tar", "dev_clean.tar")],
        *[
            (name, "test")
            for name in ("test_000.tar", "test.tar", "test0.tar", "Test.000.tar", "TEST-0.TAR", "tst.tar")
        ],
        *[(name, "test") for name in ("test-00000-of-00032.tar", "test-00000-of-00001-6fbcb5959cd8d5bf.tar")],
        *[(name, "test") for name in ("wiki-test-001.tar", "testing-0.tar", "tests.tar", "test_shard_0001.tar")],
        *[(name, "train") for name in ("train.tar", "shard-000000.tar", "00000.tar", "wiki-0.tar", "latest-1.tar")],
        *[(name, "train") for name in ("training_000.tar", "train-00000-of-00032.tar", "contest.tar", "devices.tar")],
    ],
)
def test_a_tar_belongs_to_the_split_that_its_name_says_by_the_rule_of_text(
    tmp_path: Path, name: str, split: str
) -> None:
    for others in (["shard-000001.tar"], ["train-000001.tar", "train-000002.tar"]):
        splits, said = split_tars([tmp_path / each for each in (name, *others)])
        assert [found for found, tars in splits.items() if tmp_path / name in tars] == [split]
        assert (f"split chosen by name: {tmp_path}/{name}." in "".join(said)) == (split != "train")


def test_held_out_tars_are_not_trained_on_unless_names_are_ignored_and_the_command_says_which(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tars"
    for name in ("train-000000.tar", "valid.tar", "test_000.tar"):
        write_tar(folder / name, [("a.npy", npy([0, END]))])
    words = ["prepare", "--reindex", "--out", str(folder), "--tokenizer-file", str(tokenizer)]
    assert main(words) == 0
    assert f"valid split chosen by name: {folder}/valid.tar. To train on these files too, use --ignore-split-names" in (
        capsys.readouterr().out
    )
    splits = open_corpus(folder).splits
    names = {name: [shard.name for shard in split.shards] for name, split in splits.items()}
    assert names == {"train": ["train-000000.tar"], "valid": ["valid.tar"], "test": ["test_000.tar"]}
    assert main([*words, "--overwrite", "--ignore-split-names"]) == 0
    assert len(open_corpus(folder).split("train").shards) == 3
    assert strangers(open_corpus(folder)) == []


def test_a_folder_of_tars_may_have_any_name(tmp_path: Path) -> None:
    for name in ("test", "eval_tars", "train"):
        splits, _ = split_tars([tmp_path / name / "shard-0.tar", tmp_path / name / "shard-1.tar"])
        assert list(splits) == ["train"]


def test_a_compressed_tar_under_the_name_of_a_plain_one_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.npy"))
    with pytest.raises(DataError, match=r"a\.tar"):
        reindex_corpus(folder, tokenizer_path=tokenizer)


def test_the_command_reindexes_a_folder_and_refuses_flags_that_would_have_no_effect(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = foreign_tars(tmp_path / "tars")
    words = ["prepare", "--reindex", "--out", str(folder), "--tokenizer-file", str(tokenizer)]
    for flags in (["--seed", "3"], ["--valid", "x"], ["--shard-len", "5"]):
        assert main([*words, *flags]) == 2
        assert flags[0].strip("-").replace("-", "_") in capsys.readouterr().err
    assert main(words[:4]) == 2
    assert "--tokenizer-file" in capsys.readouterr().err
    assert main(words) == 0
    assert "members ignored: 1 .json" in capsys.readouterr().out
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, str(folder), "--overwrite"]) == 0
    assert main(["verify", str(folder)]) == 0


def test_tars_of_a_foreign_tokenizer_keep_its_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    library = Tokenizer(WordLevel({"rare": 0, "often": 1, "<unk>": 2}, unk_token="<unk>"))
    library.pre_tokenizer = Whitespace()
    library.save(str(tmp_path / "foreign.json"))
    write_tar(tmp_path / "tars" / "a.tar", [("a.npy", npy([1, 1, 1, 0, 3])), ("b.npy", npy([1, 3]))])
    summary = reindex_corpus(tmp_path / "tars", tokenizer_path=tmp_path / "foreign.json")
    train = summary.corpus.split("train")
    assert train.read_all().tolist() == [1, 1, 1, 0, 3, 1, 3]
    tokenizer = summary.corpus.tokenizer
    assert tokenizer.end_of_text == 3, "added behind the foreign ids"
    texts = [tokenizer.decode([1, 1, 1, 0]), tokenizer.decode([1])]
    assert texts == ["often often often rare", "often"]
    assert train.text_bytes == train.text_characters == sum(map(len, texts))
    assert summary.num_unended == 0
    assert verify_corpus(tmp_path / "tars") == []


def test_a_foreign_tokenizer_with_gaps_between_its_ids_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0, "b": 7})).save(str(tmp_path / "foreign.json"))
    write_tar(tmp_path / "tars" / "a.tar", [GOOD])
    with pytest.raises(DataError, match="have gaps"):
        reindex_corpus(tmp_path / "tars", tokenizer_path=tmp_path / "foreign.json")
