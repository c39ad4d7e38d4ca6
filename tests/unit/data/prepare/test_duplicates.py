"""All equal documents are found, most nearly equal ones, and no unrelated ones, with the same result for any
slicing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from txl_dist.data.prepare import duplicates
from txl_dist.data.prepare.documents import content_digest
from txl_dist.data.prepare.duplicates import NUM_BANDS, band_keys, count_near, find_equal
from txl_dist.data.prepare.tokenize import PART_RECORD


def table_of(texts: list[str], *, first: int = 0) -> Any:
    """Records of documents whose ordinals count from `first`."""
    table = np.zeros(len(texts), dtype=PART_RECORD)
    table["ordinal"] = np.arange(first, first + len(texts))
    digests = b"".join(content_digest(text.encode()) for text in texts)
    table["digest"] = np.frombuffer(digests, dtype=">u8").reshape(-1, 2)
    return table


def share_a_band(first: np.ndarray, second: np.ndarray, *, kind: str = "bpe") -> bool:
    bands = band_keys([first, second], kind=kind)
    return bool((bands[0] == bands[1]).any())


def jaccard(first: np.ndarray, second: np.ndarray, *, run_len: int) -> float:
    """Share of common runs, counted naively."""
    runs = [{tuple(ids[i : i + run_len]) for i in range(len(ids) - run_len + 1)} for ids in (first, second)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


@pytest.mark.parametrize("slice_len", [1 << 23, 7])
def test_of_equal_documents_the_first_stays_and_held_out_comes_before_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_len: int
) -> None:
    monkeypatch.setattr(duplicates, "_SLICE", slice_len)
    tables = [
        (table_of(["a", "b", "a", "c", "c", "d"]), True),
        (table_of(["d", "e", "e"], first=6), False),
        (table_of(["c", "f"], first=9), True),
    ]
    found = find_equal(tables, count=11, folder=tmp_path)
    assert found.ordinals.tolist() == [2, 4, 5, 8, 9]
    assert found.num_held_out == 1, "document 5, d"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_texts", [400, 2])
def test_equal_documents_are_those_that_a_dictionary_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_texts: int
) -> None:
    monkeypatch.setattr(duplicates, "_SLICE", 100)
    generator = np.random.default_rng(0)
    texts = [f"text {i}" for i in generator.integers(0, num_texts, 1000)]
    tables = [(table_of(texts[i : i + 90], first=i), True) for i in range(0, 1000, 90)]
    seen: set[str] = set()
    expected = [i for i, text in enumerate(texts) if text in seen or seen.add(text)]  # type: ignore[func-returns-value]
    assert find_equal(tables, count=1000, folder=tmp_path).ordinals.tolist() == expected


@pytest.mark.slow
def test_the_probability_of_a_shared_band_follows_the_overlap() -> None:
    generator = np.random.default_rng(1)
    for overlap, least, most in ((0.95, 0.97, 1.0), (0.8, 0.65, 0.88), (0.5, 0.0, 0.09), (0.2, 0.0, 0.0)):
        hits = 0
        for _ in range(150):
            first = generator.integers(0, 30_000, 600).astype(np.int32)
            second = first.copy()
            changed = round(600 * (1 - overlap) / (1 + overlap))
            second[:changed] = generator.integers(0, 30_000, changed)
            assert abs(jaccard(first, second, run_len=5) - overlap) < 0.03
            hits += share_a_band(first, second)
        assert least <= hits / 150 <= most, overlap


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_bands_do_not_depend_on_what_a_document_is_batched_with(kind: str) -> None:
    generator = np.random.default_rng(2)
    documents = [generator.integers(0, 257, n).astype(np.int32) for n in (0, 3, 200, 70_000, 5, 40, 140_000, 1)]
    alone = [band_keys([document], kind=kind) for document in documents]
    assert np.array_equal(band_keys(documents, kind=kind), np.concatenate(alone))
    assert band_keys([], kind=kind).shape == (0, NUM_BANDS)
    assert not band_keys(documents[:2], kind=kind).any(), "too short to be compared"


def test_a_change_within_a_long_document_leaves_it_near_and_unrelated_texts_are_not() -> None:
    generator = np.random.default_rng(3)
    first = generator.integers(0, 20_000, 150_000).astype(np.int32)
    second = first.copy()
    second[70_000:70_100] = 1
    assert share_a_band(first, second)
    unrelated = band_keys([generator.integers(0, 200, 500).astype(np.int32) for _ in range(500)], kind="bpe")
    assert len(np.unique(unrelated)) == unrelated.size


@pytest.mark.parametrize("slice_len", [1 << 23, 20])
def test_near_documents_are_counted_once_and_equal_ones_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_len: int
) -> None:
    monkeypatch.setattr(duplicates, "_SLICE", slice_len)
    generator = np.random.default_rng(4)
    base = generator.integers(0, 20_000, 2000).astype(np.int32)
    near = base.copy()
    near[:5] = 7
    documents = [base, near, base, generator.integers(0, 20_000, 2000).astype(np.int32), base[:4]]
    table = table_of([document.tobytes().hex() for document in documents])
    bands = band_keys(documents, kind="bpe")
    equal = find_equal([(table, True)], count=5, folder=tmp_path)
    assert equal.ordinals.tolist() == [2]
    halves = [(table[:3], bands[:3]), (table[3:], bands[3:])]
    assert count_near(halves, equal, count=5, folder=tmp_path) == 1
