"""Named corpora are split and cleaned as in the original scripts, verified from any source, and safely extracted."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare import datasets as named
from txl_dist.data.prepare.datasets import NAMED, Member, NamedCorpus, materialise
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.tokenizers.training import train_tokenizer

WORDS = {"train": b" \n = A title = \n \n the <unk> cat \n", "valid": b" \n the dog \n", "test": b"a cat \n"}
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
HELD_OUT = f"{LM1B}/heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{{}}-of-00050"
TRAINING = f"{LM1B}/training-monolingual.tokenized.shuffled/news.en-{{:05d}}-of-00100"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def zip_of(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tar_of(files: dict[str, bytes], *, links: dict[str, str] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, **changes: Any) -> NamedCorpus:
    """The corpus with other bytes behind its URL, proven by their checksum."""
    if name == "tinyshakespeare":
        changes["members"] = (Member("input.txt", (), sha256=sha256(content)),)
    corpus = replace(NAMED[name], sha256=sha256(content), **changes)
    monkeypatch.setitem(named.NAMED, name, corpus)
    return corpus


def save(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def text_of(paths: dict[str, list[Path]]) -> dict[str, list[bytes]]:
    return {split: [path.read_bytes() for path in files] for split, files in paths.items()}


def cut_in_three(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes) -> dict[str, list[bytes]]:
    """A miniature of enwik8 or text8 with splits of 20, 10 and 10 bytes."""
    archive = zip_of({name: content})
    ends = (("train", 20), ("valid", 30), ("test", 40))
    stand_in(monkeypatch, name, archive, ends=ends)
    return text_of(materialise(name, folder / "out", source=save(folder / "copy.zip", archive)))


def original_ids(lines: str, *, add_eos: bool) -> list[str]:
    """Vocab.encode_file of kimiyoung/transformer-xl, as far as it matters here."""
    symbols = []
    for line in lines.split("\n")[: -1 if lines.endswith("\n") else None]:
        symbols += line.strip().split() + (["<eos>"] if add_eos else [])
    return symbols


def test_enwik8_is_cut_by_bytes_and_loses_its_newlines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = b"<page>\n caf\xc3\xa9\n\n\xe4\xb8" + b"\xad\n 0123456" + b"x\ny\nz\r\n\t <" + b"\xff"
    content = content.ljust(40, b".")
    splits = cut_in_three("enwik8", monkeypatch, tmp_path, content)
    for split, (low, high) in {"train": (0, 20), "valid": (20, 30), "test": (30, 40)}.items():
        # prep_enwik8.py: each byte in decimal, but newlines as they are; then the reader of words.
        prepared = " ".join(str(byte) if byte != ord("\n") else "\n" for byte in content[low:high])
        assert [str(byte) for byte in splits[split][0]] == original_ids(prepared, add_eos=False)


def test_enwik8_becomes_one_id_per_byte_that_occurs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    splits = cut_in_three("enwik8", monkeypatch, tmp_path, b"ab\n\xff\xc3\xa9ab" * 5)
    settings = {key: NAMED["enwik8"].tokenizer[key] for key in ("kind", "end_of_text", "observed_symbols")}
    assert NAMED["enwik8"].tokenizer["encoding_errors"] == "keep"
    texts = [content.decode("utf-8", errors="surrogateescape") for parts in splits.values() for content in parts]
    tokenizer = train_tokenizer(settings.pop("kind"), lambda: texts, **settings)
    assert tokenizer.vocab_size == 5
    assert len(tokenizer.encode(texts[0])) == len(splits["train"][0])


def test_text8_loses_blanks_at_the_ends_of_its_splits_and_shows_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = b" anarchism origi nat" + b" ed as a t" + b"erm of ab "
    splits = cut_in_three("text8", monkeypatch, tmp_path, content)
    for split, (low, high) in {"train": (0, 20), "valid": (20, 30), "test": (30, 40)}.items():
        part = content[low:high].decode()
        prepared = " ".join(["_" if c == " " else c for c in part.strip()])  # prep_text8.py
        assert list(splits[split][0].decode()) == original_ids(prepared, add_eos=False)


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
def test_wikitext_comes_from_the_archive_or_from_its_files_under_either_name(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {f"{name}/wiki.{split}.tokens": content for split, content in WORDS.items()}
    archive = zip_of({"LICENSE.txt": b"...", "../evil": b"evil", "/absolute": b"evil", **files})
    members = tuple(replace(member, sha256=sha256(files[member.name])) for member in NAMED[name].members)
    stand_in(monkeypatch, name, archive, members=members)
    inside = tmp_path / "inside" / name
    inside.mkdir(parents=True)
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for split, content in WORDS.items():
        save(inside / f"wiki.{split}.tokens", content)
        save(renamed / f"{split}.txt", content)
    for i, source in enumerate((save(tmp_path / "a.zip", archive), inside.parent, inside, renamed)):
        paths = materialise(name, tmp_path / f"out{i}", source=str(source))
        assert list(paths) == ["train", "valid", "test"]
        assert text_of(paths) == {split: [content] for split, content in WORDS.items()}
    assert {path.name for path in tmp_path.rglob("*")} & {"evil", "absolute"} == set()


def test_wikitext_has_the_vocabulary_and_the_tokens_of_the_original() -> None:
    settings = {key: NAMED["wikitext-2"].tokenizer[key] for key in ("kind", "end_of_text")}
    train = WORDS["train"].decode()
    tokenizer = train_tokenizer(settings.pop("kind"), lambda: [train], **settings)
    theirs = original_ids(train, add_eos=True)
    assert set(tokenizer.symbols) == set(theirs)
    assert [tokenizer.symbols[i] for i in tokenizer.encode(train)] == theirs


def test_the_files_of_wikitext_alone_make_the_corpus_that_its_name_makes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {f"wikitext-2/wiki.{split}.tokens": content * 40 for split, content in WORDS.items()}
    members = tuple(replace(member, sha256=sha256(files[member.name])) for member in NAMED["wikitext-2"].members)
    stand_in(monkeypatch, "wikitext-2", b"", members=members)
    train, valid, test = (save(tmp_path / Path(name).name, content) for name, content in files.items())
    prepare_corpus(tmp_path / "by-name", inputs=("wikitext-2",), archive=str(tmp_path))
    words = {"kind": "word", "end_of_text": False}
    prepare_corpus(tmp_path / "by-files", inputs=(train,), valid_inputs=(valid,), test_inputs=(test,), **words)
    by_name, by_files = (open_corpus(tmp_path / folder) for folder in ("by-name", "by-files"))
    assert by_name.fingerprint == by_files.fingerprint


def test_files_without_a_known_checksum_are_proven_by_the_published_number_of_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for split, content in WORDS.items():
        save(tmp_path / f"{split}.txt", content)
    counted = {split: len(original_ids(content.decode(), add_eos=True)) for split, content in WORDS.items()}
    assert NAMED["wikitext-103"].members[0].num_tokens == 103_227_021
    for wrong in (0, 1):
        members = tuple(
            Member(member.name, member.splits, num_tokens=counted[member.splits[0]] + wrong)
            for member in NAMED["wikitext-103"].members
        )
        stand_in(monkeypatch, "wikitext-103", b"", members=members)
        expectation = (
            pytest.raises(DataError, match=r"11 words and line ends, but the corpus.s file contains 12")
            if wrong
            else nullcontext()
        )
        with expectation:
            materialise("wikitext-103", tmp_path / f"out{wrong}", source=str(tmp_path))


def test_lm1b_has_ninety_nine_training_files_and_one_held_out_file_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = {TRAINING.format(i): f"sentence {i}\n".encode() for i in range(99, 0, -1)}
    held_out = {HELD_OUT.format(i): f"held out {i}\n".encode() for i in range(3)}
    archive = tar_of({**held_out, **training, "../evil": b"evil", "/absolute": b"evil"}, links={"link": "/etc/passwd"})
    stand_in(monkeypatch, "lm1b", archive)
    splits = text_of(materialise("lm1b", tmp_path / "out", source=save(tmp_path / "r13.tar.gz", archive)))
    assert splits["train"] == [f"sentence {i}\n".encode() for i in range(1, 100)]
    assert splits["valid"] == splits["test"] == [b"held out 0\n"]
    assert {path.name for path in tmp_path.rglob("*")} & {"evil", "absolute", "link"} == set()


def test_lm1b_marks_both_sides_of_each_sentence() -> None:
    settings = {**NAMED["lm1b"].tokenizer}
    assert settings.pop("documents") == "file"
    text = "b a\na\n" * 3 + "rare\n"
    tokenizer = train_tokenizer(settings.pop("kind"), lambda: [text], **settings)
    assert tokenizer.symbols == ("<S>", "a", "b", "<UNK>")
    assert tokenizer.encode("a b\nrare\n").tolist() == [0, 1, 2, 0, 0, 3, 0]


def test_tinyshakespeare_is_cut_as_nanogpt_cuts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert NAMED["tinyshakespeare"].ends == (("train", int(1_115_394 * 0.9)), ("valid", 1_115_394))
    content = b"First Citizen:\nBefore we"
    ends = (("train", int(len(content) * 0.9)), ("valid", len(content)))
    stand_in(monkeypatch, "tinyshakespeare", content, ends=ends)
    splits = text_of(materialise("tinyshakespeare", tmp_path, source=save(tmp_path / "any name", content)))
    assert splits == {"train": [content[:21]], "valid": [content[21:]]}


def test_a_foreign_file_is_refused_with_both_checksums(tmp_path: Path) -> None:
    source = save(tmp_path / "enwik8", b"something else")
    for expected in (sha256(b"something else"), NAMED["enwik8"].sha256, NAMED["enwik8"].members[0].sha256):
        with pytest.raises(DataError, match=expected):
            materialise("enwik8", tmp_path / "out", source=source)
    assert not (tmp_path / "out" / "enwik8").exists()


def test_folders_that_lack_a_file_or_hold_another_or_cannot_be_proven_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wikitext").mkdir()
    with pytest.raises(DataError, match=r"does not contain the file wiki\.train\.tokens"):
        materialise("wikitext-2", tmp_path / "out", source=str(tmp_path / "wikitext"))
    for split, content in WORDS.items():
        save(tmp_path / "wikitext" / f"{split}.txt", content)
    with pytest.raises(DataError, match=rf"train\.txt.*{sha256(WORDS['train'])}, but the corpus's file has 9e9fa1ad"):
        materialise("wikitext-2", tmp_path / "out", source=str(tmp_path / "wikitext"))
    save(tmp_path / "wikitext" / "news.en-00001-of-00100", b"a\n")
    with pytest.raises(DataError, match="the checksum of the corpus's file is unknown"):
        materialise("lm1b", tmp_path / "out", source=str(tmp_path / "wikitext"))
    with pytest.raises(DataError, match="No such file"):
        materialise("lm1b", tmp_path / "out", source=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="enwik8, text8"):
        materialise("enwik9", tmp_path / "out")
    assert list((tmp_path / "out").glob("*/*")) == []


@pytest.mark.parametrize("make", [zip_of, tar_of])
def test_an_archive_whose_member_is_missing_or_a_link_is_refused_by_name(
    make: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    suffix = ".zip" if make is zip_of else ".tar.gz"
    archives = [make({"other": b"text"})]
    if make is tar_of:
        archives.append(tar_of({}, links={"text8": "/etc/passwd"}))
    for i, archive in enumerate(archives):
        stand_in(monkeypatch, "text8", archive, urls=(f"https://localhost/text8{suffix}",))
        with pytest.raises(
            DataError, match=r"all files of the corpus\. Number of missing files: 1, for instance text8\."
        ):
            materialise("text8", tmp_path / f"out{i}", source=save(tmp_path / f"copy{i}", archive))


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def sending(content: bytes, *, cut: int | None = None, asked: list[str] | None = None) -> Any:
    def answer(request: BaseHTTPRequestHandler) -> None:
        if asked is not None:
            asked.append(str(request.headers["User-Agent"]))
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[:cut])

    return answer


def test_a_download_is_proven_kept_and_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = b"x" * 3_000_000
    asked: list[str] = []
    seen: list[tuple[int, int]] = []
    with server(sending(content, asked=asked)) as address:
        ends = (("train", 2_000_000), ("valid", len(content)))
        stand_in(monkeypatch, "tinyshakespeare", content, ends=ends, urls=(f"{address}/input.txt",))
        paths = materialise("tinyshakespeare", tmp_path, progress=lambda done, total: seen.append((done, total)))
        assert materialise("tinyshakespeare", tmp_path) == paths
        shutil.rmtree(tmp_path / "tinyshakespeare")  # what the files were made of is kept too
        assert materialise("tinyshakespeare", tmp_path) == paths
    assert text_of(paths) == {"train": [content[:2_000_000]], "valid": [content[2_000_000:]]}
    assert len(asked) == 1
    assert "Python" not in asked[0]
    assert seen == sorted(seen)
    assert seen[-1] == (len(content), len(content))
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize(
    ("sent", "cut", "expected"), [(b"text", 2, "ended after 2 of 4 bytes"), (b"tent", None, "sha256")]
)
def test_a_cut_or_changed_download_leads_to_the_next_mirror_and_else_to_an_error_that_names_it(
    sent: bytes, cut: int | None, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = (("train", 3), ("valid", 4))
    with server(sending(sent, cut=cut)) as bad, server(sending(b"text")) as good:
        stand_in(monkeypatch, "tinyshakespeare", b"text", ends=ends, urls=(f"{bad}/input.txt",))
        with pytest.raises(DataError, match=rf"{bad}/input\.txt: .*{expected}.*--archive"):
            materialise("tinyshakespeare", tmp_path)
        assert not (tmp_path / "tinyshakespeare").exists()
        stand_in(monkeypatch, "tinyshakespeare", b"text", ends=ends, urls=(f"{bad}/input.txt", f"{good}/input.txt"))
        assert text_of(materialise("tinyshakespeare", tmp_path)) == {"train": [b"tex"], "valid": [b"t"]}


def test_without_a_network_the_error_names_the_address_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "tinyshakespeare", b"text", urls=("http://127.0.0.1:1/input.txt",))
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:1/input\.txt.*--archive"):
        materialise("tinyshakespeare", tmp_path)


def test_every_named_corpus_has_proof_addresses_and_settings_that_training_takes() -> None:
    for name, corpus in NAMED.items():
        assert len(corpus.sha256) == 64, name
        assert all(url.startswith("https://") for url in corpus.urls)
        settings = {
            k: v
            for k, v in corpus.tokenizer.items()
            if k not in ("documents", "encoding_errors", "tokenizer_all_splits")
        }
        assert train_tokenizer(settings.pop("kind"), lambda: ["a b\n" * 3], **settings).end_of_text is None
        assert set(dict.fromkeys(split for _, split in corpus.file_names())) <= {"train", "valid", "test"}
