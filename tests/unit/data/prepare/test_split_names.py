"""Files that are named for a split belong to this split, and test text is never trained on without a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.prepare.sources import list_sources
from txl_dist.data.prepare.split_names import split_by_name, splits_of_paths
from txl_dist.errors import ConfigError, DataError


def laid_out(folder: Path, *names: str) -> Path:
    """Files that hold their own names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return folder


def splits_of(*inputs: str | Path) -> tuple[dict[str, set[str]], str]:
    """(names of the files by split, all sentences)."""
    found = [(str(one), list_sources([one], PrepareSettings(()), split="train").files) for one in inputs]
    named = split_by_name(found)
    splits: dict[str, set[str]] = {"train": set(), "valid": set(), "test": set()}
    for file in (file for own in named.files for file in own):
        splits[file.split].add(Path(file.path).read_text().removeprefix("text of "))
    return splits, "\n".join(named.remarks)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("test.txt", "test"),
        ("TEST.TXT", "test"),
        ("Test.txt", "test"),
        ("valid.txt", "valid"),
        ("validation.txt", "valid"),
        ("val.jsonl", "valid"),
        ("dev.jsonl", "valid"),
        ("Dev/a.txt", "valid"),
        ("deep/below/VALIDATION/a.txt", "valid"),
        ("test/deep/a.txt", "test"),
        ("test/train.txt", "test"),
        ("train/test.txt", "test"),
        ("wiki.valid.tokens", "valid"),
        ("wiki.test.tokens", "test"),
        ("test.en.txt", "test"),
        ("train-00001.jsonl.gz", "train"),
        ("test-00001.jsonl.gz", "test"),
        ("test-00001-of-00041.parquet", "test"),
        ("validation_part_3.txt", "valid"),
        ("valid2.txt", "valid"),
        ("test-01/a.txt", "test"),
        ("latest.txt", "train"),
        ("contest.txt", "train"),
        ("invalid.txt", "train"),
        ("developer.txt", "train"),
        ("tests/a.txt", "train"),
        ("protest/a.txt", "train"),
    ],
)
def test_a_name_says_the_split_or_not(tmp_path: Path, name: str, split: str) -> None:
    splits, said = splits_of(laid_out(tmp_path / "data", "novel.txt", name))
    assert {own for own, names in splits.items() if name in names} == {split}
    assert (name in said) == (split in ("valid", "test"))
    assert ("--ignore-split-names" in said) == (split in ("valid", "test"))


@pytest.mark.parametrize("name", ["dev-notes.md", "x_test_2.py", "train_test.txt"])
def test_a_page_or_program_with_more_than_the_split_in_its_name_counts_only_beside_its_counterpart_of_train(
    tmp_path: Path, name: str
) -> None:
    splits, said = splits_of(laid_out(tmp_path / "alone", "novel.txt", name))
    assert name in splits["train"]
    assert f"used for training, although named like validation or test text: {tmp_path}/alone/{name}." in said
    assert "--test PATH" in said
    if name != "train_test.txt":
        like = name.replace("test", "train").replace("dev", "train")
        splits, said = splits_of(laid_out(tmp_path / "both", "novel.txt", name, like))
        assert name not in splits["train"]
        assert {"novel.txt", like} == splits["train"]
        assert "split chosen by name" in said


HELD, SAID, SILENT = "held out, and said", "trained on, and said", "trained on"
BESIDE = {  # name: (what becomes of it alone, and beside train/a.txt)
    # held out by themselves
    **dict.fromkeys(("test/b.txt", "Test.txt", "dev2.txt", "validation-00.txt", "v1.test.txt"), (HELD, HELD)),
    **dict.fromkeys(("eval.jsonl", "evaluation/b.txt", "EVAL_00.txt", "tst2013.txt", "newstest2014.txt"), (HELD, HELD)),
    **dict.fromkeys(("heldout.txt", "held_out.txt", "held-out/b.txt", "holdout/b.txt", "HeldOut.txt"), (HELD, HELD)),
    **dict.fromkeys(("test-v1.1.jsonl", "dev_part2.txt", "val-chunk-3.txt", "valid_10k.txt"), (HELD, HELD)),
    "valid/test_notes.txt": (HELD, HELD),
    # as hubs number and partition
    **dict.fromkeys(("c4-validation.00000-of-00008.jsonl.gz", "wiki-test-00000-of-00001.parquet"), (HELD, HELD)),
    **dict.fromkeys(("test-00000-of-00001-6fbcb5959cd8d5bf.parquet", "TEST_0_of_8.txt"), (HELD, HELD)),
    **dict.fromkeys(("test-00000-0b1c9d52-7a4e-4d3b-9f00-1a2b3c4d5e6f.c000.jsonl", "testing-1-of-2.txt"), (HELD, HELD)),
    **dict.fromkeys(("split=test/part-0.txt", "default/validation/0000.parquet", "data/dev/x/y/0.txt"), (HELD, HELD)),
    # with a filler
    **dict.fromkeys(("test_data/b.txt", "test set/b.txt", "test-set-2/b.txt", "Test Data/b.txt"), (HELD, HELD)),
    **dict.fromkeys(("testset.txt", "testData.txt", "TestSet/b.txt", "TESTSET/b.txt", "testdata/b.txt"), (HELD, HELD)),
    **dict.fromkeys(("devset.txt", "valset/b.txt", "validset.txt", "evalset.jsonl", "data_test.txt"), (HELD, HELD)),
    **dict.fromkeys(
        ("dev_set.txt", "valSet/b.txt", "testsplit/b.txt", "test_corpus.txt", "dev texts/b.txt"), (HELD, HELD)
    ),
    "Eval_data.txt": (HELD, HELD),
    # another word with it
    **dict.fromkeys(("test-clean/b.txt", "dev-clean/b.txt", "test-other/b.txt", "my_test/b.txt"), (HELD, HELD)),
    **dict.fromkeys(("validation_matched.jsonl", "a.dev-b.txt", "wikiTest.txt", "newsEval/b.txt"), (HELD, HELD)),
    **dict.fromkeys(("my_val_03.txt", "valid_a.jsonl", "wiki-test.txt", "enwik8-test.txt"), (HELD, HELD)),
    "dev-notes.md": (SAID, HELD),
    **dict.fromkeys(("train/test_notes.txt", "train_test/b.txt", "test-clean/train.txt"), (SAID, SAID)),
    # of code bases too
    **dict.fromkeys(("tests/b.txt", "testing/b.txt", "testing.md", "evaluation.md"), (SILENT, HELD)),
    **dict.fromkeys(("tests_unit/b.txt", "docs/development_notes.md"), (SILENT, SILENT)),
    **dict.fromkeys(("test_model.py", "loader_test.py"), (SAID, SAID)),
    **dict.fromkeys(("evaluation.py", "read/eval.PY", "testing.py", "held_out.py"), (SILENT, SILENT)),
    "report/validation.py": (SILENT, SILENT),
    # no name of a split
    **dict.fromkeys(("latest.txt", "contest.txt", "attest.txt", "protest/b.txt", "detest.txt"), (SILENT, SILENT)),
    **dict.fromkeys(("testament.txt", "invalid.txt", "developer.txt", "device/b.txt", "value.txt"), (SILENT, SILENT)),
    **dict.fromkeys(("evaluate.py", "evaluator/b.py", "trainer.txt", "dataset.txt", "medieval.txt"), (SILENT, SILENT)),
    **dict.fromkeys(("latestData.txt", "greatest hits/b.txt", "set.txt"), (SILENT, SILENT)),
    **dict.fromkeys(("part-00000-of-00032.parquet", "shard_000.jsonl", "00000000.txt"), (SILENT, SILENT)),
}


def fate_of(name: str, folder: Path) -> str:
    splits, said = splits_of(folder)
    if name not in splits["train"]:
        assert f"split chosen by name: {folder}/{name}." in said
        return HELD
    return (
        SAID if f"used for training, although named like validation or test text: {folder}/{name}." in said else SILENT
    )


@pytest.mark.parametrize(("name", "alone", "beside"), [(name, *fates) for name, fates in BESIDE.items()])
def test_what_looks_held_out_is_held_out_or_said_alone_and_beside_a_folder_of_train(
    tmp_path: Path, name: str, alone: str, beside: str
) -> None:
    assert fate_of(name, laid_out(tmp_path / "alone", "novel.txt", name)) == alone
    assert fate_of(name, laid_out(tmp_path / "both", "train/a.txt", name)) == beside


@pytest.mark.parametrize(
    ("train", "other"),
    [
        ("train-clean-100", "test-clean"),
        ("train-clean-360", "dev-clean"),
        ("train_matched", "validation_matched"),
        ("trainset", "test_data"),
        ("myTrain", "myTestSet"),
        ("unit_train", "unit_tests"),
        ("wikitext.train", "wikitext.eval"),
    ],
)
def test_a_folder_beside_its_like_of_train_is_held_out(tmp_path: Path, train: str, other: str) -> None:
    data = laid_out(tmp_path / "data", "novel.txt", f"{train}/a.txt", f"{other}/deep/b.txt")
    assert fate_of(f"{other}/deep/b.txt", data) == HELD
    assert splits_of(data)[0]["train"] == {"novel.txt", f"{train}/a.txt"}
    assert not splits_of(data / train, data / other)[0]["train"] & {f"{other}/deep/b.txt"}
    splits, said = splits_of(data / other)
    assert splits["train"] == {f"{other}/deep/b.txt"}
    assert ("though named like validation or test text" in said) == (other != "unit_tests")


def test_an_input_of_any_name_with_splits_in_it_is_not_doubted(tmp_path: Path) -> None:
    data = laid_out(tmp_path / "my_test_run", "train.txt", "dev.txt", "other.txt")
    splits, said = splits_of(data)
    assert splits == {"train": {"train.txt", "other.txt"}, "valid": {"dev.txt"}, "test": set()}
    assert f"though named like validation or test text: {data}/other.txt." in said


def test_files_given_one_by_one_count_beside_each_other_as_the_shell_expands_a_pattern(tmp_path: Path) -> None:
    laid_out(tmp_path, "train.txt", "test.txt", "novel.txt", "train/a.txt", "test/a.txt")
    assert splits_of(tmp_path / "train.txt", tmp_path / "test.txt")[0]["test"] == {"test.txt"}
    assert splits_of(tmp_path / "train", tmp_path / "test")[0]["test"] == {"test/a.txt"}
    for alone in ([tmp_path / "test.txt"], [tmp_path / "novel.txt", tmp_path / "test.txt"], [tmp_path / "test"]):
        splits, said = splits_of(*alone)
        assert not splits["test"]
        assert "though named like validation or test text" in said
    assert splits_of(f"{tmp_path}/t*.txt")[0]["test"] == {"test.txt"}
    assert splits_of(f"{tmp_path}/**/*.txt")[0]["test"] == {"test.txt", "test/a.txt"}
    assert splits_of(tmp_path / "train.txt") == ({"train": {"train.txt"}, "valid": set(), "test": set()}, "")


def test_files_given_one_by_one_from_folders_of_splits_keep_them(tmp_path: Path) -> None:
    names = ["data/train/0.txt", "data/train/1.txt", "data/test/0.txt", "data/dev/0.txt"]
    laid_out(tmp_path, *names)
    splits, _ = splits_of(*(tmp_path / name for name in names))
    assert splits == {"train": set(names[:2]), "valid": {"data/dev/0.txt"}, "test": {"data/test/0.txt"}}
    splits, said = splits_of(tmp_path / "data/dev/0.txt")
    assert (splits["train"], said) == ({"data/dev/0.txt"}, "")  # of one input the name counts, and not where it lies


def test_a_page_with_more_words_is_held_out_below_a_folder_with_train_in_it_and_not_beside_one(tmp_path: Path) -> None:
    data = laid_out(tmp_path / "data", "a/train.txt", "a/deep/my_test.md", "b/my_test.md", "b/my_test.txt")
    splits, said = splits_of(data)
    held_out = {"a/deep/my_test.md", "b/my_test.txt"}
    assert splits == {"train": {"a/train.txt", "b/my_test.md"}, "valid": set(), "test": held_out}
    assert f"though named like validation or test text: {data}/b/my_test.md." in said


@pytest.mark.parametrize("name", ["valid", "my_val_03", "valid_a", "wiki-test", "test_000", "dev-clean", "testset-1"])
def test_text_and_tars_of_one_name_belong_to_the_same_split(name: str) -> None:
    for suffix in (".txt", ".jsonl.gz", ".parquet", ".tar"):
        (splits,), _ = splits_of_paths([("data", [f"data/novel{suffix}", f"data/{name}{suffix}"])])
        assert splits == ["train", "test" if "test" in name else "valid"]


def test_unit_tests_of_a_program_named_train_are_text_as_before(tmp_path: Path) -> None:
    files = {"train.py", "model.py", "test_model.py", "tests/model_test.py"}
    files |= {"evaluation.py", "eval.py", "validation.py"}
    assert splits_of(laid_out(tmp_path / "code", *files))[0]["train"] == files


def test_dev_and_val_are_both_held_out_and_said(tmp_path: Path) -> None:
    splits, said = splits_of(laid_out(tmp_path, "train.txt", "dev.txt", "val.txt"))
    assert splits == {"train": {"train.txt"}, "valid": {"dev.txt", "val.txt"}, "test": set()}
    assert "valid split chosen by name (dev and val together)" in said


def test_the_built_in_text_has_no_splits() -> None:
    found = [("stdlib", list_sources(["stdlib"], PrepareSettings(()), split="train").files)]
    named = split_by_name(found)
    assert named.remarks == []
    assert {file.split for file in named.files[0]} == {"train"}


def texts_of(folder: Path) -> dict[str, list[str]]:
    corpus = open_corpus(folder)
    decode = corpus.tokenizer.decode
    return {
        split: [decode(tokens[:-1].tolist()).removeprefix("text of ") for tokens in corpus.split(split).each_document()]
        for split in corpus.split_names
    }


def test_a_folder_of_splits_keeps_them_and_says_so(tmp_path: Path) -> None:
    data = laid_out(tmp_path / "data", "train.txt", "valid.txt", "test.txt")
    summary = prepare_corpus(tmp_path / "out", inputs=[data], kind="byte")
    assert texts_of(tmp_path / "out") == {"train": ["train.txt"], "valid": ["valid.txt"], "test": ["test.txt"]}
    said = "\n".join(summary.lines())
    assert f"test split chosen by name: {data}/test.txt." in said
    assert f"valid split chosen by name: {data}/valid.txt." in said


def test_with_train_and_test_but_no_valid_a_share_of_train_is_valid_and_test_text_stays_out_of_it(
    tmp_path: Path,
) -> None:
    names = [f"train/{number}.txt" for number in range(100)]
    data = laid_out(tmp_path / "data", *names, "test/1.txt")
    prepare_corpus(tmp_path / "out", inputs=[data], kind="byte", valid_fraction=0.2)
    texts = texts_of(tmp_path / "out")
    assert texts["test"] == ["test/1.txt"]
    assert 5 < len(texts["valid"]) < 40
    assert sorted(texts["train"] + texts["valid"]) == sorted(names)


def test_the_flag_takes_all_as_training_text(tmp_path: Path) -> None:
    data = laid_out(tmp_path / "data", "train.txt", "valid.txt", "test.txt")
    settings: dict[str, Any] = {"inputs": [data], "kind": "byte", "valid_fraction": 0.0}
    summary = prepare_corpus(tmp_path / "out", ignore_split_names=True, **settings)
    assert sorted(texts_of(tmp_path / "out")["train"]) == ["test.txt", "train.txt", "valid.txt"]
    assert summary.remarks == ()


def test_held_out_text_that_is_given_and_lies_in_the_folder_too_goes_where_it_was_given_for(tmp_path: Path) -> None:
    data = laid_out(tmp_path / "data", "train.txt", "valid.txt", "test.txt")
    settings: dict[str, Any] = {"valid_inputs": [data / "test.txt"], "test_inputs": [data / "valid.txt"]}
    prepare_corpus(tmp_path / "out", inputs=[data], kind="byte", **settings)
    assert texts_of(tmp_path / "out") == {"train": ["train.txt"], "valid": ["test.txt"], "test": ["valid.txt"]}


def test_a_share_beside_named_held_out_files_and_a_folder_without_training_text_are_refused(tmp_path: Path) -> None:
    data = laid_out(tmp_path / "data", "train.txt", "dev.txt")
    with pytest.raises(ConfigError, match=r"valid_fraction=0.3 has no effect, .*--ignore-split-names"):
        prepare_corpus(tmp_path / "out", inputs=[data], valid_fraction=0.3)
    data = laid_out(tmp_path / "others", "test.txt", "dev.txt")
    with pytest.raises(DataError, match=r"no text for the train split.*--ignore-split-names"):
        prepare_corpus(tmp_path / "out", inputs=[data])


def test_names_count_below_urls_too(tmp_path: Path) -> None:
    data = laid_out(tmp_path / "data", "train.txt", "dev.txt", "latest.txt")
    named = split_by_name(
        [(f"file://{data}", list_sources([f"file://{data}"], PrepareSettings(()), split="train").files)]
    )
    splits = {Path(file.path).name: file.split for file in named.files[0]}
    assert splits == {"train.txt": "train", "dev.txt": "valid", "latest.txt": "train"}


@pytest.mark.parametrize("query", ["", "?download=true", "?split=test&x=dev", "#test"])
def test_urls_given_one_by_one_count_beside_each_other_without_what_they_ask(query: str) -> None:
    base = "https://hub.example/resolve/main/data"
    urls = [f"{base}/{name}{query}" for name in ("train-0.txt", "test%20set/0.txt", "val-00000-of-00001.txt", "x.txt")]
    splits = splits_of_paths([(url, [url]) for url in urls]).splits
    assert splits == [["train"], ["test"], ["valid"], ["train"]]
