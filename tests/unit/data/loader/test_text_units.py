"""Units of a loss: a loss is a cost of the text only if every token is scored and the tokens encode the whole text."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import random_text, random_texts, tiny_corpus, write_jsonl
from tests.unit.data.prepare.test_reindex import npy, write_tar
from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.data.loader.lanes import LanePlan, lanes_of_rank, owners_of_lanes
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream import LaneStream, plain_segment
from txl_dist.data.loader.stream_state import StreamState, continued, first_state
from txl_dist.data.prepare.documents import text_bytes_of
from txl_dist.data.prepare.reindex import reindex_corpus
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.io.files import canonical_hash, write_hashed_json
from txl_dist.tokenizers.characters import CharTokenizer
from txl_dist.tokenizers.word_tokenizer import WordTokenizer
from txl_dist.train.batch import BatchMaker

CARRY, MASK = (BatchMaker((0, 300), (0, 300), mask_documents) for mask_documents in (False, True))


def random_corpus(folder: Path, seed: int, **settings: Any) -> Corpus:
    """Of many short documents, some of one letter, over several shards."""
    chance = random.Random(seed)
    texts = [random_text(chance, length=chance.choice((1, 1, 2, 5, 30, 90))) for _ in range(chance.randint(6, 50))]
    values = {"shard_len": chance.choice((50, 300, 5000)), "seed": seed, "valid_fraction": 0.0, **settings}
    return tiny_corpus(folder, texts=texts, name=f"corpus{seed}", **values)


def scored_in_evaluation(split: Split, maker: BatchMaker, *, world_size: int, **cut: int) -> list[int]:
    """Targets that count, by their place in the split, over all ranks."""
    found: list[int] = []
    for rank in range(world_size):
        source = EvalStream(split, rank=rank, world_size=world_size, **cut)
        for step, segment in enumerate(source):
            overlap = segment.scored.shape[1] - source.segment_len
            begin = step * source.segment_len - overlap
            rows, columns = np.nonzero(maker.batch(segment).scored_BT.numpy())
            lanes = np.array(source.lanes)[rows]
            found += (lanes * source.stripe_len + begin + columns + 1).tolist()
    return sorted(found)


SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 6 else []) for seed in range(12)]


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_score_the_same_targets_as_carrying_in_every_cut_of_an_evaluation(tmp_path: Path, seed: int) -> None:
    chance, split = random.Random(seed), random_corpus(tmp_path, seed).split("train")
    for _ in range(6):
        cut = {"num_lanes": chance.randint(1, 9), "segment_len": chance.randint(1, 40)}
        cut |= {"overlap_len": chance.choice((0, 3, 50)), "world_size": chance.randint(1, 3)}
        scored = scored_in_evaluation(split, MASK, **cut)
        assert scored == scored_in_evaluation(split, CARRY, **cut) == list(range(1, split.tokens))


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_train_on_the_same_targets_as_carrying_but_where_a_piece_begins_inside_a_document(
    tmp_path: Path, seed: int
) -> None:
    """From the start, after a skip, and after the lanes were cut again."""
    chance, corpus = random.Random(seed), random_corpus(tmp_path, seed)
    split, num_lanes, segment_len = corpus.split("train"), chance.randint(2, 8), chance.randint(1, 25)
    fresh = first_state([split], num_lanes=num_lanes, seed=seed)
    some = split.tokens // num_lanes // 2
    begin = fresh.advanced(chance.randint(0, some))
    skipping = begin.with_skip(begin.advanced(chance.randint(0, some)), begin.advanced(some + chance.randint(0, some)))
    anew = continued(skipping, first_state([split], num_lanes=num_lanes - 1, seed=seed), [split])
    for first in (fresh, skipping, anew):
        for world_size in (1, first.num_lanes):
            for rank in range(world_size):
                lanes = lanes_of_rank(first.num_lanes, rank=rank, world_size=world_size)
                check_against_naive(corpus, first, segment_len=segment_len, lanes=lanes)


def check_against_naive(corpus: Corpus, first: StreamState, *, segment_len: int, lanes: range) -> None:
    """Three epochs of some lanes."""
    split = corpus.split("train")
    lengths = [split.open_shard(index).lengths for index in range(len(split.shards))]
    plan = LanePlan(split.shard_tokens, first.corpora[0].cut(), seed=first.seed, document_tokens=lengths.__getitem__)
    _, numbers = owners_of_lanes([first.num_lanes], seed=first.seed)
    stream = LaneStream([split], first, segment_len=segment_len, lanes=lanes, num_buffers=4)
    state = first
    for segment, after in itertools.islice(stream, 3 * split.tokens // (first.num_lanes * segment_len) + 2):
        batch = MASK.batch(segment)
        assert CARRY.batch(segment).scored_BT.all()
        assert batch.document_BT is not None
        places = [(p, span.begin) for span in state.corpora[0].next_ranges(segment_len + 1)
                  for p in range(span.position, span.position + span.length)]  # fmt: skip
        for row, lane in enumerate(lanes):
            is_end = segment.tokens[row] == corpus.end_of_text
            wanted = [naive(plan, int(numbers[lane]), *pair, is_end=bool(is_end[i]))
                      for i, pair in enumerate(itertools.pairwise(places))]  # fmt: skip
            assert batch.scored_BT[row].tolist() == [is_scored for _, is_scored in wanted]
            assert batch.document_BT[row].tolist() == [document for document, _ in wanted]
        state = after


def naive(
    plan: LanePlan, lane: int, here: tuple[int, int], behind: tuple[int, int], *, is_end: bool
) -> tuple[int, bool]:
    """(document of an input, whether the token behind it counts), from where these two lie alone.

    A place is a lane position and where the skip before it ended.
    """
    stretches = [plan.locate(lane, position) for position, _ in (here, behind)]
    own, next_one = (max(stretch.begin, end) for stretch, (_, end) in zip(stretches, (here, behind), strict=True))
    if own == next_one:
        return own, True
    opens = stretches[1].offset == 0 and is_end
    return (next_one if opens else own), opens


def test_an_end_of_text_sees_no_document_but_the_one_that_it_opens(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, texts=["ab", "cde", "f"], valid_fraction=0.0)
    (segment,) = EvalStream(corpus.split("train"), num_lanes=1, segment_len=8)
    tokens, documents = segment.tokens[0], MASK.batch(segment).document_BT
    assert documents is not None
    is_end = tokens[:-1] == corpus.end_of_text
    assert is_end.sum() == 2, "the last one is a target only"
    before = np.concatenate([[-1], documents[0, :-1].numpy()])
    behind = np.concatenate([documents[0, 1:].numpy(), [-2]])
    assert (documents[0].numpy()[is_end] == behind[is_end]).all()
    assert (documents[0].numpy()[is_end] != before[is_end]).all()


def unseparated(folder: Path) -> Corpus:
    """Three documents, of which the second does not end."""
    CharTokenizer(["a", "b", "\u00e9", "<|endoftext|>", "<unk>"], end_of_text=3).save(folder / "letters.json")
    write_tar(folder / "tars" / "a.tar", [("a.npy", npy([0, 1, 3])), ("b.npy", npy([0, 1])), ("c.npy", npy([1, 3]))])
    return reindex_corpus(folder / "tars", tokenizer_path=folder / "letters.json").corpus


def test_where_documents_are_not_separated_first_tokens_are_not_scored_and_no_bits_are_told(tmp_path: Path) -> None:
    split = unseparated(tmp_path).split("train")
    for num_lanes in (1, 2, 4):
        cut = {"num_lanes": num_lanes, "segment_len": 3, "world_size": 1}
        assert scored_in_evaluation(split, MASK, **cut) == [1, 2, 3, 4, 6], "token 5 follows no end-of-text"
    units = text_units([split], mask_documents=True)
    assert units.bits(1.0) == {}
    assert "first tokens are not scored" in units.problem
    assert text_units([split], mask_documents=False).bits(1.0).keys() == {"bits_per_byte", "bits_per_character"}


def test_without_an_end_of_text_masks_tell_no_bits_but_of_a_single_document(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"end_of_text": False, "valid_fraction": 0.0}
    several = tiny_corpus(tmp_path, name="several", texts=["ab", "cd"], **settings).split("train")
    single = tiny_corpus(tmp_path, name="single", texts=["abcd"], **settings).split("train")
    assert "first tokens are not scored" in text_units([several], mask_documents=True).problem
    assert text_units([single], mask_documents=True).problem == ""
    cut = {"num_lanes": 1, "segment_len": 4, "world_size": 1}
    assert scored_in_evaluation(several, MASK, **cut) == [1, 3]


def test_tars_that_an_older_program_indexed_are_not_taken_for_separated(tmp_path: Path) -> None:
    corpus = unseparated(tmp_path)
    rewritten(corpus.folder, lambda index: index["statistics"].pop("unended_documents"))
    assert not open_corpus(corpus.folder).split("train").is_separated


def rewritten(folder: Path, change: Any) -> None:
    """An index.json with a change, and again with its own hash."""
    index = json.loads((folder / "index.json").read_text())
    del index["self_sha256"]
    change(index)
    write_hashed_json(folder / "index.json", index)
    assert canonical_hash(json.loads((folder / "index.json").read_text()))


PROSE = [
    "The cat sat.\nOn the mat, the Cat sat .\n",
    "a \nb c \n",
    "plain words",
    " two  blanks\t",
    "\u00e9t\u00e9 x\n",
]
TOKENIZERS: dict[str, dict[str, Any]] = {
    "byte": {"kind": "byte"},
    "char": {"kind": "char"},
    "char_lower": {"kind": "char", "lower_case": True},
    "word": {"kind": "word"},
    "word_few": {"kind": "word", "vocab_size": 9},
    "word_lower": {"kind": "word", "lower_case": True},
    "word_sentences": {"kind": "word", "double_eos": True},
    "bpe": {"kind": "bpe", "vocab_size": 300},
    "unigram": {"kind": "unigram", "vocab_size": 300},
}


def foreign_file(folder: Path, name: str) -> Path:
    from tests.unit.tokenizers import test_foreign

    path = folder / name
    if name in test_foreign.PIPELINES:
        test_foreign.PIPELINES[name]().save(str(path))
    else:
        path.write_bytes(test_foreign.sentencepiece_model(**test_foreign.MODELS[name]))
    return path


@pytest.fixture(scope="module", params=[*TOKENIZERS, "gpt2", "bert", "t5", "llama", "words", "spm", "spm_bytes"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Corpus, dict[str, list[str]]]:
    """A corpus of each kind of tokenizer, and the texts of its splits."""
    tmp_path = tmp_path_factory.mktemp(request.param)
    texts = {"train": [*PROSE, *random_texts(count=20, longest=60)], "valid": [*PROSE[:3], "never seen \U0001f638 Zyx"]}
    paths = {split: write_jsonl(tmp_path / f"{split}.jsonl", own) for split, own in texts.items()}
    given = TOKENIZERS.get(request.param) or {"tokenizer_path": foreign_file(tmp_path, request.param)}
    settings: dict[str, Any] = {"valid_inputs": [paths["valid"]], "shard_len": 400, **given}
    return prepare_corpus(tmp_path / "corpus", inputs=[paths["train"]], **settings).corpus, texts


def test_bits_are_told_of_exactly_the_splits_whose_text_comes_back_byte_for_byte(
    made: tuple[Corpus, dict[str, list[str]]],
) -> None:
    corpus, texts = made
    tokenizer = corpus.tokenizer
    for name, own in texts.items():
        split, spelled = corpus.split(name), [tokenizer.decode(tokenizer.encode(text).tolist()) for text in own]
        num_changed = sum(text != back for text, back in zip(own, spelled, strict=True))
        assert bool(split.lost) == bool(num_changed), (name, split.lost)
        assert split.text_bytes == sum(len(text_bytes_of(back)) for back in spelled)
        assert split.text_characters == sum(map(len, spelled))
        unknown = sum(int((tokenizer.encode(text) == tokenizer.unknown_id).sum()) for text in own)
        assert split.num_unknown == unknown
        units = text_units([split], mask_documents=False)
        assert bool(units.bits(1.0)) == (num_changed == 0)
        assert units.unknown_pct == pytest.approx(100 * unknown / split.tokens)
        if num_changed:
            assert f"does not restore {num_changed} of {len(own)} documents" in units.problem


def test_reindexing_counts_the_same_text_sizes_as_preparing(
    made: tuple[Corpus, dict[str, list[str]]], tmp_path: Path
) -> None:
    corpus, _ = made
    copy = Path(shutil.copytree(corpus.folder, tmp_path / "copy"))
    again = reindex_corpus(copy, tokenizer_path=copy / "tokenizer.json", overwrite=True).corpus
    for name in corpus.split_names:
        old, new = corpus.split(name), again.split(name)
        assert (new.text_bytes, new.text_characters) == (old.text_bytes, old.text_characters)
        assert new.num_unknown == old.num_unknown
        assert new.is_separated
        assert new.lost or not old.lost, "what tokens alone cannot prove is not claimed"


def test_bytes_that_are_no_text_have_the_same_sizes_in_both(tmp_path: Path) -> None:
    (tmp_path / "raw.txt").write_bytes(b"caf\xe9 \xff\xfe\x80\x80 \xc3\xa9")
    settings: dict[str, Any] = {"kind": "byte", "encoding_errors": "keep", "valid_fraction": 0.0}
    corpus = prepare_corpus(tmp_path / "corpus", inputs=[tmp_path / "raw.txt"], **settings).corpus
    sizes = [corpus.split("train").text_bytes, corpus.split("train").text_characters]
    again = reindex_corpus(corpus.folder, tokenizer_path=corpus.folder / "tokenizer.json", overwrite=True).corpus
    assert sizes == [again.split("train").text_bytes, again.split("train").text_characters]


def test_a_part_of_a_split_has_no_bits_per_byte_and_the_reason_is_told(tmp_path: Path) -> None:
    split = tiny_corpus(tmp_path).split("valid")
    part = text_units([split], mask_documents=False, max_tokens=50)
    assert part.bits(1.0) == {}
    assert part.problem == (
        f"only the first 50 of the {split.tokens:,} tokens of corpus (valid) are scored (eval.max_tokens)"
    )
    for max_tokens in (0, split.tokens, split.tokens + 1):
        assert text_units([split], mask_documents=False, max_tokens=max_tokens).bits(1.0)


def test_a_word_model_of_nine_ids_has_no_bits_per_byte_to_win_with(tmp_path: Path) -> None:
    corpus = tiny_corpus(
        tmp_path, texts=["the cat sat on the mat", "a dog"], kind="word", vocab_size=9, valid_fraction=0.0
    )
    units = text_units([corpus.split("train")], mask_documents=False)
    assert (units.bits(0.1), units.token) == ({}, "word")


def test_words_are_lossless_only_where_one_blank_follows_each_and_a_newline_each_line(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kind": "word", "valid_fraction": 0.0}
    kept = tiny_corpus(tmp_path, name="kept", texts=["a <unk> b \nc \n", "a \n\n"], **settings).split("train")
    assert text_units([kept], mask_documents=False).problem == "", "an <unk> that the text itself spells is text"
    for number, text in enumerate(("a b\n", "a b ", " a b \n", "a  b \n")):
        lost = tiny_corpus(tmp_path, name=f"lost{number}", texts=[text], **settings).split("train")
        assert "does not restore 1 of 1 documents" in lost.lost


def test_an_index_of_before_is_judged_by_what_its_tokenizer_is_certain_of(tmp_path: Path) -> None:
    def without(index: dict[str, Any]) -> None:
        for values in index["splits"].values():
            for name in ("changed_documents", "unknown_tokens"):
                values.pop(name, None)

    expected = {"byte": "", "bpe": "", "char": "", "word": "does not record whether", "char_lower": "does not record"}
    for name, words in expected.items():
        texts = ["a b \n" * 30, "b a \n" * 20]
        corpus = tiny_corpus(tmp_path, name=name, texts=texts, valid_fraction=0.0, **TOKENIZERS[name])
        rewritten(corpus.folder, without)
        split = open_corpus(corpus.folder).split("train")
        assert words in split.lost
        assert bool(split.lost) == bool(words)
    CharTokenizer(["a", "<unk>"], end_of_text=None).save(tmp_path / "a.json")
    write_tar(tmp_path / "tars" / "a.tar", [("a.npy", npy([0, 1, 0, 0]))])
    split = reindex_corpus(tmp_path / "tars", tokenizer_path=tmp_path / "a.json").corpus.split("train")
    assert (split.num_unknown, "does not record whether" in split.lost) == (1, True)


@pytest.mark.parametrize("kind", ["letters", "words"])
def test_a_split_of_end_of_text_alone_has_no_bits_and_no_division_by_zero(tmp_path: Path, kind: str) -> None:
    tokenizer = (
        CharTokenizer(["a", "<|endoftext|>"], end_of_text=1, unknown=None)
        if kind == "letters"
        else WordTokenizer(["a", "<|endoftext|>", "<eos>", "<unk>"], end_of_text=1)
    )
    tokenizer.save(tmp_path / "tokenizer.json")
    write_tar(tmp_path / "tars" / "a.tar", [("a.npy", npy([1, 1, 1])), ("b.npy", npy([1]))])
    summary = reindex_corpus(tmp_path / "tars", tokenizer_path=tmp_path / "tokenizer.json")
    units = text_units([summary.corpus.split("train")], mask_documents=False)
    assert (units.bits(math.log(2)), "holds no text" in units.problem) == ({}, True)
    assert summary.lines()


def test_a_mixture_has_bits_only_if_all_of_it_is_text(tmp_path: Path) -> None:
    whole = tiny_corpus(tmp_path, name="whole", texts=["abcd"], valid_fraction=0.0).split("train")
    lossy = tiny_corpus(tmp_path, name="lossy", texts=["a b"], kind="word", valid_fraction=0.0).split("train")
    both = text_units([whole, lossy], shares=[0.5, 0.5], mask_documents=False)
    assert (both.bits(1.0), "lossy" in both.problem) == ({}, True)
    twice = text_units([whole, whole], shares=[0.5, 0.5], mask_documents=False)
    assert twice.bits(math.log(2)) == pytest.approx({"bits_per_byte": 5 / 4, "bits_per_character": 5 / 4})


def test_segments_of_one_document_are_scored_whole() -> None:
    assert MASK.batch(plain_segment(np.arange(8).reshape(2, 4))).scored_BT.all()
