"""Documents have a fixed order for any storage and format. Sources that cannot be read, or end early, are named."""

from __future__ import annotations

import errno
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.helpers.corpora import tiny_corpus
from tests.helpers.http import serve
from txl_dist.data.prepare import documents, sources
from txl_dist.data.prepare import readers as opening
from txl_dist.data.prepare.documents import (
    Document,
    Reading,
    content_digest,
    documents_of,
    split_of,
    text_bytes_of,
)
from txl_dist.data.prepare.input_splits import Cursor, read_parts
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.prepare.sources import check_inputs, identities, list_sources
from txl_dist.data.storage import fsspec_io as remote
from txl_dist.errors import DataError


def read(inputs: Sequence[Any], *, part_bytes: int = 1 << 22, field: str = "text", **settings: Any) -> list[Document]:
    """All documents of the inputs."""
    names = ("documents", "stdin_format", "allow_protocols", "member")
    listing = {name: settings.pop(name) for name in names if name in settings}
    if "encoding_errors" in settings:
        listing["encoding_errors"] = settings["encoding_errors"]
    files = list_sources(inputs, PrepareSettings((), **listing), split="train").files
    reading = Reading(jsonl_field=field, **settings)
    parts = read_parts(
        files, part_bytes=part_bytes, allow_protocols=listing.get("allow_protocols", ()), jsonl_field=field
    )
    return [document for part in parts for block in part.blocks for document in documents_of(block, reading)]


def texts_of(inputs: Sequence[Any], **settings: Any) -> list[str]:
    return [document.text for document in read(inputs, **settings)]


def test_a_folder_gives_its_text_files_sorted_by_relative_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("2")
    (tmp_path / "a.md").write_text("1")
    (tmp_path / "image.png").write_bytes(b"\xff")
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"3"))
    assert texts_of([tmp_path]) == ["1", "2", "3"]
    assert [document.ordinal for document in read([tmp_path])] == [0, 1, 2]


def test_a_file_named_by_itself_may_have_any_suffix_and_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "enwik").write_bytes(b"a\r\nb\xef\xbb\xbfc")
    assert texts_of([tmp_path / "enwik"]) == ["a\r\nb\ufeffc"]


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("cut", ["file", "line", "blank_line", "jsonl"])
@pytest.mark.parametrize("content", [b"one\ntwo\n\nthree", b"\none\n", b"\r\n\r\none", b"one", b""])
def test_a_file_with_a_byte_order_mark_is_read_as_without(tmp_path: Path, cut: str, content: bytes) -> None:
    if cut == "jsonl":
        content = b"\n".join(
            b'{"text": "%s"}' % line.strip() if line.strip() else line for line in content.split(b"\n")
        )
    (tmp_path / "a.txt").write_bytes(content)
    expected = texts_of([tmp_path / "a.txt"], documents=cut)
    for number in (1, 2):
        for name, compress in (("b.txt", bytes), ("b.txt.gz", gzip.compress)):
            (tmp_path / name).write_bytes(compress(MARK * number + content))
            for part_bytes in (1, 5, 1000):
                assert texts_of([tmp_path / name], documents=cut, part_bytes=part_bytes) == expected


def test_no_document_begins_with_a_byte_order_mark_wherever_it_comes_from(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    line = b'{"text": "\\ufeffone"}\n'
    (tmp_path / "a.jsonl").write_bytes(MARK + line + MARK + line.replace(b"\\ufeff", MARK) + MARK + b"\n")
    (tmp_path / "b.txt").write_bytes(MARK + b"one\n" + MARK + b"one\n")
    parquet.write_table(pyarrow.table({"text": ["\ufeffone"]}), tmp_path / "c.parquet")
    assert texts_of([tmp_path], documents="line") == ["one"] * 5
    for policy in ("replace", "skip", "keep"):
        assert texts_of([tmp_path / "b.txt"], documents="line", encoding_errors=policy) == ["one"] * 2


def test_a_folder_without_text_is_refused_with_what_would_be_taken_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"contains no text files: 1 other file and 0 hidden files were left out.*\.jsonl .*\.txt "
    ):
        read([tmp_path])


def test_globs_are_sorted_and_reach_any_depth(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt", "e.md", "odd[1].txt"):
        (tmp_path / name).write_text(name)
    assert texts_of([f"{tmp_path}/?.txt"]) == ["a.txt", "b.txt"]
    assert texts_of([f"{tmp_path}/**/[a-d].txt"]) == ["a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt"]
    assert texts_of([tmp_path / "odd[1].txt"]) == ["odd[1].txt"], "a file of that very name is not a pattern"
    with pytest.raises(DataError, match=r"no file matches .*\*\.zst"):
        texts_of([f"{tmp_path}/*.zst"])


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("file", ["one\ntwo\r\n\r\n \nthree\n\n\nfour"]),
        ("line", ["one", "two", "", " ", "three", "", "", "four"]),
        ("blank_line", ["one\ntwo", "three", "four"]),
    ],
)
def test_plain_text_is_cut_as_asked_wherever_parts_end(tmp_path: Path, cut: str, expected: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\r\n\r\n \nthree\n\n\nfour")
    whole = read([tmp_path], documents=cut)
    assert [document.text for document in whole] == expected
    for part_bytes in (1, 2, 3, 5, 8, 1000):
        assert read([tmp_path], documents=cut, part_bytes=part_bytes) == whole


@pytest.mark.parametrize("cut", ["file", "line", "blank_line"])
def test_reading_goes_on_from_any_cursor(tmp_path: Path, cut: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = "".join(f"line {i}\n" + "\n" * (i % 3) for i in range(40))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(lines)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "d.txt.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "e.jsonl").write_text("".join(json.dumps({"text": f"json {i}"}) + "\n" for i in range(40)))
    table = pyarrow.table({"text": [f"row {i}" for i in range(2500)]})
    parquet.write_table(table, tmp_path / "f.parquet", row_group_size=1100)
    files = list_sources([tmp_path], PrepareSettings((), documents=cut), split="train").files
    parts = list(read_parts(files, part_bytes=64))
    assert len(parts) > 6
    assert parts[0].begin == Cursor()
    for number, part in enumerate(parts[:-1]):
        assert list(read_parts(files, part_bytes=64, begin=part.end)) == parts[number + 1 :]
    documents = [d for part in parts for block in part.blocks for d in documents_of(block, Reading())]
    ordinals = [document.ordinal for document in documents]
    assert ordinals == sorted(set(ordinals))
    assert documents == read([tmp_path], documents=cut)


def test_jsonl_is_read_by_field_and_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    lines = [{"body": "one"}, {"id": "second", "body": "two"}]
    path.write_bytes(gzip.compress("\n\n".join(map(json.dumps, lines)).encode()))
    first, second = read([path], field="body")
    assert (first.text, second.text) == ("one", "two")
    assert (first.where, second.where) == (f"{path}, line 1", f"{path}, line 3")


def test_json_lines_are_known_by_each_of_their_suffixes_and_others_on_request(tmp_path: Path) -> None:
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    for name in ("a.ndjson", "b.json", "c.json.gz", "d.dump"):
        (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
        cut = "jsonl" if name == "d.dump" else "file"
        assert texts_of([tmp_path / name], documents=cut) == ["one", "two"]
    assert texts_of([tmp_path]) == ["one", "two"], "of a folder only a.ndjson: other .json is seldom text"


@pytest.mark.parametrize("line", ["{", "[1]", '{"other": 1}', '{"text": 5}'])
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' * 30 + line + "\n")
    for part_bytes in (10, 1000):
        with pytest.raises(DataError, match=r"x\.jsonl, line 31"):
            read([tmp_path / "x.jsonl"], part_bytes=part_bytes)


def test_text_that_is_not_utf8_is_refused_replaced_skipped_or_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9!")
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(DataError, match=r"a\.txt: byte 3 \(0xe9\).*--encoding-errors replace"):
        read([tmp_path])

    def seen(policy: str) -> list[tuple[str, str]]:
        return [(document.text, document.damage) for document in read([tmp_path], encoding_errors=policy)]

    assert seen("replace") == [("caf\ufffd!", "replaced"), ("fine", "")]
    assert seen("skip") == [("", "skipped"), ("fine", "")]
    assert seen("keep") == [("caf\udce9!", ""), ("fine", "")]
    assert text_bytes_of("caf\udce9!") == b"caf\xe9!"


@pytest.mark.parametrize("form", ["file", "line", "blank_line"])
def test_a_nul_byte_behind_the_first_4_kib_of_plain_text_is_refused_skipped_or_kept(tmp_path: Path, form: str) -> None:
    hole = b"a hole \0\0 in it"
    (tmp_path / "a.txt").write_bytes(b"a line of words\n\n" * 500 + hole + b"\n\nmore words\n")
    for policy in ("refuse", "replace"):
        with pytest.raises(DataError, match=r"a\.txt.*: byte [\d,]+ is NUL.*tr -d '\\000' < FILE > NEW_FILE"):
            read([tmp_path], documents=form, encoding_errors=policy)
    skipped = read([tmp_path], documents=form, encoding_errors="skip")
    assert [document.damage for document in skipped].count("skipped") == 1
    assert not any("hole" in document.text for document in skipped)
    kept = read([tmp_path], documents=form, encoding_errors="keep")
    assert [document for document in kept if hole.decode() in document.text]


def test_half_a_surrogate_pair_in_json_is_treated_like_broken_utf8(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n')
    for policy in ("refuse", "keep"):
        with pytest.raises(DataError, match="line 1: character 1"):
            read([tmp_path], encoding_errors=policy)
    assert texts_of([tmp_path], encoding_errors="replace") == ["a\ufffdb"]
    assert [d.damage for d in read([tmp_path], encoding_errors="skip")] == ["skipped"]


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        read([tmp_path / "nowhere"])
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"text" * 100)[:-9])
    with pytest.raises(DataError, match=r"x\.txt\.gz"):
        read([tmp_path])


@pytest.mark.parametrize("suffix", ["gz", "xz", "zst"])
def test_a_compressed_file_that_was_cut_anywhere_is_never_taken_for_a_whole_one(tmp_path: Path, suffix: str) -> None:
    lines = b"".join(b"%d\n" % (i * i) for i in range(30_000))
    compress = {"gz": gzip.compress, "xz": lzma.compress}.get(suffix)
    whole = compress(lines) if compress else pytest.importorskip("zstandard").compress(lines)
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(whole + whole)
    assert "".join(texts_of([path])).encode() == lines * 2, "members and frames that follow each other are all read"
    for length in (0, len(whole) - 1, len(whole) - 7, len(whole) // 2, 40, len(whole) + 30):
        path.write_bytes((whole + whole)[:length])
        with pytest.raises(DataError, match=rf"a\.txt\.{suffix}"):
            read([path])


def test_a_folder_that_cannot_be_read_is_named_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=r"cannot read .*/locked: Permission denied\. Correct the permissions"):
        read([tmp_path])


def test_zst_is_read_like_the_file_inside(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"one\ntwo"))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "x"}\n{"text": "y"}\n') * 2)
    assert texts_of([tmp_path]) == ["one\ntwo", "x", "y", "x", "y"]
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"one\ntwo")[:-3])
    with pytest.raises(DataError, match=r"a\.txt\.zst"):
        read([tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "module", "remedy"),
    [
        ("x.txt.zst", b"\x28\xb5\x2f\xfd\x00", "zstandard", "pip install zstandard"),
        ("x.parquet", b"PAR1\x15\x00", "pyarrow", r"txl_dist\[parquet\]"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, module: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=remedy):
        read([tmp_path])


def test_parquet_is_read_by_column_and_what_holds_no_text_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    texts = [f"text {i}" for i in range(3000)]
    table = pyarrow.table({"number": list(range(3000)), "body": pyarrow.array(texts, pyarrow.large_string())})
    parquet.write_table(table, path, row_group_size=1300)
    assert texts_of([path], field="body", part_bytes=100) == texts
    with pytest.raises(DataError, match=r"'text' \(found: number \(int64\), body \(large_string\)\).*--jsonl-field"):
        read([path])
    with pytest.raises(DataError, match="no text column 'number'"):
        read([path], field="number")
    parquet.write_table(pyarrow.table({"text": ["fine", None]}), path)
    with pytest.raises(DataError, match=r"x\.parquet, column 'text', row 2: the value is null"):
        read([path])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot read .*x\.parquet"):
        read([path])


def test_parquet_gives_the_same_texts_whatever_the_layout_of_its_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {i % 7} \u00e9\u4e00" for i in range(2100)]
    raw = [text.encode() for text in texts]
    columns = {
        "string": pyarrow.array(texts),
        "large": pyarrow.array(texts, pyarrow.large_string()),
        "view": pyarrow.array(texts, pyarrow.string_view()),
        "binary": pyarrow.array(raw, pyarrow.binary()),
        "large binary": pyarrow.array(raw, pyarrow.large_binary()),
        "binary view": pyarrow.array(raw, pyarrow.binary_view()),
        "fixed": pyarrow.array(raw, pyarrow.binary(len(raw[0]))),
        "dictionary": pyarrow.array(texts).dictionary_encode(),
        "dictionary of bytes": pyarrow.array(raw).dictionary_encode(),
        "json": pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(texts)),
    }
    for name, column in columns.items():
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=700)
        assert texts_of([path], part_bytes=3000) == texts, name


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "string_view", "dictionary"])
def test_bytes_in_parquet_that_are_not_utf8_follow_the_policy_like_any_text(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = pyarrow.array([b"fine", b"caf\xe9!", b"fine too"])
    if kind == "string_view":
        text = pyarrow.array(["fine", "cafe!", "fine too"], pyarrow.string_view())  # short ones lie in the views
        views = text.buffers()[1].to_pybytes().replace(b"cafe!", b"caf\xe9!")
        text = pyarrow.Array.from_buffers(pyarrow.string_view(), 3, [None, pyarrow.py_buffer(views)])
    else:
        text = raw.view(pyarrow.string())
        text = raw if kind == "binary" else text
        text = raw.cast(pyarrow.large_binary()).view(pyarrow.large_string()) if kind == "large_string" else text
    if kind == "dictionary":
        text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 2]), text)
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": text}), path)
    with pytest.raises(DataError, match=r"x\.parquet, column 'text', row 2: byte 3 \(0xe9\)"):
        read([path])

    def seen(policy: str) -> list[tuple[str, str]]:
        return [(document.text, document.damage) for document in read([path], encoding_errors=policy)]

    assert seen("replace")[1] == ("caf\ufffd!", "replaced")
    assert seen("skip")[1] == ("", "skipped")
    assert seen("keep")[1] == ("caf\udce9!", "")


def test_whatever_pyarrow_raises_is_one_line_with_file_column_and_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": [f"text {i} " * 9 for i in range(9000)]}), path, row_group_size=3000)
    whole = path.read_bytes()
    chance = random.Random(0)
    damaged = [whole[:length] for length in (len(whole) - 1, len(whole) - 9, 12, 5)]
    damaged += [whole[:length] for length in range(100, len(whole), len(whole) // 9)]
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 40)):
            content[chance.randrange(4, len(content))] = chance.randrange(256)
        damaged.append(bytes(content))
    messages = []
    for content in damaged:
        path.write_bytes(content)
        with suppress(DataError):  # of text, a changed letter is not damage that anybody could see
            read([path])
            continue
        with pytest.raises(DataError) as caught:
            read([path])
        messages.append(str(caught.value))
    assert len(messages) > 20
    for message in messages:
        assert "\n" not in message
        assert "x.parquet" in message
        assert "column 'text'" in message


def test_two_columns_of_one_name_and_columns_of_no_text_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(DataError, match=r"x\.parquet: 2 columns are named 'text'"):
        read([path])
    for values, kind in (([["a"]], "list"), ([{"a": "b"}], "struct"), ([None], "null"), ([1.5], "double")):
        parquet.write_table(pyarrow.table({"text": values}), path)
        with pytest.raises(DataError, match=rf"no text column 'text' \(found: text \({kind}.*--jsonl-field"):
            read([path])


def test_a_flipped_bit_in_a_page_of_parquet_that_has_checksums_is_found(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, table = tmp_path / "x.parquet", pyarrow.table({"text": [f"text {i}" for i in range(3000)]})
    parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    assert len(texts_of([path])) == 3000
    path.write_bytes(path.read_bytes().replace(b"text 1717", b"text 1716"))
    with pytest.raises(DataError, match=r"cannot read .*x\.parquet"):
        read([path])


def test_urls_are_read_like_files(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    texts = ["a" * 3_000_000 + "\n", "0123456789" * 2_000_000]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(texts[0].encode()))
    (tmp_path / "b.txt").write_text(texts[1])
    with serve(tmp_path) as server:
        urls = [f"{server.url}/{name}" for name in ("a.txt.gz", "b.txt")]
        for server.has_ranges in (True, False):
            assert texts_of(urls) == texts
        first, _ = list_sources(urls, PrepareSettings(()), split="train").files
        assert first.size == (tmp_path / "a.txt.gz").stat().st_size
        assert not sources.is_repeatable([first]), "this server names no version, and a size proves nothing"


def test_a_url_that_gives_less_than_it_announced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 100_000)
    with serve(tmp_path) as server:
        url = f"{server.url}/a.txt"
        files = list_sources([url], PrepareSettings(()), split="train").files
        (tmp_path / "a.txt").write_bytes(b"0123456789" * 10)
        with pytest.raises(DataError, match=r"cannot read .*/a\.txt"):
            list(read_parts(files, part_bytes=1 << 20))
        with pytest.raises(DataError, match=r"/none\.txt"):
            read([f"{server.url}/none.txt"])


def test_stores_that_list_take_globs_and_folders() -> None:
    store = fsspec.filesystem("memory")
    for name in ("b.txt", "a.txt", "c.png"):
        store.pipe(f"/listed/{name}", name.encode())
    try:
        assert texts_of(["memory://listed/*.txt"]) == ["a.txt", "b.txt"]
        assert texts_of(["memory://listed"]) == ["a.txt", "b.txt"]
        assert sources.is_repeatable(list_sources(["memory://listed"], PrepareSettings(()), split="train").files)
        with pytest.raises(DataError, match=r"no file matches memory://listed/\*\.md"):
            read(["memory://listed/*.md"])
    finally:
        store.rm("/listed", recursive=True)


def test_commands_run_only_if_allowed_and_any_exit_status_but_0_is_an_error() -> None:
    with pytest.raises(DataError, match=r"runs a shell command.*--allow-protocols pipe"):
        read(["pipe:echo text"])
    allowed: dict[str, Any] = {"allow_protocols": ("pipe",), "documents": "line"}
    assert texts_of(["pipe:printf 'a\\nb'"], **allowed) == ["a", "b"]
    assert texts_of(['pipe:echo \'{"text": "x"}\''], **allowed, stdin_format="jsonl") == ["x"]
    for status in (1, 23, 141):
        with pytest.raises(DataError, match=rf"'echo a; exit {status}' ended with exit status {status}"):
            read([f"pipe:echo a; exit {status}"], **allowed)
    with pytest.raises(DataError, match="exit status -9"):
        read(["pipe:echo a; kill -9 $$"], **allowed)
    for url in ("zip://a.txt::https://host/b.zip", "sftp://host/a.txt"):
        with pytest.raises(DataError, match=r"://"):
            read([url])


def test_a_command_that_goes_on_printing_after_an_error_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    tokenizer = tiny_corpus(tmp_path).folder / "tokenizer.json"
    source = ["pipe:(echo bad; yes) | cat", "--allow-protocols", "pipe", "--stdin-format", "jsonl"]
    words = [*source, "--tokenizer-file", str(tokenizer), "--num-workers", "1", "--block-bytes", "8", "--out", "out"]
    command = [sys.executable, "-m", "txl_dist", "prepare", *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert result.returncode == 2
    assert "line 1: not valid JSON" in result.stderr


def test_progress_counts_what_was_read_of_a_source_of_unknown_size() -> None:
    files = list_sources(
        ["pipe:seq 1000", "pipe:seq 500"],
        PrepareSettings((), documents="line", allow_protocols=("pipe",)),
        split="train",
    ).files
    stored = [part.stored_bytes for part in read_parts(files, part_bytes=1000, allow_protocols=("pipe",))]
    assert stored == sorted(set(stored))
    assert len(stored) > 3
    assert stored[-1] == sum(len(f"{i}\n") for n in (1000, 500) for i in range(1, n + 1))


def test_a_closed_stdin_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="stdin is closed"):
        read(["-"])


def test_a_document_that_is_too_long_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONGEST_RECORD", 1000)
    (tmp_path / "a.txt").write_text("text " * 300 + "\n" + "text\n" * 300)
    for cut in ("file", "line"):
        with pytest.raises(DataError, match=r"a\.txt contains a document of 2 GiB or more.*--documents line"):
            read([tmp_path], documents=cut, part_bytes=64)
    (tmp_path / "a.txt").write_text("text\n" * 3000)
    assert len(read([tmp_path], documents="line", part_bytes=64)) == 3000


HIDDEN = (
    "._a.txt",
    ".hidden.md",
    ".cache/huggingface/a.txt",
    ".git/a.txt",
    ".ipynb_checkpoints/a-checkpoint.md",
    "deep/.Trash-1000/files/a.txt",
    "__MACOSX/a.txt",
    "__MACOSX/deep/._a.txt",
    "__pycache__/a.txt",
    "deep/Thumbs.db",
    "desktop.ini",
    "~$letter.txt",
    "$RECYCLE.BIN/a.txt",
    "_temporary/0/part-0.jsonl",
    "_delta_log/0.parquet",
    "@eaDir/a.txt",
    ".DS_Store",
)


def laid_out(folder: Path) -> list[str]:
    """Writes two texts that people see, and what they do not see. Returns the hidden files."""
    for name in ("a.txt", "deep/b.txt", "deep/cache/c.txt", "_posts/d.txt", "__init__.py", *HIDDEN):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return sorted(str(folder / name) for name in HIDDEN)


SEEN = ["__init__.py", "_posts/d.txt", "a.txt", "deep/b.txt", "deep/cache/c.txt"]


def test_hidden_files_are_left_out_of_folders_patterns_and_urls_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / ".home" / "data"  # what is above the input does not count
    hidden = laid_out(folder)
    for given in (str(folder), f"{folder}/**/*", f"file://{folder}", f"file://{folder}/**"):
        listing = list_sources([given], PrepareSettings(()), split="train")
        assert [file.path.removeprefix("file://").removeprefix(f"{folder}/") for file in listing.files] == SEEN
        assert sorted(path.removeprefix("file://") for path in listing.hidden) == hidden
        assert listing.num_other == 0


def test_the_summary_says_what_is_hidden(tmp_path: Path) -> None:
    laid_out(tmp_path / "data")
    summary = prepare_corpus(
        tmp_path / "out", inputs=[tmp_path / "data"], valid_inputs=[], kind="byte", valid_fraction=0, num_workers=1
    )
    assert summary.corpus.statistics["documents_read"] == len(SEEN)
    assert summary.hidden_files
    assert any(f"hidden files left out: {len(HIDDEN)} (" in line for line in summary.lines())


def test_a_hidden_file_that_is_named_or_spelt_in_a_pattern_is_taken(tmp_path: Path) -> None:
    laid_out(tmp_path)
    assert texts_of([tmp_path / "._a.txt"]) == ["._a.txt"]
    assert texts_of([f"{tmp_path}/.*.md"]) == [".hidden.md"]
    assert texts_of([tmp_path / "__MACOSX"]) == ["__MACOSX/a.txt"]
    assert texts_of([f"{tmp_path}/.cache/**/*.txt"]) == [".cache/huggingface/a.txt"]


def test_a_folder_or_a_pattern_with_hidden_files_only_says_so(tmp_path: Path) -> None:
    (tmp_path / "._a.txt").write_text("a")
    with pytest.raises(DataError, match=r"contains no text files: .* 1 hidden file were left out"):
        read([tmp_path])
    with pytest.raises(DataError, match=r"no file matches .* except hidden files \(1\), which are read only if"):
        read([f"{tmp_path}/*.txt"])


@pytest.mark.parametrize("given", ["", "a.txt", "*.txt"])
def test_a_link_to_a_file_that_was_not_fetched_is_refused(tmp_path: Path, given: str) -> None:
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "a.txt").symlink_to("../.git/annex/objects/5e/5e/SHA256E-s9--5e.txt")
    with pytest.raises(DataError, match=r"a\.txt is a link to .*annex.*, which does not exist.*git annex get"):
        read([f"{tmp_path}/{given}"])


def test_the_standard_library_is_there_without_its_tests() -> None:
    files = [file.path for file in list_sources(["stdlib"], PrepareSettings(()), split="train").files]
    assert len(files) > 300
    assert files == sorted(files)
    assert any(name.endswith("/json/decoder.py") for name in files)
    assert not any("/test/" in name or "/tests/" in name or "site-packages" in name for name in files)


def test_inputs_have_an_identity_that_changes_with_them_and_only_from_there_on(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    before = identities(list_sources([tmp_path], PrepareSettings(()), split="train").files)
    (tmp_path / "b.txt").write_text("another")
    after = identities(list_sources([tmp_path], PrepareSettings(()), split="train").files)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
    assert not sources.is_repeatable(list_sources(["-"], PrepareSettings(()), split="train").files)


def test_a_file_in_two_splits_is_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    found = [
        (name, list_sources([tmp_path / name], PrepareSettings(()), split="train").files)
        for name in ("a.txt", "link.txt")
    ]
    with pytest.raises(DataError, match=r"given twice, by the inputs a\.txt and link\.txt"):
        check_inputs(found)


def test_the_held_out_share_is_as_asked_and_decided_by_content_alone() -> None:
    digests = [content_digest(f"text {i}".encode()) for i in range(4000)]

    def held_out(**fractions: float) -> dict[str, set[int]]:
        splits = [split_of(digest, given_for="train", reading=Reading(**fractions)) for digest in digests]
        return {name: {i for i, split in enumerate(splits) if split == name} for name in ("train", "valid", "test")}

    first = held_out(valid_fraction=0.05)
    assert 140 < len(first["valid"]) < 260
    assert not first["test"]
    assert sorted(first["valid"])[:3] == [19, 26, 43], "the split function is frozen"
    assert first["valid"] <= held_out(valid_fraction=0.1)["valid"]
    both = held_out(valid_fraction=0.05, test_fraction=0.1)
    assert 300 < len(both["test"]) < 500
    assert 140 < len(both["valid"]) < 260
    assert split_of(digests[0], given_for="test", reading=Reading(valid_fraction=0.9)) == "test"


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_pipe_or_a_device_is_refused_at_once_with_the_way_to_read_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"is a pipe or a device.*\| txl prepare -"):
        list_sources([path], PrepareSettings(()), split="train")


def test_a_misspelt_corpus_of_the_papers_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(DataError, match=r"wikitext-104 does not exist\. Did you mean wikitext-103\?"):
        list_sources(["wikitext-104"], PrepareSettings(()), split="train")


def test_a_full_disk_below_a_copy_is_not_said_of_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(opening, "open_new", lambda path: Full())
    path = tmp_file(tmp_path)
    (file,) = list_sources([path], PrepareSettings(inputs=(str(path),)), split="train").files
    with ExitStack() as streams, pytest.raises(OSError, match="No space left"):
        opening.begin(file, tmp_path / "copy", at_most=10, allow_protocols=(), streams=streams)


def tmp_file(folder: Path) -> Path:
    path = folder / "a.txt"
    path.write_text("some text", encoding="utf-8")
    return path


def test_a_folder_leaves_out_json_and_the_pattern_that_the_message_shows_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("en").mkdir()
    with gzip.open("en/c4-train.00000-of-01024.json.gz", "wt") as file:
        file.write('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"pattern: '\*\*/\*\.json\.gz' selects"):
        texts_of(["en"])
    assert texts_of(["**/*.json.gz"]) == ["a"]
