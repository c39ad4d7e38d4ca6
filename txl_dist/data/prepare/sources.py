"""Inputs of `txl prepare` as lists of files: files, folders, globs, URLs, stdin, commands and the built-in text.

    a.txt  B.JSONL.zst  c.parquet     the file itself; the content decides whether it is text, and the suffix decides
                                      how text is read (detection.py); for an unknown suffix the content decides both
    folder/                           its files with known suffixes, sorted; links to folders are not followed
    'data/**/*.jsonl.gz'              a pattern, sorted; quoted, so that the shell does not expand it
    '{000000..000127}.tar'            a range or list in braces, as webdataset expands it; also in URLs and patterns
    https://...  s3://bucket/x/*.zst  through fsspec; a pattern or a folder only if the store can list its files
    -                                 stdin
    NAME:REST                         the documents of a plugin's text source
    pipe:COMMAND                      output of a shell command; only if the protocol `pipe` is allowed by name
    stdlib                            the built-in corpus: the standard library of the running Python

Hidden files (`is_hidden`) in folders, patterns and URLs are left out. Files are listed but not opened here. The order
of the list is the order of the documents. When a preparation continues, each file's `identity` shows whether the file
has changed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from txl_dist.console.formatting import counted
from txl_dist.console.suggest import did_you_mean
from txl_dist.data.prepare.datasets import NAMED
from txl_dist.data.prepare.detection import JSONL_SUFFIXES, PLAIN_SUFFIXES, has_scheme, text_suffix
from txl_dist.data.prepare.documents import Form
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.storage.fsspec_io import filesystem_of, retrying
from txl_dist.errors import ConfigError, DataError, translate_errors

STDLIB = "stdlib"
"""Input name of the built-in corpus."""
STDIN = "-"
"""Input name of standard input."""
PIPE = "pipe:"
"""Prefix of an input that is a shell command."""
TEXT_SUFFIXES = PLAIN_SUFFIXES | JSONL_SUFFIXES | {".parquet"}
"""Suffixes of the files that are read from a folder, compressed or not. A file that is itself an input can have any
suffix."""
ID_SUFFIXES = JSONL_SUFFIXES | {".npy", ".json"}
"""Suffixes of the files that are read from a folder if the inputs are token ids."""
_NAMES_SAY = TEXT_SUFFIXES | ID_SUFFIXES
"""Suffixes that decide how text is read. For other suffixes the content decides."""
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HIDDEN_NAMES = frozenset(
    {
        "__macosx",
        "__pycache__",
        "lost+found",
        "_temporary",
        "_delta_log",
        "thumbs.db",
        "ehthumbs.db",
        "desktop.ini",
        "icon\r",
        "$recycle.bin",
        "system volume information",
        "@eadir",
        "#recycle",
    }
)
"""Names of files and folders that systems, caches and unfinished jobs write. The names are in lower case. Names that
begin with a dot are not listed, because all of them count as hidden."""
_MAGIC = re.compile(r"[*?[]")
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
"""Range or list in braces, such as `{000000..000127}` or `{train,more}`."""
_MOST_EXPANDED = 1 << 20
"""Maximum number of paths or URLs that the braces of one input may stand for."""
_URL_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "blob_id",
    "mtime",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "updated",
    "created",
)
"""Keys under which file systems give the version of a file. The size alone does not prove that a file is unchanged."""


class TextSource(NamedTuple):
    """Text source that a plugin registers. It gives the documents of inputs of the form `NAME:REST`."""

    read: Callable[[str], Iterable[str]]
    """Function that takes REST and yields the text of each document."""


TEXT_SOURCES: dict[str, TextSource] = {}
"""Registered text sources by NAME. Only plugins add entries (`plugins.register_source`)."""


class SourceFile(NamedTuple):
    """Input file or stream of a preparation, with its split and the way to read it."""

    path: str
    """Local path, URL, `-`, `pipe:COMMAND`, or `NAME:REST` of a plugin's source."""
    split: str
    form: Form
    """Form in which to read the file. The file's name and the settings decide the form. The content can change the form
    when the file is opened."""
    size: int | None
    """Size of the stored file in bytes. None if unknown."""
    identity: str
    """Text that changes when the content of the file changes, such as a modification time. Empty if a change cannot be
    noticed."""
    spooled: str = ""
    """Path of a local copy of an input that can be read only once. The copy is read instead of the input. Empty without
    a copy."""
    rest: IO[bytes] | None = None
    """Open stream of the bytes after the copy, if the copy contains only the beginning of the input. These bytes can be
    read only once."""
    is_form_open: bool = False
    """Whether neither the name nor a setting decides the form. If so, text that looks like JSON lines is read as JSON
    lines."""
    keeps_bytes: bool = False
    """Whether a file that is not text is read as raw bytes. If False, such a file is refused."""
    jsonl_field: str = "text"
    """Field of the JSON lines in which a plugin's source gives each document."""
    member: str = ""
    """Suffix of the members of a tar that contain the text. Empty: the only member of text of each sample."""
    cut: Form = "file"
    """Form in which the members of plain text in a tar are read."""

    @property
    def is_stream(self) -> bool:
        """Whether the input is stdin, a command or a plugin's source, which can be read only once."""
        return is_stream(self.path)

    @property
    def name(self) -> str:
        """Path or URL of the file. Empty for a stream."""
        if self.is_stream:
            return ""
        return self.path


class Listing(NamedTuple):
    """Files that the inputs give, and the files that were left out of folders, patterns and URLs."""

    files: list[SourceFile]
    num_other: int = 0
    """Number of files in folders that were left out because they have no suffix of text. Files of the built-in corpus
    are not counted."""
    hidden: tuple[str, ...] = ()
    """Paths of hidden files that were left out (`is_hidden`)."""

    def joined(self, other: Listing) -> Listing:
        """Return a listing of the files of this listing, followed by the files of `other`."""
        return Listing(
            files=self.files + other.files,
            num_other=self.num_other + other.num_other,
            hidden=self.hidden + other.hidden,
        )


def list_sources(inputs: Sequence[str | Path], settings: PrepareSettings, *, split: str) -> Listing:
    """List the files of the inputs in reading order, and the files that were left out.

    All files get the split `split`. Raises DataError if an input does not exist, contains no text, is not allowed, or
    cannot be listed.
    """
    listing = Listing([])
    keeps_bytes = settings.encoding_errors == "keep"
    for given in chain.from_iterable(expand_braces(str(each)) for each in inputs):
        if given == STDIN and sys.stdin is None:
            raise DataError("stdin is closed. Pipe text into stdin, or give files.")
        if given.startswith(PIPE) and "pipe" not in settings.allow_protocols:
            raise DataError(
                f"{given} is an input that runs a shell command. If you trust the command, add `--allow-protocols "
                "pipe`."
            )
        if is_stream(given):
            form = _stream_form(given, settings)
            is_open = settings.stdin_format == "auto"
            file = SourceFile(given, split, form, None, "", is_form_open=is_open, keeps_bytes=keeps_bytes)
            file = file._replace(jsonl_field=settings.jsonl_field, member=settings.member, cut=settings.documents)
            listing = listing.joined(Listing([file]))
            continue
        if has_scheme(given):
            found = _of_url(given, settings)
        else:
            found = _of_paths(given, settings)
        if not found.files:
            suffixes = " ".join(sorted(suffixes_of(settings)))
            raise DataError(
                f"{given} contains no text files: {counted(found.num_other, 'other file')} and "
                f"{counted(len(found.hidden), 'hidden file')} were left out. In a folder, only files whose names end "
                f"in {suffixes} are read, compressed or not. To read a file with another name, give its path, or give "
                "a quoted pattern: '**/*.json.gz' selects all files that end in .json.gz below the current folder."
            )
        files = []
        for path, size, mark in found.files:
            form = _form(path, settings)
            is_open = text_suffix(path) not in _NAMES_SAY
            file = SourceFile(path, split, form, size, mark, is_form_open=is_open, keeps_bytes=keeps_bytes)
            files.append(file._replace(member=settings.member, cut=settings.documents))
        listing = listing.joined(Listing(files, found.num_other, found.hidden))
    return listing


def expand_braces(given: str) -> list[str]:
    """Return the paths or URLs that an input with ranges or lists in braces stands for, in their order.

    Commands, plugin's inputs and the path of an existing file stay as they are. Raises DataError if the braces stand
    for too many paths, or are not closed.
    """
    if not has_braces(given):
        return [given]
    from braceexpand import braceexpand

    too_many = DataError(
        f"{given} stands for more than {_MOST_EXPANDED:,} files. Check the numbers in the braces, or give a pattern "
        "with `*`."
    )
    ranges = re.findall(r"\{(-?\d{1,30})\.\.(-?\d{1,30})", given)
    if any(abs(int(last) - int(first)) >= _MOST_EXPANDED for first, last in ranges):
        raise too_many
    remedy = "Write `{first..last}` or `{one,another}`, or give a pattern with `*`."
    with translate_errors(DataError, f"cannot expand {given}", remedy, of=(ValueError,)):
        expanded = list(islice(braceexpand(given), _MOST_EXPANDED + 1))
    if len(expanded) > _MOST_EXPANDED:
        raise too_many
    return expanded


def has_braces(given: str) -> bool:
    """Return whether an input has a range or a list in braces, which stands for several paths or URLs."""
    return bool(_BRACES.search(given)) and not is_stream(given) and not os.path.lexists(given)


def check_inputs(inputs: Sequence[tuple[str, Sequence[SourceFile]]]) -> None:
    """Raise DataError if two inputs, for one split or for two splits, contain the same file.

    `inputs` are pairs (input, its files).
    """
    first_input: dict[str, int] = {}
    for number, (given, files) in enumerate(inputs):
        for file in files:
            path = file.path
            if has_scheme(path):
                real_path = path
            else:
                real_path = os.path.realpath(path)
            first = first_input.setdefault(real_path, number)
            if first != number:
                raise DataError(
                    f"{path} is given twice, by the inputs {inputs[first][0]} and {given}. A file in two splits would "
                    "be used for training and for evaluation, and a file that is twice in one split would be read "
                    "twice. Give each file once."
                )


def suffixes_of(settings: PrepareSettings) -> frozenset[str]:
    """Return the suffixes of the files that are taken from a folder."""
    if settings.vocab_list is None:
        return TEXT_SUFFIXES
    return ID_SUFFIXES


def is_hidden(name: str) -> bool:
    """Return whether a name marks a hidden file or folder, or one that a system, an editor or a cache writes."""
    if name in (".", ".."):
        return False
    return name.startswith((".", "~$")) or name.lower() in _HIDDEN_NAMES


def is_repeatable(files: Iterable[SourceFile]) -> bool:
    """Return whether all files can be read again, and a change of any file would be noticed."""
    return all(file.identity for file in files)


def identities(files: Sequence[SourceFile]) -> list[str]:
    """Return for each file a hash of all files up to and including this file.

    If the hash of a file is unchanged in a later run, the inputs up to this file are unchanged.
    """
    state = hashlib.sha256()
    hashes = []
    for file in files:
        state.update(repr((file.path, file.split, file.form, file.size, file.identity)).encode())
        hashes.append(state.hexdigest())
    return hashes


def is_stream(given: str) -> bool:
    """Return whether an input is read once, from front to back: standard input, a command, or a plugin's source."""
    return given == STDIN or given.startswith(PIPE) or plugin_source(given) is not None


def plugin_source(given: str) -> TextSource | None:
    """Return the plugin's text source for an input `NAME:REST`. Returns None for any other input."""
    name, colon, rest = given.partition(":")
    if colon and not rest.startswith("//"):
        return TEXT_SOURCES.get(name)
    return None


def _stream_form(given: str, settings: PrepareSettings) -> Form:
    """Return the form of stdin, a command or a plugin's source. Raises ConfigError for token ids not in JSON lines."""
    if plugin_source(given) is not None:
        if settings.vocab_list is not None:
            raise ConfigError(f"{given} gives text, not token ids. Remove --vocab-list.")
        return "jsonl"
    if settings.vocab_list is None:
        if settings.stdin_format == "jsonl":
            return "jsonl"
        return settings.documents
    if settings.stdin_format == "text":
        raise ConfigError(f"token ids from the input {given} must be JSON lines. Set --stdin-format jsonl.")
    return "ids"


def _form(path: str, settings: PrepareSettings) -> Form:
    """Return the form of a file by its name and the settings.

    Raises ConfigError for token ids without a vocabulary list, and for text together with a vocabulary list.
    """
    suffix = text_suffix(path)
    if settings.vocab_list is not None:
        if suffix not in ID_SUFFIXES:
            raise ConfigError(
                f"{path} is not a file of token ids. With --vocab-list, give files whose names end in "
                f"{' '.join(sorted(ID_SUFFIXES))}, compressed or not. To prepare text, remove --vocab-list."
            )
        if suffix == ".npy":
            return "npy"
        return "ids"
    if suffix == ".npy":
        raise ConfigError(
            f"{path} contains token ids. Give a file with the names of the ids, one per line: --vocab-list FILE."
        )
    if suffix == ".parquet":
        return "parquet"
    if suffix in JSONL_SUFFIXES or suffix == ".json":
        return "jsonl"
    return settings.documents


class _Found(NamedTuple):
    """Files that one input gives. The files are not opened yet."""

    files: list[tuple[str, int | None, str]]
    """(path or URL, size in bytes, identity) of each file."""
    num_other: int = 0
    hidden: tuple[str, ...] = ()


def _of_paths(given: str, settings: PrepareSettings) -> _Found:
    """List the local files of one input. Raises DataError if a file does not exist or cannot be read."""
    taken, num_other, hidden = _paths_of(given, settings)
    files: list[tuple[str, int | None, str]] = []
    for path in taken:
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"{path} is a link to {os.readlink(path)}, which does not exist. Fetch that file (with "
                "git-annex: `git annex get FILE`), or remove the link."
            )
        with translate_errors(DataError, f"cannot read {path}", "Repair or remove the file."):
            status = path.stat()
        files.append((str(path), status.st_size, f"{status.st_mtime_ns}"))
    return _Found(files, num_other, tuple(map(str, hidden)))


def _paths_of(given: str, settings: PrepareSettings) -> tuple[list[Path], int, list[Path]]:
    """Return (files to take, number of files of other suffixes, hidden files).

    Raises DataError if the input does not exist, or if no file matches a pattern.
    """
    path = Path(given)
    if given == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        names = _walk(folder, left_out=_STDLIB_LEFT_OUT)
        return [folder / name for name in names if name.endswith(".py")], 0, []
    if path.is_dir():
        names = _walk(path)
        seen = [name for name in names if not _has_hidden(name)]
        hidden = [path / name for name in names if _has_hidden(name)]
        taken = [path / name for name in seen if text_suffix(name) in suffixes_of(settings)]
        return taken, len(seen) - len(taken), hidden
    if path.is_file() or (path.is_symlink() and not path.exists()):
        return [path], 0, []
    if os.path.exists(given):
        raise DataError(
            f"{given} is a pipe or a device, not a file. Pipe its content into stdin: `... | txl prepare -`."
        )
    if glob.has_magic(given):
        matches = sorted(glob.glob(given, recursive=True, include_hidden=True))
        matches = [match for match in matches if os.path.isfile(match) or not os.path.exists(match)]
        hidden = [Path(match) for match in matches if _is_hidden_match(match, given)]
        taken = [Path(match) for match in matches if not _is_hidden_match(match, given)]
        if not taken:
            if hidden:
                but = f" except hidden files ({len(hidden)}), which are read only if you give their paths"
            else:
                but = ""
            raise DataError(f"no file matches {given}{but}. Check the pattern. `**` matches folders at any depth.")
        return taken, 0, hidden
    raise DataError(
        f"input {given} does not exist.{did_you_mean(given, [STDLIB, *NAMED])} Give a file, a folder, or {STDLIB} "
        "for the built-in text."
    )


def _has_hidden(relative: str) -> bool:
    """Return whether any part of a relative path is hidden."""
    return any(is_hidden(part) for part in relative.split("/"))


def fixed_folder(pattern: str) -> str:
    """Return the folder above the first `*`, `?` or `[` of a pattern, or above its first range or list in braces.

    Returns an empty text if there is no such folder.
    """
    before_braces = _BRACES.split(pattern, maxsplit=1)[0]
    return _MAGIC.split(before_braces, maxsplit=1)[0].rpartition("/")[0]


def _is_hidden_match(match: str, pattern: str) -> bool:
    """Return whether a path that matches a pattern is hidden.

    Only the parts below the pattern's fixed folder count. If the pattern itself names hidden files, the path does not
    count as hidden.
    """
    fixed = fixed_folder(pattern)
    wants_hidden = _has_hidden(pattern.removeprefix(fixed))
    return not wants_hidden and _has_hidden(match.removeprefix(fixed))


def _of_url(given: str, settings: PrepareSettings) -> _Found:
    """List the files that one URL gives.

    A URL can be a pattern or a folder only if its store can list files, which web servers cannot. Raises DataError if
    the URL cannot be read, or if no file matches a pattern.
    """
    filesystem, path = filesystem_of(given, allow=settings.allow_protocols)
    can_list = not given.startswith(("http://", "https://"))
    is_pattern = can_list and glob.has_magic(path)

    def look() -> tuple[dict[str, Any], bool]:
        if is_pattern:
            return dict(filesystem.glob(path, detail=True)), False
        about = filesystem.info(path)
        if not can_list or about.get("type") != "directory":
            return {path: about}, False
        return dict(filesystem.find(path, detail=True)), True

    infos, is_folder = retrying(look, what=given, retries=3)
    if not infos:
        raise DataError(f"no file matches {given}. Check the pattern, or give the URL of a file.")
    files: list[tuple[str, int | None, str]] = []
    hidden: list[str] = []
    num_other = 0
    for name, about in sorted(infos.items()):
        if about.get("type") == "directory":
            continue
        if can_list:
            url = filesystem.unstrip_protocol(name)
        else:
            url = given
        below = name.removeprefix(path.rstrip("/"))
        if (is_folder and _has_hidden(below)) or (is_pattern and _is_hidden_match(name, path)):
            hidden.append(url)
        elif is_folder and text_suffix(name) not in suffixes_of(settings):
            num_other += 1
        else:
            version = next((str(about[key]) for key in _URL_MARKS if about.get(key)), "")
            files.append((url, about.get("size"), version))
    return _Found(files, num_other, tuple(hidden))


def _walk(folder: Path, *, left_out: frozenset[str] = frozenset()) -> list[str]:
    """List regular files and broken links below a folder, except in folders named in `left_out`.

    Returns relative paths with `/`, sorted by code points. Raises DataError if a folder cannot be read.
    """
    relative_paths = []
    try:
        for root, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if name not in left_out]
            for name in names:
                path = Path(root, name)
                if path.is_file() or not path.exists():
                    relative_paths.append(path.relative_to(folder).as_posix())
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}. Correct the permissions of this path, or give other "
            "inputs."
        ) from error
    return sorted(relative_paths)


def _raise(error: OSError) -> NoReturn:
    raise error
