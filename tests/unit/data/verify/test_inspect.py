"""`txl inspect` shows the figures and the texts that a reader of the corpus finds."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers.corpora import flip_bit, random_texts, tiny_corpus
from tests.helpers.http import serve
from txl_dist.cli.main import main
from txl_dist.data.loader.corpus import Corpus
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import first_state
from txl_dist.data.storage import fsspec_io
from txl_dist.data.verify.inspect import find_shard, lane_facts
from txl_dist.errors import ConfigError, DataError
from txl_dist.rng import derive_seed
from txl_dist.tokenizers.characters import CharTokenizer

NUM_LANES, SEGMENT_LEN = 4, 150


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("inspect"))


def inspect(corpus: Corpus | str, *flags: object, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints."""
    location = corpus if isinstance(corpus, str) else str(corpus.folder)
    assert main(["inspect", location, *map(str, flags)]) == 0
    return capsys.readouterr().out


def refused(corpus: Corpus, *flags: object, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", str(corpus.folder), *map(str, flags)]) == 2
    return capsys.readouterr().err


def test_the_table_and_the_json_file_say_what_the_corpus_holds(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = inspect(corpus, "--json", tmp_path / "facts.json", capsys=capsys)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert f"{corpus.folder}: 257 ids as uint16 (byte)" in out
    assert facts["fingerprint"] == corpus.fingerprint
    assert facts["fingerprint"][:16] in out
    for name in corpus.split_names:
        documents = list(corpus.split(name).each_document())
        (row,) = [line.split() for line in out.splitlines() if line.startswith(name)]
        lengths = [len(document) for document in documents]
        tokens, num_bytes = sum(lengths), sum(lengths) - len(documents)
        assert row[1:4] == [f"{len(documents):,}", f"{tokens:,}", f"{num_bytes / tokens:.3f}"]
        assert row[5:7] == [f"{max(lengths):,}", f"{len(list(corpus.folder.glob(f'{name}-*.tar'))):,}"]
        assert facts["splits"][name]["tokens"] == tokens


def test_clusters_show_their_share_of_the_tokens_and_the_flag_to_train_with(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = inspect(corpus, "--cutoffs", 5, 20, "--split", "valid", "--json", tmp_path / "facts.json", capsys=capsys)
    assert "--model.cutoffs 5 20" in out.splitlines()
    ids = corpus.split("valid").read_all()
    expected = [np.mean(ids < 5), np.mean((ids >= 5) & (ids < 20)), np.mean(ids >= 20)]
    clusters = json.loads((tmp_path / "facts.json").read_text())["clusters"]["clusters"]
    assert [cluster["share"] for cluster in clusters] == pytest.approx(expected)
    assert f"{100 * expected[0]:.2f} %" in out
    assert "cutoffs save little" not in out


def test_ids_that_are_not_in_the_order_of_frequency_are_remarked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(CharTokenizer(["a", "b", "<|endoftext|>", "<unk>"], end_of_text=2).to_json())
    corpus = tiny_corpus(
        tmp_path, texts=["ab" + "b" * 30], valid_fraction=0.0, kind="auto", tokenizer_path=tmp_path / "a.json"
    )
    out = inspect(corpus, "--cutoffs", 1, capsys=capsys)
    assert "cutoffs save little. If the ids were in order, cluster 0 would contain 93.94 % of train" in out


def test_computed_cutoffs_are_shown_like_given_ones(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(corpus, "--num-clusters", 3, "--width", 64, "--div-value", 4, capsys=capsys)
    (flag,) = [line for line in out.splitlines() if line.startswith("--model.cutoffs ")]
    cutoffs = flag.split()[1:]
    assert len(cutoffs) == 2
    *given, remark = out.splitlines()
    assert inspect(corpus, "--cutoffs", *cutoffs, capsys=capsys).splitlines() == given
    assert "need the least work" in remark


def test_cutoffs_that_do_not_fit_are_refused(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    assert "vocabulary size 257" in refused(corpus, "--cutoffs", 300, capsys=capsys)
    assert "Use only one of these flags" in refused(corpus, "--cutoffs", 3, "--num-clusters", 2, capsys=capsys)
    assert "has no split 'test'" in refused(corpus, "--cutoffs", 3, "--split", "test", capsys=capsys)


def test_a_shard_lists_its_documents_and_shows_one(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    shard, tokenizer = corpus.split("train").open_shard(1), corpus.tokenizer
    lines = inspect(corpus, "--shard", "train-000001", capsys=capsys).splitlines()
    assert f"{len(shard.lengths)} documents" in lines[0]
    rows = [line.split() for line in lines[2:]]
    assert [int(row[1].replace(",", "")) for row in rows] == shard.lengths.tolist()
    assert [int(row[2].replace(",", "")) for row in rows] == shard.offsets.tolist()
    few = inspect(corpus, "--shard", "train-000001.tar", "--max-documents", 2, capsys=capsys).splitlines()
    assert few[-1] == f"... and {len(shard.lengths) - 2} more"
    ids = shard.document(3).tolist()
    out = inspect(corpus, "--shard", "train-000001", "--document", 3, capsys=capsys)
    assert tokenizer.decode(ids) in out
    out = inspect(corpus, "--shard", "train-000001", "--document", 3, "--max-tokens", 5, capsys=capsys)
    assert out.endswith(tokenizer.decode(ids[:5]) + "\n")
    assert "the first 5:" in out


def test_what_does_not_exist_is_refused_with_what_does(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(corpus, "--shard", "trian-000000", capsys=capsys)
    assert "no shard 'trian-000000.tar'. Its shards are train-000000.tar, train-000001.tar" in message
    message = refused(corpus, "--shard", "train-000000", "--document", 9999, capsys=capsys)
    assert "no document 9999" in message
    assert "--shard" in refused(corpus, "--document", 1, capsys=capsys)
    assert "the lanes are 0 to 3" in refused(corpus, "--lane", 4, "--num-lanes", 4, capsys=capsys)
    assert "the first step is 1" in refused(corpus, "--lane", 0, "--step", 0, capsys=capsys)


def test_a_damaged_document_is_shown_as_damaged_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tiny_corpus(tmp_path)
    offset = int(corpus.split("train").open_shard(1).offsets[2])
    flip_bit(corpus.folder / "train-000001.tar", offset=offset)
    lines = inspect(corpus, "--shard", "train-000001", capsys=capsys).splitlines()
    damaged = [line for line in lines if "damaged. Their crc32 differs" in line]
    assert [line.split()[0] for line in damaged] == ["2"]
    assert "document 2 (sample" in refused(corpus, "--shard", "train-000001", "--document", 2, capsys=capsys)


def test_text_that_would_steer_a_terminal_is_made_visible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tiny_corpus(tmp_path, texts=["red\x1b[31m\r\x07\nnext\tline"], valid_fraction=0.0)
    for flags in (["--shard", "train-000000"], ["--shard", "train-000000", "--document", 0]):
        out = inspect(corpus, *flags, capsys=capsys)
        assert "red\ufffd[31m" in out
        assert not {"\x1b", "\r", "\x07"} & set(out)


def test_a_lane_shows_the_tokens_that_training_reads_and_where_each_lies(corpus: Corpus) -> None:
    splits = [corpus.split("train")]
    state = first_state(splits, num_lanes=NUM_LANES, seed=3)
    stream = iter(LaneStream(splits, state, segment_len=SEGMENT_LEN, lanes=range(NUM_LANES)))
    tokenizer = corpus.tokenizer
    num_pieces = 0
    for step in range(40):  # over the border of an epoch
        segment, _ = next(stream)
        for lane in range(NUM_LANES):
            facts = lane_facts(splits, state.advanced(step * SEGMENT_LEN), SEGMENT_LEN, lane=lane)
            assert facts["position"] == step * SEGMENT_LEN
            found: list[int] = []
            for piece in facts["pieces"]:
                assert piece["first"] == len(found)
                split, index = find_shard(corpus, piece["shard"])
                document = split.open_shard(index).document(piece["document"])
                own = document[piece["offset"] : piece["offset"] + piece["tokens"]].tolist()
                assert piece["text"] == tokenizer.decode(own)
                found += own
            assert found == segment.tokens[lane, :-1].tolist()
            assert facts["target"] == segment.tokens[lane, -1]
            num_pieces += len(facts["pieces"])
    assert num_pieces > 40 * NUM_LANES
    with pytest.raises(ConfigError, match="no lane 4"):
        lane_facts(splits, state, SEGMENT_LEN, lane=NUM_LANES)


def test_the_lane_of_a_bare_corpus_is_that_of_a_run_with_the_same_settings(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--lane", 2, "--step", 7, "--num-lanes", NUM_LANES, "--segment-len", 20, "--seed", 9)
    out = inspect(corpus, *flags, "--json", tmp_path / "facts.json", capsys=capsys)
    splits = [corpus.split("train")]
    state = first_state(splits, num_lanes=NUM_LANES, seed=derive_seed(9, "documents"))
    facts = lane_facts(splits, state.advanced(6 * 20), 20, lane=2)
    assert json.loads((tmp_path / "facts.json").read_text()) == facts
    assert f"lane 2 reads {corpus.folder} (train) from its token 120 on" in out
    assert facts["pieces"][0]["shard"] in out


def test_a_corpus_at_a_url_is_inspected_there(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    memory = fsspec.filesystem("memory")
    for path in corpus.folder.iterdir():
        memory.pipe_file(f"/inspected/{path.name}", path.read_bytes())
    try:
        for flags in ((), ("--cutoffs", 5), ("--shard", "train-000001"), ("--lane", 1, "--num-lanes", 4)):
            there = inspect("memory://inspected", *flags, capsys=capsys)
            assert there == inspect(corpus, *flags, capsys=capsys).replace(str(corpus.folder), "memory://inspected")
    finally:
        memory.rm("/inspected", recursive=True)


@pytest.mark.parametrize("flags", [(), ("--lane", "1")])
def test_a_mirrored_run_is_answered_with_how_to_get_it_and_a_missing_corpus_with_the_reason(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    fsspec.filesystem("memory").pipe_file("/mirror/run/config.toml", b"")
    assert main(["inspect", "memory://mirror/run", *flags]) == 2
    assert capsys.readouterr().err == (
        "txl inspect: error: memory://mirror/run is a run or a checkpoint. `txl inspect` reads runs and checkpoints "
        "from local folders only. To download the newest checkpoint of a mirror, repeat the `txl train` command of "
        "its run with an empty --run.dir.\n"
    )
    assert main(["inspect", "memory://mirror/rum", *flags]) == 2
    assert capsys.readouterr().err == (
        "txl inspect: error: memory://mirror/rum is not a readable corpus: cannot read memory://mirror/rum/index.json: "
        "it does not exist (try 1 of 6). Check the address, the network, the credentials and the file at this "
        "address. Make a corpus with `txl prepare`, or set data.path to the folder of a corpus.\n"
    )


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_error_shows_the_password_or_the_query_of_a_corpus(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_io, "BACKOFF_S", 0.001)
    with serve(tmp_path) as server:
        url = server.url.replace("http://", "http://me:SECRET@") + "/c?token=SECRET"
        absent = printed_by(command, url, capsys=capsys)
    unreachable = printed_by(command, url, capsys=capsys)
    assert f"{server.url}/c is not a readable corpus: cannot read {server.url}/c/index.json: it does not" in absent
    assert "ClientConnectorError" in unreachable
    assert "SECRET" not in absent + unreachable


def printed_by(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return all that a command prints that fails."""
    with suppress(SystemExit):
        assert main(words) == 2
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_an_outage_is_not_taken_for_a_missing_corpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_io, "BACKOFF_S", 0.001)
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *_: 1 / 0)
    assert main(["inspect", "memory://mirror/run"]) == 2
    assert "ZeroDivisionError: division by zero (try 6 of 6). Check the address, the network" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot write" in refused(corpus, "--json", corpus.folder / "none" / "facts.json", capsys=capsys)


def test_a_shard_is_found_in_any_split(corpus: Corpus) -> None:
    split, index = find_shard(corpus, "valid-000000")
    assert (split.name, split.shards[index].name) == ("valid", "valid-000000.tar")
    with pytest.raises(DataError, match="Name one of these"):
        find_shard(corpus, "valid-000099")


def test_the_text_of_a_random_corpus_survives_the_way_to_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [text.replace("\u2028", " ") for text in random_texts(count=3, longest=90)]
    corpus = tiny_corpus(tmp_path, texts=texts, valid_fraction=0.0)
    shown = [inspect(corpus, "--shard", "train-000000", "--document", i, capsys=capsys) for i in range(3)]
    assert sorted(one.partition("\n")[2] for one in shown) == sorted(f"{text}<|endoftext|>\n" for text in texts)
