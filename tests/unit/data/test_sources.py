"""Documents come in a fixed order under fixed names, and what cannot be read is named."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from txl_dist.data.sources import Document, in_valid_split, open_source
from txl_dist.errors import DataError


def test_a_folder_gives_its_text_files_sorted_by_relative_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("2")
    (tmp_path / "a.md").write_text("1")
    (tmp_path / "image.png").write_bytes(b"\xff")
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"3"))
    read = open_source([tmp_path])
    assert list(read()) == [("a.md", "1", ""), ("b/x.txt", "2", ""), ("z.txt.gz", "3", "")]
    assert list(read()) == list(read()), "every pass is the same"


def test_a_file_named_by_itself_may_have_any_suffix_and_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "enwik").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert list(open_source([tmp_path / "enwik"])()) == [Document("enwik", "\ufeffa\r\nb")]


def test_jsonl_documents_are_named_by_id_or_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    lines = [{"body": "one"}, {"id": "second", "body": "two"}]
    path.write_bytes(gzip.compress("\n\n".join(map(json.dumps, lines)).encode()))
    assert [d[:2] for d in open_source([path], jsonl_field="body")()] == [("x.jsonl.gz:1", "one"), ("second", "two")]


@pytest.mark.parametrize("line", ["{", "[1]", '{"other": 1}', '{"text": 5}'])
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 2"):
        list(open_source([tmp_path / "x.jsonl"])())


def test_text_that_is_not_utf8_is_refused_replaced_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9!")
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(DataError, match=r"a\.txt: byte 3 \(0xe9\).*--encoding-errors replace"):
        list(open_source([tmp_path])())
    fine = Document("b.txt", "fine")
    replaced = open_source([tmp_path], encoding_errors="replace")
    assert list(replaced()) == [Document("a.txt", "caf\ufffd!", "replaced"), fine]
    assert list(open_source([tmp_path], encoding_errors="skip")()) == [Document("a.txt", "", "skipped"), fine]


def test_half_a_surrogate_pair_in_json_is_treated_like_broken_utf8(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n')
    with pytest.raises(DataError, match="line 1: character 1"):
        list(open_source([tmp_path])())
    assert [d.text for d in open_source([tmp_path], encoding_errors="replace")()] == ["a\ufffdb"]
    assert [d.damage for d in open_source([tmp_path], encoding_errors="skip")()] == ["skipped"]


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        open_source([tmp_path / "nowhere"])
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"text" * 100)[:-9])
    with pytest.raises(DataError, match=r"x\.txt\.gz"):
        list(open_source([tmp_path])())


def test_a_folder_that_cannot_be_read_is_named_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=r"cannot read .*/locked: Permission denied\. Mend its permissions"):
        list(open_source([tmp_path])())


def test_no_input_is_refused() -> None:
    with pytest.raises(DataError, match=r"no inputs.*files, folders, or stdlib"):
        open_source([])


def test_zst_is_read_like_the_file_inside(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"one\ntwo"))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "x"}\n{"text": "y"}\n') * 2)
    assert [document.text for document in open_source([tmp_path])()] == ["one\ntwo", "x", "y", "x", "y"]
    (tmp_path / "a.txt.zst").write_bytes(b"no such frame")
    with pytest.raises(DataError, match=r"a\.txt\.zst"):
        list(open_source([tmp_path])())


@pytest.mark.skipif(importlib.util.find_spec("zstandard") is not None, reason="zstandard is installed")
def test_zst_without_the_package_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "x.txt.zst").write_bytes(b"")
    with pytest.raises(DataError, match="pip install zstandard"):
        list(open_source([tmp_path])())


def test_the_standard_library_is_there_without_its_tests() -> None:
    names = [document.name for document, _ in zip(open_source(["stdlib"])(), range(2000), strict=False)]
    assert len(names) > 300
    assert names == sorted(names)
    assert "stdlib/json/decoder.py" in names
    assert not any("/test/" in name or "/tests/" in name or "site-packages" in name for name in names)


def test_the_held_out_share_is_as_asked_and_decided_by_name_alone() -> None:
    held_out = {f"doc{i}" for i in range(4000) if in_valid_split(f"doc{i}", valid_fraction=0.05)}
    assert 140 < len(held_out) < 260
    assert sorted(held_out)[:3] == ["doc1006", "doc104", "doc1041"], "the split function is frozen"
    assert held_out <= {f"doc{i}" for i in range(4000) if in_valid_split(f"doc{i}", valid_fraction=0.1)}
