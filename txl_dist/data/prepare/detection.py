"""Detection of the format of an input by its first 4 KiB and its name.

    detect_content(head, name=...)     compressed, parquet, an array, a tar, text, JSON lines, or an unreadable
                                       format

The content decides whether a file is text or another format. For text, the suffix of the name decides how the text is
read: `.jsonl` as JSON records, `.txt` as plain text. Bytes that are valid UTF-8 without NUL are text, even if they
begin like another format, unless the name has the suffix of that format. If a format cannot be read, the result
contains the name of the format and a command that converts the file.

Limitations: a format that begins with neither a signature nor NUL bytes is distinguished from text by its control
characters only. Nothing after the first 4 KiB is examined here. The reader of documents refuses later NUL bytes.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from txl_dist.io.files import UTF8, text_encoding

HEAD_BYTES = 1 << 12
"""Number of bytes at the beginning of an input that are examined."""
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".jsonlines", ".jl"})
"""Suffixes of files of JSON lines. A `.json` file is also read as JSON lines if the file itself is an input, but
`.json` files in an input folder of text are left out."""
PLAIN_SUFFIXES = frozenset({".txt", ".md", ".py", ".tokens"})
"""Suffixes of files that are read as plain text."""
COMPRESSED_SUFFIXES = frozenset({".gz", ".gzip", ".bgz", ".bz2", ".bz", ".xz", ".lzma", ".zst", ".zstd"})
_MOST_CONTROLS = 0.05
"""Maximum share of control characters in bytes that are not UTF-8. Bytes with at most this share can be text in another
encoding. Random bytes have a share of 0.1, and text in 8-bit encodings has nearly none."""
_MOST_ODD = 0.02
"""Maximum share of unassigned and control characters in decoded bytes that count as text."""
_MOST_SCRIPTS = 12
"""Maximum number of scripts in decoded bytes that count as text. A script is a block of 256 characters, or one of
`_LARGE_SCRIPTS`."""
_LARGE_SCRIPTS = (range(0x2E80, 0xA000), range(0xAC00, 0xD7B0))
"""Code points of Chinese and Japanese, and of Korean. Each range counts as one script."""
_FEWEST_LETTERS = 0.5
"""Bytes count as words if more than this share of their non-blank characters are letters."""
_MOST_STRAY_NULS = 0.1
"""Maximum share of NUL bytes in UTF-8 text that contains stray NUL bytes. Bytes with a larger share are tested as
UTF-16 and UTF-32."""

Kind = Literal["text", "jsonl", "json", "parquet", "npy", "tar", "gzip", "bzip2", "xz", "zstd", "binary", "refused"]


class Content(NamedTuple):
    """Format of an input as `detect_content` found it, and advice for the user if the format cannot be read."""

    kind: Kind
    """Kind of the content. json: JSON that does not have one object per line, and so cannot be read as JSON lines.
    binary: bytes that are not text. They are read only with --encoding-errors keep. refused: a format that is never
    read. The user must unpack or fetch the file first."""
    what: str = ""
    """Name of the format in an error message. Empty if the format can be read."""
    remedy: str = ""
    """Advice to the user, with placeholders. {stored}: the file as it is stored. {file}: the file after decompression,
    if it is compressed. {out}: a new file with the suffix of the input, for the output of a command."""


class _Signature(NamedTuple):
    """Rule that detects a file format by its first bytes."""

    pattern: bytes
    """Regular expression for the first bytes."""
    content: Content
    suffixes: frozenset[str] = frozenset()
    """File suffixes of the format. A file with such a suffix can have this format even if its bytes are valid UTF-8."""


def _archive(what: str, command: str) -> Content:
    return Content("refused", what, f"Unpack the archive (`{command}`) and give the files in it.")


def _convert(command: str) -> str:
    return f"Convert the file (`{command}`) and give the result."


def _packed(what: str, command: str) -> Content:
    return Content("refused", what, f"Decompress the file (`{command}`) and give the result.")


def _document(what: str, command: str) -> Content:
    return Content("binary", what, f"Extract the text (`{command}`) and give the extracted text.")


def _pointer(store: str, command: str) -> Content:
    return Content("refused", f"a {store} pointer, not the file itself", f"Fetch the file: `{command}`.")


_RECORDS = "Write the texts as JSON lines or parquet, and give the new file."
_ARROW = Content(
    "binary",
    "an Arrow file",
    "Convert the file (`python -c \"import datasets; datasets.Dataset.from_file('{file}').to_parquet('out.parquet')\"`)"
    " and give the result.",
)
_MEDIA = Content("binary", "an image, sound or video", "Remove the file from the inputs.")
_PROGRAM = Content("binary", "a program", "Remove the file from the inputs.")
_SIGNATURES = (
    _Signature(rb"\x1f\x8b\x08", Content("gzip")),
    _Signature(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", Content("bzip2")),
    _Signature(rb"\xfd7zXZ\x00", Content("xz")),
    _Signature(rb"\x5d\x00\x00..(\xff{8}|.{5}\x00{3})\x00", Content("xz")),  # the older .lzma
    _Signature(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", Content("zstd")),
    _Signature(rb"PAR1", Content("parquet"), frozenset({".parquet"})),
    _Signature(
        rb"PARE", Content("binary", "an encrypted parquet file", "Decrypt the file first."), frozenset({".parquet"})
    ),
    _Signature(rb"\x93NUMPY", Content("npy")),
    _Signature(
        rb"PK\x03\x04.{26}(\[Content_Types\]\.xml|_rels/|docProps/|(word|xl|ppt)/|mimetypeapplication/)",
        _document("an office document or e-book", "pandoc {file} -t plain -o out.txt"),
    ),
    _Signature(rb"PK(\x03\x04|\x05\x06|\x07\x08)", _archive("a zip archive", "unzip {file}")),
    _Signature(rb"7z\xbc\xaf\x27\x1c", _archive("a 7z archive", "7z x {file}")),
    _Signature(rb"Rar!\x1a\x07", _archive("a rar archive", "unrar x {file}")),
    _Signature(rb"!<arch>\n", _archive("an ar archive or Debian package", "ar x {file}"), frozenset({".a", ".deb"})),
    _Signature(rb"0707(01|02|07)", _archive("a cpio archive", "cpio -i < {file}"), frozenset({".cpio"})),
    _Signature(rb"MSCF\x00{4}", _archive("a cabinet archive", "cabextract {file}")),
    _Signature(rb"\xed\xab\xee\xdb", _archive("an rpm package", "rpm2cpio {file} | cpio -id")),
    _Signature(rb"\x1f[\x9d\xa0\x1e]", _packed("compressed (.Z)", "gzip -d {file}")),
    _Signature(rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18", _packed("compressed (lz4)", "lz4 -d {file}")),
    _Signature(rb"\xff\x06\x00\x00sNaPpY", _packed("compressed (snappy)", "snzip -d {file}")),
    _Signature(rb"LZIP\x01", _packed("compressed (lzip)", "lzip -d {file}"), frozenset({".lz"})),
    _Signature(rb"\x89LZO\x00\r\n\x1a\n", _packed("compressed (lzop)", "lzop -d {file}")),
    _Signature(
        rb"WARC/1\.\d\r?\nWARC-",
        Content(
            "refused",
            "a WARC archive of web pages",
            "Extract the texts first, for instance with the Python packages warcio and trafilatura.",
        ),
        frozenset({".warc", ".wet", ".wat"}),
    ),
    _Signature(rb"ARROW1\x00\x00|\xff{4}..\x00\x00\x10\x00\x00\x00", _ARROW),
    _Signature(rb"Obj\x01", Content("binary", "an Avro file", _RECORDS)),
    _Signature(rb"ORC[\x00-\x1f]", Content("binary", "an ORC file", _RECORDS)),
    _Signature(rb"\x89HDF\r\n\x1a\n", Content("binary", "an HDF5 file", _RECORDS)),
    _Signature(rb"SQLite format 3\x00", Content("binary", "an SQLite database", _RECORDS)),
    _Signature(rb"\x80[\x02-\x05][\x28-\x8f\x95]", Content("binary", "a Python pickle", _RECORDS), frozenset({".pkl"})),
    _Signature(
        rb".{6}\x00\x00\{\"", Content("binary", "a safetensors file", "Remove this file of weights from the inputs.")
    ),
    _Signature(rb"\s*%PDF-\d", _document("a PDF", "pdftotext {file} out.txt"), frozenset({".pdf"})),
    _Signature(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _document("an old office document", "catdoc {file} > out.txt")),
    _Signature(
        rb"\{\\rtf\d", _document("an RTF document", "pandoc {file} -t plain -o out.txt"), frozenset({".rtf", ".doc"})
    ),
    _Signature(rb"%!PS", _document("a PostScript file", "ps2ascii {file} out.txt"), frozenset({".ps", ".eps"})),
    _Signature(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|II\*\x00|MM\x00\*|RIFF.{4}(WAVE|WEBP|AVI )", _MEDIA),
    _Signature(rb"OggS\x00|ID3[\x02-\x04]\x00|fLaC\x00|MThd\x00|.{4}ftyp|\x1aE\xdf\xa3", _MEDIA),
    _Signature(rb"\x7fELF|MZ.\x00|\x00asm|\xca\xfe\xba\xbe|\xcf\xfa\xed\xfe", _PROGRAM),
    _Signature(
        rb"\x00\x05\x16[\x00\x07]\x00",
        Content(
            "refused",
            "macOS metadata of another file (AppleDouble)",
            "Remove the metadata file from the inputs. The text is in the other file.",
        ),
    ),
)
"""Signatures of file formats. The first signature that matches decides the format."""

_WHOLE_FILES = (
    (
        rb"version https://[\w.-]+/spec/v1\r?\n(ext-[^\n]+\n)*oid sha256:[0-9a-f]{64}\r?\nsize \d+\s*",
        _pointer("git-lfs", "git lfs pull"),
    ),
    (rb"(\.\./)*(\.git)?/?annex/objects/\S+\s*", _pointer("git-annex", "git annex get {file}")),
    (
        rb"(\w+: [^\n]*\n)*outs:\r?\n- (md5|etag|hash): [^\n]+\n( +\w+: [^\n]*\n?)*",
        _pointer("DVC", "dvc pull {file}"),
    ),
    (rb"# xet version \d\s+filesize = \d+\s+hash = \S+\s*", _pointer("git-xet", "git xet pull")),
    (
        rb"\s*(404: Not Found|Entry not found|Repository not found|Invalid username or password\.|"
        rb"Access to (model|dataset|space) \S+ is restricted[^\n]*|<\?xml[^>]*\?>\s*<Error>\s*<Code>.*</Error>|"
        rb"\{\"(error|message|detail)\": ?\"[^\"\n]*\"(, ?\"(documentation_url|status|code)\": ?[^\n]*)?\})\s*",
        Content(
            "refused",
            "the error message of a server, not the file itself",
            "Check the address and your access, and download the file again.",
        ),
    ),
)
"""(pattern, content) of small texts, such as git-lfs pointers, that are in the place of a file that is stored
elsewhere. A pattern must match the whole file."""
_PAGE = Content(
    "refused",
    "a web page (HTML), not a file of the format that its name says",
    "Sign in, or use the address of the file itself: on GitHub `raw.githubusercontent.com`, on Hugging Face "
    "`/resolve/` in place of `/blob/`.",
)
_HTML = re.compile(rb"\s*(<\?xml[^>]*\?>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html[\s>])", re.DOTALL | re.IGNORECASE)
_ISO_2022 = re.compile(rb"\x1b\$[@AB].*?\x1b\([BJ]|\x1b\$\)[ACG].*?\x0e", re.DOTALL)
_FIRST_KEY = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:')
_CONTROLS = frozenset({*range(32), 127} - {*b"\t\n\v\f\r\b\x1b"})


def has_scheme(given: str) -> bool:
    """Return whether an input is a URL: whether it contains `://`."""
    return "://" in given


def path_of_name(location: str) -> PurePosixPath:
    """Return a URL without its query and fragment, or a local path unchanged."""
    if has_scheme(location):
        without_query = location.partition("?")[0]
        location = without_query.partition("#")[0]
    return PurePosixPath(location)


def text_suffix(location: str) -> str:
    """Return the suffix of a name in lower case, without suffixes of compression: `.jsonl` for x.jsonl, X.JSONL and
    x.jsonl.gz."""
    path = path_of_name(location)
    while path.suffix.lower() in COMPRESSED_SUFFIXES:
        path = path.with_suffix("")
    return path.suffix.lower()


def is_named_compressed(location: str) -> bool:
    """Return whether a name has the suffix of a compressed file, such as `.gz`."""
    return path_of_name(location).suffix.lower() in COMPRESSED_SUFFIXES


def detect_content(head: bytes, *, name: str) -> Content:
    """Detect the format of an input from its first bytes and its name.

    `head` is the first HEAD_BYTES bytes of the input, or the whole input if it is shorter. `name` is the path or URL of
    the input, or empty for a stream without a name.
    """
    is_text = b"\0" not in head and _is_utf8(head)
    if name:
        suffix = text_suffix(name)
    else:
        suffix = ""
    for signature in _SIGNATURES:
        could_be_text = is_text and suffix not in signature.suffixes
        if not could_be_text and re.match(signature.pattern, head, re.DOTALL):
            return signature.content
    is_end_of_tar = suffix == ".tar" and not any(head)  # a tar without members, or one that was cut to nothing
    if _is_tar(head) or is_end_of_tar:
        return Content("tar")
    if is_text:
        return _detect_text(head, suffix, name)
    return _detect_bytes(head, suffix)


def _detect_text(head: bytes, suffix: str, name: str) -> Content:
    is_whole = len(head) < HEAD_BYTES
    if not head and suffix == ".parquet":
        return Content("binary", "an empty file, not a parquet file", "Write the parquet file again.")
    head = head.removeprefix(codecs.BOM_UTF8)
    if is_whole:
        for pattern, content in _WHOLE_FILES:
            if re.fullmatch(pattern, head, re.DOTALL):
                return content
    if _ISO_2022.search(head):
        return _in_encoding("ISO-2022-JP")
    is_from_web = name.startswith(("http://", "https://")) and suffix in PLAIN_SUFFIXES
    is_compressed = bool(name) and is_named_compressed(name)
    is_data = is_compressed or suffix in JSONL_SUFFIXES | {".json", ".parquet", ".npy"}
    if (is_from_web or is_data) and _HTML.match(head):
        return _PAGE
    text = head.decode("utf-8", errors="ignore").lstrip("\ufeff \t\r\n")
    if text.startswith("["):
        return Content("json", "a JSON array, not one object per line", _convert("jq -c '.[]' {file} > out.jsonl"))
    if re.match(r"\{\s*\n", text):
        return Content(
            "json", "a JSON object over several lines, not one object per line", _convert("jq -c . {file} > out.jsonl")
        )
    return Content("jsonl" if _begins_with_record(text, is_whole=is_whole) else "text")


def _begins_with_record(text: str, *, is_whole: bool) -> bool:
    """Return whether the first line of a text is a JSON object.

    `is_whole` says whether `text` is the whole input. If `text` ends inside the first line, only the beginning of the
    object is checked.
    """
    line, end, _ = text.partition("\n")
    if not end and not is_whole:
        return bool(_FIRST_KEY.match(line))
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _detect_bytes(head: bytes, suffix: str) -> Content:
    """Detect the format of bytes that are not UTF-8 or that contain NUL."""
    marked = text_encoding(head)
    if marked != UTF8:
        return _in_encoding(marked.upper())
    at = head.find(0)
    if at >= 0:
        wide = _wide_encoding(head)
        if wide:
            return _in_encoding(wide)
        remedy = "Remove the file from the inputs, or convert it to text."
        if _has_words(head.replace(b"\0", b"")):
            remedy = "Remove the NUL bytes (`tr -d '\\000' < {file} > {out}`) and give the result."
        return Content("binary", f"not text: byte {at:,} is NUL", remedy)
    if suffix == ".br":
        return _packed("compressed (brotli)", "brotli -d {file}")
    num_controls = sum(byte in _CONTROLS for byte in head)
    if num_controls > _MOST_CONTROLS * len(head):
        return Content(
            "binary",
            "not text, but bytes of an unknown format",
            "Remove the file from the inputs, or convert it to text.",
        )
    return Content("text")


def _in_encoding(encoding: str) -> Content:
    return Content(
        "binary",
        f"text in {encoding}, not in UTF-8",
        _convert(f"iconv -f {encoding} -t UTF-8 {{file}} > {{out}}"),
    )


def _wide_encoding(head: bytes) -> str:
    """Detect UTF-16 or UTF-32 without a byte order mark. Returns the name of the encoding, or an empty string.

    Bytes in little-endian order can often be decoded in big-endian order too, but to unlikely characters. The encoding
    that gives the largest share of ASCII characters (blanks, line ends) is returned.
    """
    has_few_nuls = head.count(0) <= _MOST_STRAY_NULS * len(head)
    if has_few_nuls and _has_words(head.replace(b"\0", b"")):
        return ""  # UTF-8 with a few NUL bytes
    best = ""
    most = -1.0
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head, final=False)
        except UnicodeDecodeError:
            continue
        num_ascii = sum(character.isascii() for character in text)
        ascii_share = num_ascii / max(len(text), 1)
        if ascii_share > most and _is_plausible(text):
            best = encoding
            most = ascii_share
    return best


def _has_words(head: bytes) -> bool:
    """Return whether bytes are valid UTF-8 and mostly letters.

    Valid UTF-8 alone is not enough, because the bytes of other encodings can happen to be ASCII characters.
    """
    if not _is_utf8(head):
        return False
    words = head.decode("utf-8", errors="ignore").split()
    text = "".join(words)
    num_letters = sum(character.isalpha() for character in text)
    return num_letters > _FEWEST_LETTERS * len(text)


def _is_plausible(text: str) -> bool:
    """Return whether decoded characters are plausible text: nearly all of them are assigned in Unicode, and they belong
    to few scripts.

    Binary numbers that are decoded as text give characters of many scripts.
    """
    num_odd = 0
    for character in text:
        is_blank = character in "\t\n\v\f\r"
        if not is_blank and unicodedata.category(character) in ("Cn", "Co", "Cc"):
            num_odd += 1
    if not text or num_odd > _MOST_ODD * len(text):
        return False
    scripts = {_script_of(character) for character in text}
    return len(scripts) <= _MOST_SCRIPTS


def _script_of(character: str) -> int:
    """Return a number for the script of a character: its block of 256 characters, or the start of a large script."""
    code = ord(character)
    for script in _LARGE_SCRIPTS:
        if code in script:
            return script.start
    return code >> 8


def _is_utf8(head: bytes) -> bool:
    """Return whether the bytes are valid UTF-8. A character that is cut at the end of the examined bytes counts as
    valid."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        return False
    return True


def _is_tar(head: bytes) -> bool:
    """Return whether the first 512 bytes are a tar header.

    The checksum in the header decides, because old tar headers have no signature.
    """
    header = head[:512]
    if len(header) < 512 or not any(header):
        return False
    try:
        checksum = int(header[148:156].strip(b"\0 ") or b"-", 8)
    except ValueError:
        return False
    # The sum over the header, with blanks in place of the checksum's own eight bytes.
    before = sum(header[:148])
    after = sum(header[156:])
    return checksum == before + 8 * ord(" ") + after
