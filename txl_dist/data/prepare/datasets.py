"""Public benchmark corpora, such as enwik8: download addresses, checksums, and rules for splitting and cleaning.

    enwik8            100 MB of Wikipedia's XML; splits of 90 / 5 / 5 million bytes without newlines; 204 distinct bytes
    text8             100 MB of letters; splits of 90 / 5 / 5 million bytes; blanks become `_`; 27 distinct characters
    wikitext-103, -2  words; the splits of the archive; 267,735 and 33,278 words, including `<eos>` and `<unk>`
    lm1b              shuffled sentences; 99 train files; held-out file 0 of 50 is the validation and the test split
    tinyshakespeare   one file; 90 % train split and 10 % validation split, as in nanoGPT; 65 distinct characters

The rules come from kimiyoung/transformer-xl (getdata.sh, prep_text8.py, data_utils.py), from awd-lstm-lm's
prep_enwik8.py and from nanoGPT. In transformer-xl, the text files of enwik8 contain newlines, but data_utils.py joins
the lines without a separator. The published results and the vocabulary of 204 bytes depend on these missing newlines.

Each archive is verified by its sha256. A file that the user has unpacked is verified by the sha256 of the file. The
checksums of the archives, and of the files enwik8 and text8, are equal in several independent public projects. The
checksums of WikiText's files and of tinyshakespeare were computed from copies that have the published token counts.
Only regular files with the expected names are read from an archive. No path from an archive is used for writing.

Limitations: lm1b can be prepared only from its archive, because no checksums of its unpacked files are published. The
vocabulary of lm1b is counted here (words that occur at least three times), but the original scripts download a
vocabulary file. Whether the two vocabularies contain the same 793,471 words was not checked.
"""

from __future__ import annotations

import shutil
import tarfile
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from txl_dist.errors import ConfigError, DataError, translate_errors
from txl_dist.io.files import open_new, sha256_of_file, write_bytes

Progress = Callable[[int, int], None]
"""Function that is called during a download with (bytes received so far, total bytes). The total is 0 if it is
unknown."""

BLOCK_LEN = 1 << 20
TIMEOUT_S = 60


@dataclass(frozen=True)
class Member:
    """One file of a named corpus: a file in the corpus's archive, or the single file that is downloaded."""

    name: str
    """Exact path of the file in the archive."""
    splits: tuple[str, ...]
    """Splits that consist of the whole file. Empty if the file is cut into splits at `NamedCorpus.ends`."""
    sha256: str = ""
    """Hexadecimal sha256 of the file. Empty if it is unknown."""
    num_tokens: int = 0
    """Published number of words and line ends. It verifies a file whose `sha256` is unknown. 0 if this number is
    unknown too."""


@dataclass(frozen=True)
class NamedCorpus:
    """Description of a public benchmark corpus: download addresses, checksums, files, and the papers' settings."""

    urls: tuple[str, ...]
    """Download addresses of the archive or file, tried one after the other."""
    sha256: str
    """Hexadecimal sha256 of the archive or file at the URLs."""
    members: tuple[Member, ...]
    tokenizer: dict[str, Any]
    """Settings of the papers: arguments of `train_tokenizer` (`kind` and so on), and the settings `documents`,
    `encoding_errors` and `tokenizer_all_splits` of `txl prepare`."""
    ends: tuple[tuple[str, int], ...] = ()
    """(split, byte offset at which the split ends) in order, if one file contains all splits. Otherwise empty."""
    clean: Callable[[bytes], bytes] = field(default=bytes)
    """Function from the raw bytes of one split to the bytes to write. It is used only for splits that are cut at
    `ends`."""

    def file_names(self) -> dict[tuple[str, str], str]:
        """Return the name of the text file to write for each pair (name of a member, split), in the order of the
        members."""
        pairs = [(member.name, split) for member in self.members for split in member.splits]
        if not pairs:
            only_member = self.members[0].name
            pairs = [(only_member, split) for split, _ in self.ends]
        totals = Counter(split for _, split in pairs)
        numbers: Counter[str] = Counter()
        names = {}
        for member, split in pairs:
            if totals[split] == 1:
                names[member, split] = f"{split}.txt"
            else:
                names[member, split] = f"{split}-{numbers[split]:03d}.txt"
            numbers[split] += 1
        return names


def materialise(
    name: str, folder: Path, *, source: str = "", progress: Progress | None = None
) -> dict[str, list[Path]]:
    """Write the plain text files of a named corpus to `folder/name`, and return their paths by split.

    If the folder `folder/name` exists, its files are kept and nothing is downloaded. `source` is a local path to use
    instead of a download: the corpus's archive, its single file, or a folder with its files. A downloaded archive stays
    in `folder`. Raises ConfigError for an unknown name. Raises DataError if the source has the wrong checksum, is
    damaged or cannot be read, or if the download fails.
    """
    if name not in NAMED:
        raise ConfigError(f"there is no corpus named {name!r}. Choose one of {', '.join(NAMED)}.")
    corpus = NAMED[name]
    target = folder / name
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        if source:
            origin = Path(source)
        else:
            origin = _download(name, corpus, folder, progress)
        temporary = folder / f"{name}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for member, stream in _proven_members(name, corpus, origin):
            _write(corpus, member, stream, temporary)
        temporary.rename(target)
    paths: dict[str, list[Path]] = {}
    for (_, split), file in corpus.file_names().items():
        paths.setdefault(split, []).append(target / file)
    return paths


def _write(corpus: NamedCorpus, member: Member, stream: IO[bytes], folder: Path) -> None:
    """Write the text files of all splits that a member contains. `stream` yields the bytes of the member."""
    names = corpus.file_names()
    if corpus.ends:
        content = stream.read()
        start = 0
        for split, end in corpus.ends:
            path = folder / names[member.name, split]
            write_bytes(path, corpus.clean(content[start:end]))
            start = end
        return
    first, *others = [folder / names[member.name, split] for split in member.splits]
    with open_new(first) as file:
        shutil.copyfileobj(stream, file, BLOCK_LEN)
    for other in others:
        shutil.copyfile(first, other)


def _proven_members(name: str, corpus: NamedCorpus, origin: Path) -> Iterator[tuple[Member, IO[bytes]]]:
    """Yield (member, open stream of its bytes) for each file of the corpus.

    `origin` is the archive, a single file or a folder of files. The sha256 of the archive or of the file is verified
    first. Raises DataError if a checksum differs.
    """
    if origin.is_dir():
        for member in corpus.members:
            path = _find(name, member, origin)
            _prove(name, member, path)
            with path.open("rb") as stream:
                yield member, stream
        return
    with translate_errors(DataError, f"cannot read {origin} as {name}", "Check the path."):
        sha256 = sha256_of_file(origin)
    if len(corpus.members) == 1:
        only = corpus.members[0]
    else:
        only = None
    if sha256 == corpus.sha256 and corpus.urls[0].endswith(".zip"):
        yield from _zip_members(corpus, origin)
    elif sha256 == corpus.sha256 and corpus.urls[0].endswith(".tar.gz"):
        yield from _tar_members(corpus, origin)
    elif only is not None and sha256 == only.sha256:
        with origin.open("rb") as stream:
            yield only, stream
    else:
        if only is not None and only.sha256 != corpus.sha256:
            unpacked = f" (unpacked: {only.sha256})"
        else:
            unpacked = ""
        raise DataError(
            f"{origin} is not the corpus {name}: its sha256 is {sha256}, but {corpus.urls[0]} has the sha256 "
            f"{corpus.sha256}{unpacked}. Download the file again. If you want to prepare the file as a text of your "
            f"own, set the input to the path of the file, not to {name}."
        )


def _find(name: str, member: Member, folder: Path) -> Path:
    """Return the path of a member in a folder of unpacked files. Raises DataError if the file is absent.

    The file can have the member's full path in the archive, or only the last part of this path. It can also have the
    name of its split (`train.txt`), because the original scripts rename it.
    """
    name_in_archive = Path(member.name)
    candidates = [folder / name_in_archive, folder / name_in_archive.name]
    candidates += [folder / f"{split}.txt" for split in member.splits]
    for path in candidates:
        if path.is_file():
            return path
    raise DataError(
        f"{folder} does not contain the file {name_in_archive.name} of the corpus {name}. Give the archive of {name} "
        "instead of the folder."
    )


def _prove(name: str, member: Member, path: Path) -> None:
    """Raise DataError unless a file has the sha256 of the member, or its number of tokens if the sha256 is unknown."""
    if member.sha256:
        sha256 = sha256_of_file(path)
        if sha256 != member.sha256:
            raise DataError(
                f"{path} is not the file {path.name} of the corpus {name}: its sha256 is {sha256}, but the corpus's "
                f"file has {member.sha256}. Give the archive of {name} instead. If you want to prepare the file as a "
                f"text of your own, set the input to the path of the file, not to {name}."
            )
    elif member.num_tokens:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            num_tokens = sum(len(line.split()) + 1 for line in lines)
        if num_tokens != member.num_tokens:
            raise DataError(
                f"{path} is not the file {path.name} of the corpus {name}: it contains {num_tokens:,} words and line "
                f"ends, but the corpus's file contains {member.num_tokens:,}. Give the archive of {name} instead."
            )
    else:
        raise DataError(
            f"{path} cannot be verified as a file of the corpus {name}, because the checksum of the corpus's file is "
            f"unknown. Give the archive of {name} instead."
        )


def _zip_members(corpus: NamedCorpus, path: Path) -> Iterator[tuple[Member, IO[bytes]]]:
    with zipfile.ZipFile(path) as archive:
        for member in corpus.members:
            try:
                info = archive.getinfo(member.name)
            except KeyError as error:
                raise _missing(path, [member.name]) from error
            with archive.open(info) as stream:
                yield member, stream


def _tar_members(corpus: NamedCorpus, path: Path) -> Iterator[tuple[Member, IO[bytes]]]:
    wanted = {member.name: member for member in corpus.members}
    with tarfile.open(path, "r|gz") as archive:
        for entry in archive:
            if entry.isreg() and entry.name in wanted:
                stream = archive.extractfile(entry)
            else:
                stream = None
            if stream is not None:
                yield wanted.pop(entry.name), stream
    if wanted:
        raise _missing(path, sorted(wanted))


def _missing(path: Path, names: list[str]) -> DataError:
    return DataError(
        f"{path} does not contain all files of the corpus. Number of missing files: {len(names)}, for instance "
        f"{names[0]}. Download the archive again."
    )


def _download(name: str, corpus: NamedCorpus, folder: Path, progress: Progress | None) -> Path:
    """Download the archive or file of a corpus from the first URL that gives the right sha256.

    Returns the path of the file in `folder`. If the file is already there, nothing is downloaded. Raises DataError if
    every URL fails.
    """
    path = folder / corpus.urls[0].rpartition("/")[2]
    part = path.with_name(path.name + ".part")
    reasons = []
    for url in [] if path.is_file() else corpus.urls:
        try:
            _fetch(url, part, progress)
        except (OSError, HTTPException) as error:
            reasons.append(f"{url}: {error}")
            continue
        sha256 = sha256_of_file(part)
        if sha256 == corpus.sha256:
            part.rename(path)
            return path
        part.unlink()
        reasons.append(f"{url}: the download has the sha256 {sha256}, not {corpus.sha256}")
    if reasons:
        raise DataError(
            f"cannot download {name} ({'; '.join(reasons)}). Try again later, or download the file on another "
            "machine and give its path with --archive."
        )
    return path


def _fetch(url: str, path: Path, progress: Progress | None) -> None:
    # Some of these servers refuse Python's own User-Agent.
    request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response, open_new(path) as file:
        total = int(response.headers.get("Content-Length") or 0)
        done = 0
        while block := response.read(BLOCK_LEN):
            file.write(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
    if total and done != total:  # `read` raises nothing when the connection ends early
        raise OSError(f"the connection ended after {done:,} of {total:,} bytes")


_R13 = "1-billion-word-language-modeling-benchmark-r13output"
_SHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_WORDS = {"kind": "word", "end_of_text": False, "documents": "file"}
_CHARACTERS = {"end_of_text": False, "observed_symbols": True, "documents": "file", "tokenizer_all_splits": True}


def _wikitext(name: str, sha256: str, *, train: str = "", num_tokens: int = 0, valid: str, test: str) -> NamedCorpus:
    """Return the description of a WikiText corpus.

    `train`, `valid` and `test` are the sha256 of the splits' files. `num_tokens` verifies the train file if its sha256
    is unknown.
    """
    proofs = {"train": (train, num_tokens), "valid": (valid, 0), "test": (test, 0)}
    return NamedCorpus(
        urls=(f"https://wikitext.smerity.com/{name}-v1.zip",),
        sha256=sha256,
        members=tuple(Member(f"{name}/wiki.{split}.tokens", (split,), *proof) for split, proof in proofs.items()),
        tokenizer=_WORDS,
    )


NAMED: dict[str, NamedCorpus] = {
    "enwik8": NamedCorpus(
        urls=("https://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip"),
        sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        members=(Member("enwik8", (), sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),),
        tokenizer={"kind": "byte", "encoding_errors": "keep", **_CHARACTERS},
        ends=(("train", 90_000_000), ("valid", 95_000_000), ("test", 100_000_000)),
        clean=lambda part: part.replace(b"\n", b""),
    ),
    "text8": NamedCorpus(
        urls=("https://mattmahoney.net/dc/text8.zip", "https://data.deepai.org/text8.zip"),
        sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
        members=(Member("text8", (), sha256="6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7"),),
        tokenizer={"kind": "char", **_CHARACTERS},
        ends=(("train", 90_000_000), ("valid", 95_000_000), ("test", 100_000_000)),
        clean=lambda part: part.strip().replace(b" ", b"_"),
    ),
    "wikitext-103": _wikitext(
        "wikitext-103",
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        num_tokens=103_227_021,
        valid="9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
        test="56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
    ),
    "wikitext-2": _wikitext(
        "wikitext-2",
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        train="9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        valid="f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        test="d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    ),
    "lm1b": NamedCorpus(
        urls=(f"https://www.statmt.org/lm-benchmark/{_R13}.tar.gz",),
        sha256="01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
        members=(
            *(
                Member(f"{_R13}/training-monolingual.tokenized.shuffled/news.en-{i:05d}-of-00100", ("train",))
                for i in range(1, 100)
            ),
            Member(f"{_R13}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050", ("valid", "test")),
        ),
        tokenizer={**_WORDS, "min_frequency": 3, "double_eos": True},
    ),
    "tinyshakespeare": NamedCorpus(
        urls=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
        sha256=_SHAKESPEARE,
        members=(Member("input.txt", (), sha256=_SHAKESPEARE),),
        tokenizer={"kind": "char", **_CHARACTERS},
        ends=(("train", 1_003_854), ("valid", 1_115_394)),
    ),
}
