"""Tars in WebDataset layout give the text of one member of each sample. A tar that is not whole is refused."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import webdataset

from tests.helpers.http import serve
from tests.unit.data.prepare.test_sources import read, texts_of
from txl_dist.data.prepare.input_splits import read_parts
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.prepare.sources import expand_braces, list_sources
from txl_dist.errors import DataError

WORDS = ("river", "stone", "lamp", "seven", "green", "paper", "\u00e9t\u00e9", "walks", "under", "bridge")


def text(number: int) -> str:
    chooser = random.Random(number)
    return " ".join(chooser.choice(WORDS) for _ in range(40 + number)) + f" {number}.\n"


def members_tar(members: Sequence[tuple[str, bytes]], *, form: int = tarfile.USTAR_FORMAT) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return sink.getvalue()


def shard(numbers: Sequence[int], *, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """A shard as img2dataset writes it: image, caption and facts of each sample."""
    members = []
    for number in numbers:
        facts = {"caption": text(number), "url": f"https://example.org/{number}", "width": 256}
        members += [
            (f"{number:09d}.jpg", b"\xff\xd8\xff" + bytes(700)),
            (f"{number:09d}.txt", text(number).encode()),
            (f"{number:09d}.json", json.dumps(facts, indent=4).encode()),
        ]
    return members_tar(members, form=form)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"{number:06d}.tar").write_bytes(shard(range(5 * number, 5 * number + 5)))
    return tmp_path


def test_braces_stand_for_the_shards_of_a_range_and_each_sample_gives_the_member_that_is_asked_for(
    shards: Path,
) -> None:
    wanted = [text(number) for number in range(20)]
    given = str(shards / "{000000..000003}.tar")
    assert texts_of([given], member="txt") == wanted
    assert texts_of([given], member="json", field="caption") == wanted
    assert texts_of([str(shards / "*.tar")], member=".TXT") == wanted
    assert texts_of([str(shards / "00000{0,2}.tar")], member="txt") == wanted[:5] + wanted[10:15]
    places = [document.where for document in read([given], member="txt")]
    assert places[5] == f"{shards / '000001.tar'}, sample '000000005'"


def test_shards_at_urls_and_from_commands_are_read_alike(shards: Path) -> None:
    pytest.importorskip("aiohttp")
    wanted = [text(number) for number in range(20)]
    with serve(shards) as server:
        assert texts_of([server.url + "/{000000..000003}.tar"], member="txt") == wanted
    command = f"pipe:cat {shards / '000002.tar'} | gzip"
    assert texts_of([command], member="txt", allow_protocols=("pipe",)) == wanted[10:15]


@pytest.mark.parametrize("is_compressed", [False, True])
def test_each_kind_of_text_member_is_found_without_a_setting(tmp_path: Path, is_compressed: bool) -> None:
    lines = "".join(json.dumps({"text": text(number)}) + "\n" for number in (2, 3))
    contents = {
        "a/one.TXT": text(0).encode(),
        "a/two.json": json.dumps({"text": text(1)}, indent=1).encode(),
        "a/three.jsonl": lines.encode(),
        "b/one.meta.txt": b"\xef\xbb\xbf" + text(4).encode(),
    }
    members = [(name, content) for name, content in contents.items()]
    if is_compressed:
        members = [(f"{name}.gz", gzip.compress(content)) for name, content in members]
    (tmp_path / "x.tar").write_bytes(members_tar([*members, ("b/one.cls", b"7"), ("README", b"no sample")]))
    documents = read([tmp_path / "x.tar"])
    assert [document.text for document in documents] == [text(number) for number in range(5)]
    assert [document.ordinal for document in documents] == [0, 1, 2, 3, 5]  # the end of the lines counts as one
    assert documents[3].where.endswith("sample 'a/three', line 2")


def test_plain_text_members_are_cut_into_documents_like_files(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(members_tar([("a.txt", b"one\ntwo\n"), ("b.text", b"three"), ("c.txt", b"four")]))
    with pytest.raises(DataError, match="--member"):
        texts_of([tmp_path / "x.tar"], documents="line")
    kept = texts_of([tmp_path / "x.tar"], documents="line", skip_invalid=True)
    assert kept == ["one", "two", "", "four"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_that_is_cut_anywhere_is_refused(tmp_path: Path, form: int) -> None:
    path = tmp_path / "x.tar"
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as archive:
        for number in range(3):
            member = tarfile.TarInfo(f"{'long' * 20 * (form != tarfile.USTAR_FORMAT)}/\u00e9{number}.txt")
            member.size = len(text(number).encode())
            archive.addfile(member, io.BytesIO(text(number).encode()))
    whole = sink.getvalue()
    path.write_bytes(whole)
    assert texts_of([path]) == [text(number) for number in range(3)]
    end = len(whole.rstrip(b"\0"))
    cuts = [0, *range(512, end + 1024, 512), *random.Random(1).sample(range(513, end + 512), 20)]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"x\.tar.* truncated at byte"):
            read([path])
    path.write_bytes(gzip.compress(whole)[:-1])
    with pytest.raises(DataError, match="cannot read"):
        read([path])


def test_an_empty_shard_among_others_has_no_samples(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(members_tar([]))
    (tmp_path / "1.tar").write_bytes(members_tar([("a.txt", b"one")]))
    assert texts_of([tmp_path / "{0..1}.tar"]) == ["one"]
    (tmp_path / "0.tar").write_bytes(members_tar([("README", b"a member without a suffix")]))
    with pytest.raises(DataError, match="contains no sample"):
        texts_of([tmp_path / "{0..1}.tar"])


def test_hidden_members_belong_to_no_sample(tmp_path: Path) -> None:
    members = [("._a.txt", b"mac"), ("d/._b.txt", b"mac"), ("d/b.txt", b"two"), ("./c.txt", b"three")]
    (tmp_path / "x.tar").write_bytes(members_tar(members))
    assert texts_of([tmp_path / "x.tar"]) == ["two", "three"]


def test_webdataset_itself_takes_a_cut_between_members_for_the_end(tmp_path: Path) -> None:
    """This is why the bytes are checked."""
    path = tmp_path / "x.tar"
    path.write_bytes(members_tar([(f"{number}.txt", b"x" * 512) for number in range(6)])[: 4 * 1024])
    assert sum(1 for _ in webdataset.WebDataset(str(path), shardshuffle=False)) == 4
    with pytest.raises(DataError, match=r"truncated at byte 4,096"):
        read([path])


def test_a_damaged_header_is_refused_and_two_joined_tars_too(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    whole = shard(range(3))
    for place in random.Random(2).sample(range(512), 60):
        damaged = bytearray(whole)
        damaged[1536 + place] ^= 0x10  # the second member's header
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.tar is damaged near byte"):
            read([path], member="txt")
    path.write_bytes(whole + shard(range(3, 6)))
    with pytest.raises(DataError, match="two tars were joined"):
        read([path], member="txt")


@pytest.mark.parametrize(
    ("members", "settings", "message"),
    [
        ([("a.jpg", b"1"), ("a.cls", b"2")], {}, r"sample 'a': there is no member txt.*members: jpg, cls.*--member"),
        ([("a.txt", b"1"), ("a.json", b"{}")], {}, r"sample 'a': several members.*txt, json.*--member txt"),
        ([("a.txt", b"1"), ("b.text", b"2")], {"member": "txt"}, r"sample 'b': there is no member txt .*members: text"),
        ([("d.v0.txt", b"1"), ("d.v1.txt", b"2")], {}, r"sample 'd': several.*v0\.txt, v1\.txt"),
        ([("a.txt", b"1"), ("a.txt", b"2")], {}, r"sample 'a': a member occurs twice.*own key"),
        ([("a.json", b"[1, 2]")], {}, r"sample 'a': found a list"),
        ([("a.json", b" ")], {}, r"sample 'a': the member json is empty"),
        ([("a.txt.gz", gzip.compress(b"text")[:-4])], {}, r"cannot read .*x\.tar/a\.txt\.gz"),
        ([("a.txt", b"\xff")], {}, r"sample 'a': byte 0 \(0xff\) is not valid UTF-8"),
        ([("README", b"1"), (".hidden.txt", b"2")], {}, r"contains no sample.*tar -xf"),
        ([("000000000.npy", b"1")], {}, r"--reindex"),
    ],
)
def test_samples_without_the_text_that_is_asked_for_are_one_line_that_says_what_to_type(
    tmp_path: Path, members: list[tuple[str, bytes]], settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "x.tar").write_bytes(members_tar(members))
    with pytest.raises(DataError, match=message) as raised:
        read([tmp_path / "x.tar"], **settings)
    assert "\n" not in str(raised.value)
    assert str(tmp_path / "x.tar") in str(raised.value)


def test_invalid_samples_are_left_out_and_counted_where_the_user_says_so(tmp_path: Path) -> None:
    members = [("a.txt", b"one"), ("b.jpg", b"2"), ("c.txt", b"3"), ("c.txt", b"4"), ("d.txt", b"four")]
    (tmp_path / "x.tar").write_bytes(members_tar(members))
    documents = read([tmp_path / "x.tar"], skip_invalid=True)
    assert [document.text for document in documents] == ["one", "", "", "four"]
    assert [document.damage for document in documents] == ["", "invalid", "invalid", ""]


def test_a_preparation_continues_at_the_sample_where_a_part_ended(shards: Path) -> None:
    settings = PrepareSettings([str(shards / "{000000..000003}.tar")], member="txt")
    files = list_sources(settings.inputs, settings, split="train").files
    parts = list(read_parts(files, part_bytes=1000))
    assert len(parts) > 3
    for number, part in enumerate(parts):
        assert list(read_parts(files, part_bytes=1000, begin=part.end))[:1] == parts[number + 1 : number + 2]


def test_the_corpus_of_shards_is_that_of_the_same_texts_as_json_lines(shards: Path, tmp_path: Path) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in range(20)))
    settings = {"kind": "byte", "valid_fraction": 0.2}
    of_lines = prepare_corpus(tmp_path / "a", inputs=[lines], **settings).corpus
    given = str(shards / "{000000..000003}.tar")
    of_tars = prepare_corpus(tmp_path / "b", inputs=[given], member="txt", num_workers=2, **settings).corpus
    for split in ("train", "valid"):
        assert of_tars.splits[split].shards == of_lines.splits[split].shards


def test_braces_that_stand_for_no_or_too_many_files_are_refused(tmp_path: Path) -> None:
    literal = tmp_path / "{1..3}.txt"
    literal.write_text("one")
    assert texts_of([literal]) == ["one"]
    assert expand_braces("s3://b/{08..10}-{a,b}.tar")[-1] == "s3://b/10-b.tar"
    assert expand_braces("pipe:cat {1..3}.tar") == ["pipe:cat {1..3}.tar"]
    for given in ("{0..999999999999999}.tar", "{0..2000}{0..2000}.tar"):
        with pytest.raises(DataError, match="more than 1,048,576 files"):
            expand_braces(given)
    with pytest.raises(DataError, match="cannot expand"):
        expand_braces("{{1..3}.tar")
    with pytest.raises(DataError, match=r"input .*2\.tar does not exist"):
        read([str(tmp_path / "{2..3}.tar")])


def test_a_corpus_of_an_older_version_is_recognized_although_settings_were_added() -> None:
    hash_before = "af003a2b6b12ce1634c34d1f66dd9d9477b7e96a169da556318744f289df509e"
    assert PrepareSettings(["x"]).content_hash() == hash_before
    assert PrepareSettings(["x"], member="txt").content_hash() != hash_before
