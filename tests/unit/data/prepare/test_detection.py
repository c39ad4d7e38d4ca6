"""The first 4 KiB of an input show its format. It is read in this format, or refused with the format and a remedy."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import random
import shlex
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.http import serve
from tests.unit.data.prepare.test_sources import read, texts_of
from txl_dist.data.prepare.detection import HEAD_BYTES, detect_content
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.errors import DataError

ROOT = Path(__file__).parents[4]
TEXT = "A plain text.\nIt has two lines.\n"
RECORDS = "".join(json.dumps({"text": f"record {i}"}) + "\n" for i in range(3))
TEXTS = [f"record {i}" for i in range(3)]
SCRIPTS = {
    "Latin": range(0xE0, 0x17F),
    "Greek": range(0x3B1, 0x3CA),
    "Cyrillic": range(0x430, 0x450),
    "Armenian": range(0x561, 0x587),
    "Hebrew": range(0x5D0, 0x5EB),
    "Arabic": range(0x627, 0x64B),
    "Devanagari": range(0x915, 0x93A),
    "Tamil": range(0xB95, 0xBBA),
    "Thai": range(0xE01, 0xE2F),
    "Georgian": range(0x10D0, 0x10F1),
    "Hangul": range(0xAC00, 0xD7A4),
    "Kana": range(0x3041, 0x3097),
    "Han": range(0x4E00, 0x9FA6),
    "symbols": range(0x1F600, 0x1F650),
}
LIKE_MAGIC = (
    "PAR1 is how parquet files begin.",
    "PK is short for many things.",
    "BZh91AY&SY opens a bzip2 file.",
    "Rar! it cried",
    "%PDF-1.7 is a header.",
    "%!PS-Adobe-3.0",
    "{\\rtf1 is RTF",
    "WARC/1.0\r\nWARC-Type: warcinfo",
    "GIF89a",
    "7z",
    "MZ",
    "ORCHESTRA",
    "ID3 tags",
    "OggS",
    "RIFF of a guitar",
    "!<arch>\nis ar",
    "070701 is a number",
    "SQLite format 3",
    "MThd",
    "version https://git-lfs.github.com/spec/v1\nis the first line of a pointer",
    "<!DOCTYPE html>\n<p>on HTML</p>",
    "/annex/objects/ is where git-annex keeps files",
    "404: Not Found is what servers say",
    "\x1b[31mred\x1b(B",
    "\f\v\b",
    "[1] a footnote",
    "outs:\n- a list",
    "JFIF",
    "ustar",
    "II*",
    "LZIP",
)


def prose(script: str, *, num_characters: int, separator: str = " ") -> str:
    """Words of random letters, always the same for a script."""
    letters = [code for code in SCRIPTS[script] if unicodedata.category(chr(code)) != "Cn"]
    chance = random.Random(script)
    words = []
    while sum(map(len, words)) < num_characters:
        words.append("".join(chr(chance.choice(letters)) for _ in range(chance.randint(2, 8))))
    return separator.join(words)


def zipped(name: str = "a.txt") -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr(name, TEXT)
    return sink.getvalue()


def tarred(name: str = "a.txt", *, old: bool = False) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        member = tarfile.TarInfo(name)
        member.size = len(TEXT)
        archive.addfile(member, io.BytesIO(TEXT.encode()))
    content = sink.getvalue()
    if old:  # before POSIX: no signature, another checksum
        header = bytearray(content[:512])
        header[257:265] = bytes(8)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        content = bytes(header) + content[512:]
    return content


def parquet() -> bytes:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    writer.write_table(pyarrow.table({"text": TEXTS}), sink)
    return sink.getvalue()


def arrow() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink, table = io.BytesIO(), pyarrow.table({"text": TEXTS})
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zstd(content: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("zstandard").compress(content)
    return compressed


WORLD: dict[str, Callable[[], bytes]] = {
    "`notes.txt`, UTF-8": TEXT.encode,
    "`notes.txt`, UTF-8 with a byte order mark": lambda: codecs.BOM_UTF8 + TEXT.encode(),
    "`notes.jsonl`, UTF-8 with a byte order mark": lambda: codecs.BOM_UTF8 + RECORDS.encode(),
    "`NOTES.TXT`": TEXT.encode,
    "`NOTES.JSONL`": RECORDS.encode,
    "`notes.jsonlines`": RECORDS.encode,
    "`notes.jl`": RECORDS.encode,
    "`X.PARQUET`": parquet,
    "`x.csv`": TEXT.encode,
    "`x.TSV`": TEXT.encode,
    "`x.jsonl.GZ`": lambda: gzip.compress(RECORDS.encode()),
    "`x.jsonl.bz2`": lambda: bz2.compress(RECORDS.encode()),
    "`x.txt.xz`": lambda: lzma.compress(TEXT.encode()),
    "`x.txt.lzma`": lambda: lzma.compress(TEXT.encode(), format=lzma.FORMAT_ALONE),
    "`x.txt.zst`": lambda: zstd(TEXT.encode()),
    "`x.jsonl`, gzip's bytes": lambda: gzip.compress(RECORDS.encode()),
    "`x.txt`, zstd's bytes": lambda: zstd(TEXT.encode()),
    "`x`, bzip2's bytes": lambda: bz2.compress(TEXT.encode()),
    "`x.txt.gz`, compressed twice": lambda: gzip.compress(gzip.compress(TEXT.encode())),
    "`x.jsonl.gz`, not compressed": RECORDS.encode,
    "`part-00000`, JSON lines": RECORDS.encode,
    "`x.txt`, JSON lines": RECORDS.encode,
    "`x.txt`, parquet's bytes": parquet,
    "`x.parquet.gz`": lambda: gzip.compress(parquet()),
    "`notes.txt` that begins with `%PDF-1.7`": lambda: b"%PDF-1.7 " + TEXT.encode(),
    "`x.zip`": zipped,
    "`x.txt`, a zip archive": zipped,
    "`x.tar`": tarred,
    "`x.tar`, samples of images": lambda: tarred("a.jpg"),
    "`x.tar.gz`": lambda: gzip.compress(tarred()),
    "`x.tgz`": lambda: gzip.compress(tarred(old=True)),
    "`x.7z`": lambda: b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(range(256)),
    "`x.rar`": lambda: b"Rar!\x1a\x07\x01\x00" + bytes(range(256)),
    "`x.txt.lz4`": lambda: b"\x04\x22\x4d\x18\x64\x40\xa7" + bytes(range(256)),
    "`x.docx`": lambda: zipped("[Content_Types].xml"),
    "`x.docx`, its text first": lambda: zipped("word/document.xml"),
    "`x.parquet`, empty": lambda: b"",
    "`x.pdf`": lambda: b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n",
    "`x.png`": lambda: b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    "`x.arrow`": arrow,
    "`x.warc.gz`": lambda: gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n"),
    "`x.txt`, UTF-16 with a mark": lambda: TEXT.encode("utf-16"),
    "`x.txt`, UTF-16 without a mark": lambda: TEXT.encode("utf-16-le"),
    "`x.jsonl`, UTF-32": lambda: RECORDS.encode("utf-32-be"),
    "`x.jsonl.gz`, UTF-16": lambda: gzip.compress(RECORDS.encode("utf-16")),
    "`x.txt`, ISO-2022-JP": lambda: prose("Kana", num_characters=40).encode("iso2022_jp", "ignore"),
    "`x.txt`, Windows-1252": lambda: "na\xefve caf\xe9s \xe0 la carte".encode("cp1252"),
    "`x.txt` with a NUL byte": lambda: b"some \x00text",
    "`x.txt`, a pointer of git-lfs": lambda: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"5e" * 32 + b"\nsize 12345\n"
    ),
    "`x.txt`, a pointer of git-annex": lambda: b"/annex/objects/SHA256E-s12345--" + b"5e" * 32 + b".txt\n",
    "`x.txt.dvc`": lambda: b"outs:\n- md5: " + b"5e" * 16 + b"\n  size: 12345\n  path: x.txt\n",
    "`x.jsonl`, a web page": lambda: b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>",
    "`x.txt`, `Entry not found`": lambda: b"Entry not found",
    "`x.jsonl`, a field that is null": lambda: b'{"text": "a"}\n{"text": null}\n',
    "`x.jsonl`, a field that is missing": lambda: b'{"text": "a"}\n{"body": "b"}\n',
    "`x.jsonl`, a field that is a list": lambda: b'{"text": "a"}\n{"text": ["b"]}\n',
    "`x.jsonl`, a field that occurs twice": lambda: b'{"text": "a", "text": "b"}\n',
    "`x.json`, an array": lambda: json.dumps([{"text": each} for each in TEXTS]).encode(),
    "`x.json` over many lines": lambda: json.dumps({"text": "one"}, indent=1).encode(),
}
"""What the page's table speaks of."""


NOT_ON_THE_PAGE = {
    "`notes.txt`, UTF-8": ("text", ""),
    "`NOTES.TXT`": ("text", ""),
    "`X.PARQUET`": ("parquet", ""),
    "`x.txt`, zstd's bytes": ("text", ""),
    "`x.txt`, a zip archive": ("refused: a zip archive", "`unzip x.txt`"),
    "`x.jsonl`, a field that occurs twice": (
        "refused: the field 'text' occurs twice in the record",
        "`--skip-invalid`",
    ),
    "`notes.jsonl`, UTF-8 with a byte order mark": ("JSON lines", ""),
    "`notes.jl`": ("JSON lines", ""),
    "`notes.jsonlines`": ("JSON lines", ""),
    "`x.txt.xz`": ("text", ""),
    "`x.txt.zst`": ("text", ""),
    "`x.txt.lzma`": ("text", ""),
    "`x.jsonl.bz2`": ("JSON lines", ""),
    "`x`, bzip2's bytes": ("text", ""),
    "`x.txt.gz`, compressed twice": ("text", ""),
    "`x.TSV`": ("text", "`--jsonl-field COLUMN`"),
    "`x.parquet.gz`": ("parquet", ""),
    "`x.tar`": ("text", ""),
    "`x.tgz`": ("text", ""),
    "`x.rar`": ("refused: a rar archive", "`unrar x x.rar`"),
    "`x.docx`, its text first": ("refused: an office document or e-book", "`pandoc x.docx -t plain -o out.txt`"),
    "`x.parquet`, empty": ("refused: an empty file, not a parquet file", ""),
    "`x.jsonl`, UTF-32": ("refused: text in UTF-32BE", "`iconv -f UTF-32BE -t UTF-8 x.jsonl > out.jsonl`"),
    "`x.jsonl.gz`, UTF-16": ("refused: text in UTF-16", "`iconv -f UTF-16 -t UTF-8 unpacked.jsonl > out.jsonl`"),
    "`x.txt`, ISO-2022-JP": ("refused: text in ISO-2022-JP", "`iconv -f ISO-2022-JP -t UTF-8 x.txt > out.txt`"),
    "`x.txt.dvc`": ("refused: a DVC pointer", "`dvc pull x.txt.dvc`"),
    "`x.json` over many lines": ("refused: a JSON object over several lines", "`jq -c . x.json > out.jsonl`"),
    "`x.txt`, a pointer of git-annex": ("refused: a git-annex pointer", "`git annex get x.txt`"),
    "`x.jsonl.GZ`": ("JSON lines", ""),
    "`x.jsonl.gz`, not compressed": ("JSON lines", ""),
    "`x.txt`, JSON lines": ("text", "`--documents jsonl`"),
    "`x.7z`": ("refused: a 7z archive", "`7z x x.7z`"),
    "`x.txt.lz4`": ("refused: compressed (lz4)", "`lz4 -d x.txt.lz4`"),
    "`x.arrow`": ("refused: an Arrow file", "`to_parquet('out.parquet')`"),
    "`x.txt`, UTF-16 without a mark": ("refused: text in UTF-16LE", "`iconv -f UTF-16LE -t UTF-8 x.txt > out.txt`"),
    "`x.txt`, `Entry not found`": ("refused: the error message of a server", "download the file again"),
    "`x.jsonl`, a field that is missing": ("refused: no field 'text'", "`--jsonl-field`"),
    "`x.jsonl`, a field that is a list": ("refused: the field 'text' contains a list, not text", "`--skip-invalid`"),
}
"""What other inputs of the same kinds get: (result, remedy)."""


def rows_of_page() -> dict[str, tuple[str, str]]:
    """(what it gets, remedy) of each input of the table."""
    page = (ROOT / "docs" / "preparing-data.md").read_text(encoding="utf-8")
    lines = page.partition("\n## Inputs\n")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    return {cell[0]: (cell[1].removesuffix("|").strip(), cell[2] if len(cell) > 2 else "") for cell in cells}


EXPECTED = rows_of_page() | NOT_ON_THE_PAGE


def test_this_file_makes_each_input_of_the_page() -> None:
    assert EXPECTED.keys() == WORLD.keys()
    assert len(rows_of_page()) >= 20


@pytest.mark.parametrize("row", WORLD)
def test_each_input_of_the_page_gets_what_the_page_says(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets, remedy = EXPECTED[row]
    content, path = WORLD[row](), Path(row.split("`")[1])
    monkeypatch.chdir(tmp_path)
    path.write_bytes(content)
    if not gets.startswith("refused: "):
        expected = [content.decode()] if row.endswith("JSON lines") and path.suffix == ".txt" else TEXTS
        if gets == "text" and expected is TEXTS:
            expected = ["%PDF-1.7 " + TEXT if "PDF" in row else TEXT]
        assert texts_of([path]) == expected
        return
    with pytest.raises(DataError) as raised:
        read([path])
    message = str(raised.value)
    assert message.startswith(str(path))
    assert gets.removeprefix("refused: ") in message
    assert remedy.strip("`") in message
    assert "\n" not in message
    assert "--encoding-errors" not in message
    for policy in ("replace", "skip"):
        if "Windows" not in row:
            with pytest.raises(DataError):
                read([path], encoding_errors=policy)


def valid_texts() -> list[tuple[str, str]]:
    """(name for messages, text): each script in four forms, and what begins like magic bytes."""
    found = []
    for script in SCRIPTS:
        found += [
            (f"{script}, short", prose(script, num_characters=30)),
            (f"{script}, lines", prose(script, num_characters=900, separator="\r\n")),
            (f"{script}, long", prose(script, num_characters=9000)),
            (f"{script}, no blank", prose(script, num_characters=5000, separator="")),
        ]
    return (
        found + [(text[:20], text) for text in LIKE_MAGIC] + [(f"{text[:20]}, long", text * 900) for text in LIKE_MAGIC]
    )


@pytest.mark.parametrize("name", ["notes.txt", "NOTES.md", "notes", "notes.tex", "notes.txt.gz", ""])
def test_valid_text_is_never_refused_wherever_the_4_kib_cut_it(name: str) -> None:
    texts = valid_texts()
    assert len(texts) >= 50
    for what, text in texts:
        for shift in range(4):
            head = ("x" * shift + text if shift else text).encode()[:HEAD_BYTES]
            page = what.startswith("<!DOCTYPE") and name == "notes.txt.gz"
            kind = detect_content(head, name=name).kind
            assert kind == "text" or (page and kind == "refused") or (kind == "json" and "[1]" in what), (what, shift)


def test_valid_text_is_read_as_it_is(tmp_path: Path) -> None:
    texts = [text for _, text in valid_texts()]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:04d}.txt").write_bytes(text.encode())
    assert texts_of([tmp_path]) == texts


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_encodings_without_a_mark_are_named(script: str, encoding: str) -> None:
    for separator in (" ", "\n"):
        head = prose(script, num_characters=3000, separator=separator).encode(encoding)[:HEAD_BYTES]
        content = detect_content(head, name="a.txt")
        assert content.what == f"text in {encoding.upper().replace('-L', 'L').replace('-B', 'B')}, not in UTF-8"


def test_token_ids_are_not_called_text_of_a_wide_encoding() -> None:
    np = pytest.importorskip("numpy")
    for dtype in ("<u2", "<u4"):
        ids = np.random.default_rng(0).zipf(1.2, 4000) % 50257
        content = detect_content(ids.astype(dtype).tobytes()[:HEAD_BYTES], name="train.bin")
        assert "NUL" in content.what
        assert "tr -d" not in content.remedy, "without NUL they would be noise"


@pytest.mark.parametrize("encoding", ["latin-1", "koi8-r", "shift_jis", "gbk", "euc-kr", "cp1251"])
def test_a_text_in_another_encoding_is_refused_with_iconv_and_not_with_what_makes_it_noise(
    tmp_path: Path, encoding: str
) -> None:
    script = {"latin-1": "Latin", "koi8-r": "Cyrillic", "cp1251": "Cyrillic", "euc-kr": "Hangul"}.get(encoding, "Kana")
    (tmp_path / "a.txt").write_bytes(prose(script, num_characters=3000).encode(encoding, "ignore"))
    with pytest.raises(DataError, match=r"a\.txt: byte \d+ .* not valid UTF-8.*iconv -f ENCODING -t UTF-8") as raised:
        read([tmp_path / "a.txt"])
    assert "--encoding-errors" not in str(raised.value)


def test_bytes_are_kept_as_they_are_where_the_user_says_so_but_no_archive(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20
    (tmp_path / "a.bin").write_bytes(content)
    (tmp_path / "b.zip").write_bytes(zipped())
    text = texts_of([tmp_path / "a.bin"], encoding_errors="keep")
    assert text[0].encode("utf-8", "surrogateescape") == content
    with pytest.raises(DataError, match="a zip archive"):
        read([tmp_path / "b.zip"], encoding_errors="keep")


def test_a_command_s_output_is_detected_like_a_file() -> None:
    allowed: dict[str, Any] = {"allow_protocols": ("pipe",)}
    line = json.dumps({"text": "x"})
    assert texts_of([f"pipe:echo '{line}'"], **allowed) == ["x"]
    assert texts_of([f"pipe:echo '{line}'"], **allowed, stdin_format="text") == [line + "\n"]
    assert texts_of([f"pipe:echo '{line}' | gzip | gzip"], **allowed) == ["x"]
    with pytest.raises(DataError, match=r"a zip archive.*Save the input as a file"):
        read(["pipe:printf 'PK\\3\\4\\0'"], **allowed)
    with pytest.raises(DataError, match=r"iconv -f UTF-16LE -t UTF-8 FILE"):
        read(["pipe:printf 'a\\0b\\0c\\0'"], **allowed)


def test_a_url_is_asked_for_its_bytes_once_and_detected_by_them(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    contents = {
        "a.txt": TEXT.encode(),
        "plain.jsonl.gz": RECORDS.encode(),
        "b": gzip.compress(RECORDS.encode()),
        "c.jsonl": bz2.compress(RECORDS.encode()),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "b?download=true").write_bytes(contents["b"])
    (tmp_path / "page.txt").write_bytes(b"\n<html><body>Sign in</body></html>")
    (tmp_path / "d.zip").write_bytes(zipped())
    with serve(tmp_path) as server:
        for name in contents:
            before = server.requests[name]
            asked = texts_of([f"{server.url}/{name}"])
            assert asked == ([TEXT] if name == "a.txt" else TEXTS)
            assert server.requests[name] - before <= 3, "two look at its size, one reads it"
        assert texts_of([f"{server.url}/b?download=true"]) == TEXTS
        with pytest.raises(DataError, match=r"page\.txt is a web page"):
            read([f"{server.url}/page.txt"])
        with pytest.raises(DataError, match=r"d\.zip is a zip archive.*Save the input as a file.*unzip d\.zip"):
            read([f"{server.url}/d.zip"])


def test_a_stream_that_is_read_once_is_json_lines_by_its_content(tmp_path: Path) -> None:
    records = "".join(json.dumps({"text": f"record {i} " * 20}) + "\n" for i in range(200))
    path = tmp_path / "r"
    path.write_bytes(gzip.compress(records.encode()))
    tokenizer = tmp_path / "first"
    prepare_corpus(tokenizer, inputs=[str(path)], kind="byte", num_workers=1)
    piped = prepare_corpus(
        tmp_path / "piped",
        inputs=[f"pipe:cat {path}"],
        allow_protocols=("pipe",),
        tokenizer_path=tokenizer / "tokenizer.json",
        num_workers=1,
    )
    assert piped.corpus.fingerprint == prepare_corpus(tokenizer, inputs=[str(path)], kind="byte").corpus.fingerprint
    assert piped.corpus.statistics["documents_read"] == 200


def test_json_lines_that_are_read_as_text_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(RECORDS)
    summary = prepare_corpus(
        tmp_path / "out", inputs=[tmp_path / "a.txt"], kind="byte", valid_fraction=0, num_workers=1
    )
    said = "\n".join(summary.lines())
    assert "a.txt: begins like JSON lines but is read as plain text. To read its records, use --documents jsonl" in said


@pytest.mark.parametrize(("name", "separator"), [("x.csv", ","), ("X.TSV", "\t"), ("x.tab.gz", "\t")])
def test_a_table_that_is_read_as_text_is_said_with_a_command_that_makes_records_of_it(
    name: str, separator: str, tmp_path: Path
) -> None:
    rows = [["title", "text"], ["one", 'said "two", and left'], ["three", "four"]]
    table = io.StringIO()
    csv.writer(table, delimiter=separator).writerows(rows)
    content = table.getvalue().encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    summary = prepare_corpus(tmp_path / "out", inputs=[tmp_path / name], kind="byte", valid_fraction=0, num_workers=1)
    (notice,) = [line for line in summary.lines() if " is a table " in line]
    assert f"{name}: is a table and is read as text" in notice
    assert notice.endswith("with --jsonl-field COLUMN")
    words = shlex.split(notice.split("To train on one column: ")[1].split(" < FILE")[0])
    done = subprocess.run([sys.executable, *words[1:]], input=content, capture_output=True, check=True)
    (tmp_path / "out.jsonl").write_bytes(done.stdout)
    assert texts_of([tmp_path / "out.jsonl"]) == [row[1] for row in rows[1:]]


def test_records_in_a_file_that_is_named_as_a_table_are_read_as_records(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(RECORDS)
    summary = prepare_corpus(
        tmp_path / "out", inputs=[tmp_path / "a.csv"], kind="byte", valid_fraction=0, num_workers=1
    )
    said = "\n".join(summary.lines())
    assert " is a table " not in said
    assert summary.corpus.statistics["documents_read"] == len(TEXTS)


@pytest.mark.parametrize("settings", [{"kind": "byte", "valid_fraction": 0}, {"kind": "word"}, {"kind": "bpe"}])
@pytest.mark.parametrize("content", [b"", b" \n\n\t", codecs.BOM_UTF8])
def test_an_input_without_text_is_refused_by_its_name(content: bytes, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "nothing.txt").write_bytes(content)
    if content.strip() == b"" and content and settings["kind"] == "byte":
        pytest.skip("blanks are text for a byte tokenizer")
    with pytest.raises(DataError, match=r"contain no text for the train split: \S+nothing\.txt"):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path / "nothing.txt"], num_workers=1, **settings)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_held_out_input_without_text_is_refused_by_its_name(split: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "nothing.md").touch()
    given = {f"{split}_inputs": [str(tmp_path / "nothing.md")], "valid_fraction": 0}
    with pytest.raises(DataError, match=rf"files of the split {split} contain no text: \S+nothing\.md"):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path / "text.txt"], kind="byte", num_workers=1, **given)


def test_damage_behind_the_first_bytes_is_still_found(tmp_path: Path) -> None:
    whole = bz2.compress(b"".join(b"%d\n" % (i * i) for i in range(30_000)))
    for length in (len(whole) - 1, len(whole) // 2, 40):
        (tmp_path / "a.txt").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"cannot read .*a\.txt"):
            read([tmp_path / "a.txt"])


def test_zstd_after_a_skippable_frame_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd(TEXT.encode()))
    assert texts_of([tmp_path / "a.txt"]) == [TEXT]


def test_a_mark_of_utf_32_is_not_taken_for_one_of_utf_16() -> None:
    for mark, encoding in ((codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be")):
        assert "UTF-32" in detect_content(mark + TEXT.encode(encoding), name="a.txt").what
