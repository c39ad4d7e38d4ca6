"""`--near-duplicates drop` leaves the first document of each cluster that a comparison of all pairs finds."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import write_jsonl
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare import minhash, near_duplicates
from txl_dist.data.prepare.cluster import prepare_on_cluster
from txl_dist.data.prepare.minhash import NUM_HASHES, band_table, rows_of_bands, sign
from txl_dist.data.prepare.near_duplicates import join
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.run import PrepareSummary, prepare_corpus
from txl_dist.data.verify.inspect import corpus_facts, corpus_lines
from txl_dist.data.workers import PoolWorkers
from txl_dist.errors import ConfigError

RUN_LEN = 5
SETTINGS: dict[str, Any] = {"kind": "word", "near_duplicates": "drop", "num_workers": 1}


def texts_with_copies(generator: np.random.Generator, *, originals: int, copies: int) -> list[str]:
    """Texts of 12 to 150 words, and copies of them in which up to a fifth of the words are others."""
    texts = [generator.integers(0, 2000, generator.integers(12, 150)) for _ in range(originals)]
    for _ in range(copies):
        copy = texts[generator.integers(originals)].copy()
        is_changed = generator.random(len(copy)) < generator.choice([0.01, 0.02, 0.03, 0.05, 0.2])
        copy[is_changed] = generator.integers(0, 2000, is_changed.sum())
        texts.append(copy)
    order = generator.permutation(len(texts))
    return [" ".join(f"w{word}" for word in texts[i]) for i in order]


def runs_of(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + RUN_LEN]) for i in range(len(words) - RUN_LEN + 1)}


def similarities(texts: list[str]) -> dict[tuple[int, int], float]:
    """Exact Jaccard similarity of all pairs of texts that share a run. All other pairs have 0."""
    runs = [runs_of(text) for text in texts]
    owners = defaultdict(list)
    for number, runs_of_text in enumerate(runs):
        for run in runs_of_text:
            owners[run].append(number)
    num_common: dict[tuple[int, int], int] = defaultdict(int)
    for numbers in owners.values():
        for pair in combinations(numbers, 2):
            num_common[pair] += 1
    return {(a, b): count / (len(runs[a]) + len(runs[b]) - count) for (a, b), count in num_common.items()}


def clusters(count: int, links: list[tuple[int, int]]) -> list[int]:
    """First member of each number's connected component, by repeated passes over the links."""
    first = list(range(count))
    is_changed = True
    while is_changed:
        is_changed = False
        for a, b in links:
            lowest = min(first[a], first[b])
            is_changed = is_changed or first[a] != lowest or first[b] != lowest
            first[a] = first[b] = lowest
    return first


def prepared(folder: Path, texts: list[str], **settings: Any) -> PrepareSummary:
    source = folder / "texts.jsonl"
    if not source.exists():  # a new time of the file would be another input
        write_jsonl(source, texts)
    settings = {**SETTINGS, "inputs": [source], **settings}
    return prepare_corpus(folder / "out", **settings)


def kept(folder: Path, split: str = "train") -> list[str]:
    corpus = open_corpus(folder / "out")
    decode = corpus.tokenizer.decode
    return [" ".join(decode(document[:-1].tolist()).split()) for document in corpus.split(split).each_document()]


def test_of_two_thousand_documents_those_are_dropped_that_a_comparison_of_all_pairs_drops(tmp_path: Path) -> None:
    texts = texts_with_copies(np.random.default_rng(0), originals=1400, copies=600)
    unique = list(dict.fromkeys(texts))
    summary = prepared(tmp_path, texts, valid_fraction=0.0)
    similarity = similarities(unique)
    near = [pair for pair, value in similarity.items() if value >= 0.8]
    first = clusters(len(unique), near)
    expected = {unique[i] for i in range(len(unique)) if first[i] != i}
    dropped = set(unique) - set(kept(tmp_path))
    statistics = summary.corpus.statistics
    assert len(dropped) == statistics["near_duplicates"] == statistics["near_duplicates_dropped"]
    assert len(unique) == len(texts) - statistics["duplicates_dropped"]
    assert len(expected) > 100
    assert len(dropped & expected) / len(dropped) > 0.9, "precision"
    assert len(dropped & expected) / len(expected) > 0.9, "recall"
    # Four standard errors from the threshold there is no doubt.
    closest: dict[int, float] = defaultdict(float)
    for pair, value in similarity.items():
        for number in pair:
            closest[number] = max(closest[number], value)
        if value > 0.93:
            assert unique[pair[1]] in dropped
    for number, text in enumerate(unique):
        assert text not in dropped or closest[number] > 0.66


@pytest.mark.parametrize("settings", [{"block_bytes": 20_000}, {"block_bytes": 3_000, "shard_len": 3000}])
def test_neither_parts_nor_slices_nor_chunks_change_what_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    texts = texts_with_copies(np.random.default_rng(1), originals=200, copies=150)
    (tmp_path / "plain").mkdir()
    prepared(tmp_path / "plain", texts)
    expected = kept(tmp_path / "plain"), kept(tmp_path / "plain", "valid")
    monkeypatch.setattr(near_duplicates, "_SLICE", 1000)
    monkeypatch.setattr(near_duplicates, "_CHUNK", 50)
    prepared(tmp_path, texts, **settings)
    assert (kept(tmp_path), kept(tmp_path, "valid")) == expected


@pytest.mark.slow
def test_the_number_of_workers_changes_no_byte(tmp_path: Path) -> None:
    texts = texts_with_copies(np.random.default_rng(2), originals=200, copies=100)
    indexes = []
    for num_workers in (1, 2):
        summary = prepared(tmp_path, texts, num_workers=num_workers, block_bytes=20_000, overwrite=True)
        indexes.append((tmp_path / "out" / "index.json").read_bytes())
    assert summary.corpus.statistics["near_duplicates_dropped"] > 10
    assert indexes[0] == indexes[1]


def test_a_cluster_drops_what_one_machine_drops(tmp_path: Path) -> None:
    texts = texts_with_copies(np.random.default_rng(12), originals=100, copies=60)
    (tmp_path / "one").mkdir()
    prepared(tmp_path / "one", texts)
    source = write_jsonl(tmp_path / "texts.jsonl", texts)
    settings = {"inputs": [source], "cluster": "ray", "block_bytes": 5_000, **SETTINGS}
    prepare_on_cluster(tmp_path / "out", workers=PoolWorkers(None, 1), **settings)
    assert (tmp_path / "out/index.json").read_bytes() == (tmp_path / "one/out/index.json").read_bytes()


def test_a_train_document_near_a_held_out_one_is_dropped_and_never_the_reverse(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    base = [f"w{word}" for word in generator.integers(0, 2000, 100)]
    versions = [" ".join([*base[:-1], f"end{number}"]) for number in range(5)]
    unrelated = [" ".join(f"w{word}" for word in generator.integers(0, 2000, 60)) for _ in range(4)]
    valid = write_jsonl(tmp_path / "held.jsonl", [unrelated[0], versions[3], versions[4]])
    test = write_jsonl(tmp_path / "later.jsonl", [unrelated[1], versions[2]])
    texts = [versions[0], unrelated[2], versions[1], unrelated[3]]
    summary = prepared(tmp_path, texts, valid_inputs=[valid], test_inputs=[test], tokenizer_all_splits=True)
    assert sorted(kept(tmp_path)) == sorted(unrelated[2:])
    assert kept(tmp_path, "valid") == [unrelated[0], versions[3]], "the first of a cluster stays"
    assert kept(tmp_path, "test") == [unrelated[1]]
    statistics = summary.corpus.statistics
    assert statistics["near_held_out_duplicates"] == 2
    assert statistics["near_duplicates"] == 2
    assert statistics["near_duplicates_dropped"] == 4


def test_report_counts_what_drop_leaves_out_and_leaves_out_nothing(tmp_path: Path) -> None:
    texts = texts_with_copies(np.random.default_rng(4), originals=100, copies=100)
    dropped = prepared(tmp_path, texts).corpus.statistics
    reported = prepared(tmp_path, texts, near_duplicates="report", overwrite=True).corpus
    assert sum(split.documents for split in reported.splits.values()) == len(texts)
    assert reported.statistics["duplicates_dropped"] == 0
    assert "near_duplicates_dropped" not in reported.statistics
    for key in ("exact_duplicates", "near_duplicates", "near_held_out_duplicates", "near_threshold_pct"):
        assert reported.statistics[key] == dropped[key]


def test_summary_and_inspection_say_how_many_were_dropped_with_the_threshold(tmp_path: Path) -> None:
    texts = texts_with_copies(np.random.default_rng(5), originals=100, copies=60)
    summary = prepared(tmp_path, texts, near_threshold=0.75)
    inspected = corpus_lines(corpus_facts(open_corpus(tmp_path / "out")))
    number = summary.corpus.statistics["near_duplicates_dropped"]
    assert number > 10
    for lines in (inspected, [line.strip() for line in summary.lines()]):
        assert f"near duplicates dropped: {number}" in lines
        assert "similarity of near duplicates: 0.75 or more" in lines


def test_an_interrupted_search_keeps_its_finished_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_with_copies(np.random.default_rng(6), originals=200, copies=100)
    (tmp_path / "plain").mkdir()
    prepared(tmp_path / "plain", texts)
    monkeypatch.setattr(near_duplicates, "_SLICE", 1000)
    write_links, calls = near_duplicates.write_links, []

    def counting(task: Any) -> None:
        calls.append(task.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        write_links(task)

    monkeypatch.setattr(near_duplicates, "write_links", counting)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, texts)
    (tmp_path / ".out.prepare" / "near-of-another-plan.links").touch()
    prepared(tmp_path, texts)
    num_slices = len(set(calls))
    assert num_slices > 5
    assert len(calls) == num_slices + 1, "only the interrupted slice was tried twice"
    index = (tmp_path / "out" / "index.json").read_bytes()
    assert index == (tmp_path / "plain" / "out" / "index.json").read_bytes()


def test_a_crowd_of_similar_documents_is_one_cluster_although_only_neighbours_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_duplicates, "_FARTHEST", 3)
    monkeypatch.setattr(near_duplicates, "_CHUNK", 7)
    words = [f"w{number}" for number in range(200)]
    texts = [" ".join([*words, f"end{number}"]) for number in range(100)]
    prepared(tmp_path, texts, valid_fraction=0.0)
    assert kept(tmp_path) == texts[:1]


@pytest.mark.parametrize("texts", [["a b c", "a b d", "x"], ["a b c d e f g", "h i j k l m n"], ["a b c d e f"] * 3])
def test_texts_that_are_short_or_unrelated_or_equal_are_not_near(tmp_path: Path, texts: list[str]) -> None:
    statistics = prepared(tmp_path, texts, valid_fraction=0.0).corpus.statistics
    assert statistics["near_duplicates_dropped"] == 0
    assert kept(tmp_path) == sorted(set(texts), key=kept(tmp_path).index)


@pytest.mark.parametrize("near_duplicates", ["estimate", "ignore"])
def test_without_dropping_no_package_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near_duplicates: str
) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    texts = texts_with_copies(np.random.default_rng(7), originals=20, copies=5)
    statistics = prepared(tmp_path, texts, near_duplicates=near_duplicates).corpus.statistics
    assert ("near_duplicates" in statistics) == (near_duplicates == "estimate")
    assert "near_threshold_pct" not in statistics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"near_threshold": 0.3}, r"from 0\.5 to 1, in steps of 0\.01"),
        ({"near_threshold": 0.805}, r"in steps of 0\.01"),
        ({"near_threshold": float("nan")}, r"from 0\.5 to 1"),
        ({"near_threshold": 0.9, "near_duplicates": "estimate"}, r"no effect.*--near-duplicates drop"),
        ({"duplicates": "ignore"}, r"Remove --duplicates ignore"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, ["a text"], **settings)


def test_a_missing_package_is_named_with_its_pip_line_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rensa" else find_spec(name))
    with pytest.raises(ConfigError, match=r"pip install \"txl_dist\[near-duplicates\]\""):
        prepared(tmp_path, ["a text"])
    assert not (tmp_path / ".out.prepare").exists()


def test_dropping_is_part_of_what_identifies_a_corpus_and_the_default_is_not() -> None:
    plain = PrepareSettings(inputs=["x"])
    hashes = {
        PrepareSettings(inputs=["x"], near_duplicates="drop", near_threshold=threshold).content_hash()
        for threshold in (0.8, 0.9)
    }
    assert len(hashes | {plain.content_hash()}) == 3


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold_with_a_probability_of_99_percent(threshold: float) -> None:
    def recall(num_rows: int) -> float:
        return float(1 - (1 - threshold**num_rows) ** (NUM_HASHES // num_rows))

    num_rows = rows_of_bands(threshold)
    assert recall(num_rows) >= 0.99
    assert all(recall(more) < 0.99 for more in range(num_rows + 1, NUM_HASHES + 1))


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_signatures_depend_neither_on_batches_nor_on_chunks(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    generator = np.random.default_rng(8)
    documents = [generator.integers(0, 257, n).astype(np.int32) for n in (0, 3, 200, 9_000, 5, 40, 30, 1)]
    alone = np.concatenate([sign([document], kind=kind) for document in documents])
    monkeypatch.setattr(minhash, "_CHUNK", 100)
    signatures = sign(documents, kind=kind)
    assert np.array_equal(signatures, alone)
    assert sign([], kind=kind).shape == (0, NUM_HASHES)
    compared = {2, 3, 5, 6} | ({4} if kind == "bpe" else set())
    table = band_table(signatures, num_rows=6)
    assert set(table["row"].tolist()) == compared
    assert (np.diff(table["value"].astype(object)) >= 0).all()


def test_equal_hashes_of_signatures_estimate_the_similarity() -> None:
    generator = np.random.default_rng(9)
    errors = []
    for _ in range(300):
        first = generator.integers(0, 5000, 100).astype(np.int32)
        second = first.copy()
        second[: generator.integers(0, 60)] = 1
        signatures = sign([first, second], kind="bpe")
        runs = [{tuple(ids[i : i + RUN_LEN]) for i in range(len(ids) - RUN_LEN + 1)} for ids in (first, second)]
        exact = len(runs[0] & runs[1]) / len(runs[0] | runs[1])
        errors.append((signatures[0] == signatures[1]).mean() - exact)
    assert abs(np.mean(errors)) < 0.008
    assert np.sqrt(np.mean(np.square(errors))) < 0.044


def test_joining_gives_the_connected_components_for_any_order_and_portions_of_the_links() -> None:
    generator = np.random.default_rng(10)
    for count, num_links in ((1, 0), (2, 1), (50, 30), (300, 290), (300, 900)):
        links = generator.integers(0, count, (num_links, 2))
        expected = clusters(count, [(int(a), int(b)) for a, b in links])
        for portion in (1, 7, 1000):
            parents = np.zeros(count, np.int64)
            for begin in range(0, num_links, portion):
                join(parents, links[begin : begin + portion])
            numbers = np.arange(count)
            while parents[numbers].any():
                numbers = numbers - parents[numbers]
            assert numbers.tolist() == expected


def test_the_index_holds_whole_numbers_only(tmp_path: Path) -> None:
    prepared(tmp_path, texts_with_copies(np.random.default_rng(11), originals=20, copies=5), near_threshold=0.57)
    statistics = json.loads((tmp_path / "out" / "index.json").read_text())["statistics"]
    assert statistics["near_threshold_pct"] == 57
    assert all(type(value) is int for value in statistics.values())
