"""For any flipped bit or cut file, `verify` names the file, and a reader yields the right tokens or an error."""

from __future__ import annotations

import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import random_text, random_texts, tiny_corpus
from txl_dist.data.format import RECORD
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.verify.verify import verify_corpus
from txl_dist.errors import DataError

NUM_FLIPS, NUM_CUTS = 200, 50
SHARD = "train-000001.tar"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Several shards, each with samples of long documents and packed ones."""
    generator = random.Random(0)
    texts = [*random_texts(count=60), *(random_text(generator, length=4000) for _ in range(12))]
    return tiny_corpus(tmp_path_factory.mktemp("damage"), texts=texts, shard_len=20_000)


@pytest.fixture
def corpus(whole: Corpus, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole.folder, tmp_path / "copy"))


def tokens_of(folder: Path) -> dict[str, list[int]]:
    """What is read from a corpus: everything that its index names."""
    corpus = open_corpus(folder)
    assert corpus.tokenizer.vocab_size
    for name in corpus.split_names:
        corpus.split(name).counts()
    return {name: corpus.split(name).read_all().tolist() for name in corpus.split_names}


def members_of(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return tar.getmembers()


def flips(files: list[Path], generator: random.Random) -> Iterator[tuple[Path, bytes]]:
    """Every kind of file equally often: a flip in the small ones is as bad as one in the large."""
    for i in range(NUM_FLIPS):
        path = files[i % len(files)]
        content = bytearray(path.read_bytes())
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        yield path, bytes(content)


def cuts(files: list[Path], generator: random.Random) -> Iterator[tuple[Path, bytes]]:
    for i in range(NUM_CUTS):
        path = files[i % len(files)]
        content = path.read_bytes()
        yield path, content[: generator.randrange(len(content))]


@pytest.mark.parametrize("damage", [flips, cuts])
def test_random_damage_is_found_by_verify_and_never_read_as_other_tokens(
    damage: Callable[[list[Path], random.Random], Iterator[tuple[Path, bytes]]], corpus: Path
) -> None:
    right = tokens_of(corpus)
    files = sorted(path for path in corpus.iterdir())
    assert {"index.json", "tokenizer.json", "train-counts.npy", SHARD, f"{SHARD}.idx"} <= {path.name for path in files}
    refused = 0
    for path, content in damage(files, random.Random(1)):
        before = path.read_bytes()
        assert content != before
        path.write_bytes(content)
        problems = verify_corpus(corpus)
        assert problems, f"verify missed damage in {path.name}"
        assert all(path.name.removesuffix(".idx") in problem for problem in problems), problems
        try:
            outcome: Any = tokens_of(corpus)
        except DataError as error:
            outcome = str(error)
        is_refused = isinstance(outcome, str)
        assert path.name in outcome if is_refused else outcome == right, f"other tokens after damage in {path.name}"
        refused += is_refused
        path.write_bytes(before)
    assert refused > 20, "most damage to index, records and tokens cannot be read around"
    assert verify_corpus(corpus) == []


def cut_places(path: Path) -> dict[str, int]:
    """Where a tar may be cut, and how many bytes are left then."""
    members = members_of(path)
    tokens = next(member for member in members[2:] if not member.name.endswith("docs.npy"))
    end = members[-1].offset_data + -(-members[-1].size // 512) * 512
    return {
        "the very beginning": 0,
        "a member border": members[2].offset,
        "inside a tar header": members[2].offset + 100,
        "behind a tar header": members[2].offset_data,
        "inside an npy header": tokens.offset_data + 50,
        "inside tokens": tokens.offset_data + 130,
        "before the end of the archive": end,
        "inside the end of the archive": end + 512,
        "the last byte": path.stat().st_size - 1,
    }


def test_a_cut_at_every_kind_of_place_is_named_by_verify_and_by_the_reader(corpus: Path) -> None:
    path = corpus / SHARD
    content = path.read_bytes()
    for place, length in cut_places(path).items():
        path.write_bytes(content[:length])
        (problem,) = verify_corpus(corpus)
        assert f"{SHARD} has {length} bytes" in problem, place
        with pytest.raises(DataError, match=f"{SHARD} has {length} bytes"):
            tokens_of(corpus)


def test_plain_webdataset_takes_a_cut_at_a_member_border_for_the_end(corpus: Path) -> None:
    """Why sizes are checked here: this is what other readers do, without a word."""
    import webdataset

    def samples() -> int:
        return sum(1 for _ in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))

    path = corpus / SHARD
    there = samples()
    content = path.read_bytes()
    path.write_bytes(content[: members_of(path)[2].offset])
    assert 0 < samples() < there
    assert verify_corpus(corpus) != []


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_flipped_header_changes_no_token_and_is_found_by_verify(corpus: Path) -> None:
    right, path = tokens_of(corpus), corpus / SHARD
    tokens = next(member for member in members_of(path) if not member.name.endswith("docs.npy"))
    for offset in (tokens.offset + 3, tokens.offset + 130, tokens.offset_data + 3, tokens.offset_data + 70):
        flip(path, offset)
        (problem,) = verify_corpus(corpus)
        assert SHARD in problem
        assert "sha256" in problem
        assert tokens_of(corpus) == right
        flip(path, offset)


def test_a_damaged_header_does_not_hide_the_damaged_documents_behind_it(corpus: Path) -> None:
    path = corpus / SHARD
    records = np.fromfile(path.with_name(f"{SHARD}.idx"), dtype=RECORD)
    damaged = [len(records) - 1, len(records) - 3]
    flip(path, 3)
    for document in damaged:
        flip(path, int(records["offset"][document]))
    problems = verify_corpus(corpus)
    assert len(problems) == 3
    for document in damaged:
        assert any(f"{SHARD}, document {document} (sample " in problem for problem in problems)


def test_many_damaged_documents_of_a_shard_are_counted_behind_the_first_twenty(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, shard_len=10**6, valid_fraction=0.0)
    path = corpus.folder / "train-000000.tar"
    for offset in np.fromfile(f"{path}.idx", dtype=RECORD)["offset"]:
        flip(path, int(offset))
    problems = verify_corpus(corpus.folder)
    assert len(problems) == 22
    assert problems[20] == f"{path}: 40 more damaged documents"
    assert "sha256" in problems[21]


def test_every_damaged_file_is_listed_not_only_the_first(corpus: Path) -> None:
    names = ["tokenizer.json", "train-counts.npy", "train-000000.tar", "train-000000.tar.idx", f"{SHARD}.idx"]
    for name in names:
        flip(corpus / name, (corpus / name).stat().st_size // 2)
    (corpus / "valid-000000.tar").unlink()
    problems = verify_corpus(corpus)
    for name in [*names, "valid-000000.tar"]:
        assert any(f"/{name} " in problem or f"/{name}:" in problem for problem in problems), (name, problems)


def swap(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


@pytest.mark.parametrize("suffixes", [("",), (".idx",), ("", ".idx")], ids=["tars", "records", "both"])
def test_swapped_shards_are_refused(suffixes: tuple[str, ...], corpus: Path) -> None:
    for suffix in suffixes:
        swap(corpus / f"train-000000.tar{suffix}", corpus / f"{SHARD}{suffix}")
    assert len(verify_corpus(corpus)) >= 2
    with pytest.raises(DataError, match=r"train-000000\.tar"):
        tokens_of(corpus)


def test_the_files_of_another_corpus_are_refused(corpus: Path, tmp_path: Path) -> None:
    other = tiny_corpus(tmp_path, texts=random_texts(count=60, seed=5), name="other", shard_len=2500).folder
    for name in ("index.json", f"{SHARD}.idx", SHARD):
        mine = (corpus / name).read_bytes()
        shutil.copy(other / name, corpus / name)
        assert verify_corpus(corpus) != [], name
        with pytest.raises(DataError, match=r"\.tar|tokenizer\.json"):
            tokens_of(corpus)
        (corpus / name).write_bytes(mine)


def test_an_index_that_says_the_same_in_other_bytes_is_named(corpus: Path) -> None:
    path = corpus / "index.json"
    path.write_bytes(path.read_bytes().replace(b'": ', b'":  ', 1))
    (problem,) = verify_corpus(corpus)
    assert "index.json" in problem
