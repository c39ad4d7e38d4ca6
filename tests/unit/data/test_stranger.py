"""A reader that is written only from docs/corpus-format.md reads the same lanes as the training."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.corpora import random_texts, tiny_corpus
from tests.helpers.stranger import StrangersRun, StrangersSplit
from txl_dist.data.format import FORMAT_VERSION, INDEX_NAME, SplitInfo, token_dtype
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import StreamState, continued, first_state
from txl_dist.data.prepare.shard_writer import write_shard
from txl_dist.errors import ConfigError, DataError
from txl_dist.io.files import write_hashed_json
from txl_dist.rng import derive_seed

NUM_CORPORA = 100


def random_corpus(folder: Path, generator: random.Random) -> Corpus:
    """Random tokens in one to six shards: documents of any length, packed or alone, of ids of two or four bytes."""
    folder.mkdir(parents=True)
    vocab_size = generator.choice([3, 300, 65_536, 65_537, 200_000])
    longest = generator.choice([1, 3, 30, 100, 300] if generator.random() < 0.95 else [6_000, 20_000])
    info, tokens = SplitInfo(), np.random.default_rng(generator.getrandbits(32))
    for shard in range(generator.randint(1, 6)):
        lengths = [generator.randint(1, longest) for _ in range(generator.randint(1, 12))]
        documents = [np.append(tokens.integers(0, vocab_size - 1, length - 1), vocab_size - 1) for length in lengths]
        written = write_shard(
            folder,
            f"train-{shard:06d}.tar",
            documents,
            first_document=info.documents,
            dtype=token_dtype(vocab_size),
            vocab_size=vocab_size,
        )
        info.shards.append(written.info)
        info.documents += len(documents)
        info.tokens += sum(lengths)
    index = {
        "format_version": FORMAT_VERSION,
        "dtype": token_dtype(vocab_size).name,
        "vocab_size": vocab_size,
        "end_of_text": vocab_size - 1,
        "tokenizer_sha256": "",
        "splits": {"train": info.to_dict()},
        "statistics": {},
    }
    write_hashed_json(folder / INDEX_NAME, index)
    return open_corpus(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A hundred corpora, two of them made of text by `txl prepare`."""
    folder, generator = tmp_path_factory.mktemp("corpora"), random.Random(15)
    long_texts = random_texts(count=16, longest=9000)
    prepared = [
        tiny_corpus(folder, name="bytes").folder,
        tiny_corpus(folder, name="long", kind="char", texts=long_texts, shard_len=30_000).folder,
    ]
    made = [random_corpus(folder / f"random-{number}", generator).folder for number in range(NUM_CORPORA - 2)]
    return prepared + made


class Journey:
    """A run in the program, over all of its ranks."""

    def __init__(self, folders: Sequence[Path], *, run_seed: int) -> None:
        self.splits = [open_corpus(folder).split("train") for folder in folders]
        self.seed = derive_seed(run_seed, "documents")
        self.state: StreamState | None = None

    def go_on(self, *, num_lanes: int, weights: Sequence[float]) -> None:
        """Raises ConfigError or DataError if the settings are impossible."""
        wanted = first_state(self.splits, weights=weights, num_lanes=num_lanes, seed=self.seed)
        state = wanted if self.state is None else continued(self.state, wanted, self.splits)
        LaneStream(self.splits, state, segment_len=1, lanes=range(num_lanes))
        self.state = state

    def steps(self, *, segment_len: int, num_ranks: int) -> Iterator[np.ndarray]:
        """[lanes, T+1] tokens of each step."""
        assert self.state is not None
        num_lanes = self.state.num_lanes
        ranks = [
            LaneStream(
                self.splits,
                self.state,
                segment_len=segment_len,
                lanes=lanes_of_rank(num_lanes, rank=rank, world_size=num_ranks),
            )
            for rank in range(num_ranks)
        ]
        for parts in zip(*ranks, strict=True):
            self.state = parts[0][1]
            assert all(state == self.state for _, state in parts)
            yield np.concatenate([segment.tokens for segment, _ in parts])


def random_settings(generator: random.Random, num_corpora: int) -> tuple[int, list[float]]:
    weights = [generator.choice([0, 0.5, 1, 1, 2.3, 7]) for _ in range(num_corpora)]
    return generator.randint(1, 12), weights if generator.random() < 0.7 else []


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] if n % 2 else []) for n in range(NUM_CORPORA)]
)
def test_a_reader_made_from_the_page_alone_reads_every_lane_of_a_run_that_changes(
    folders: list[Path], number: int
) -> None:
    """Other ranks, lanes, segments and weights (0 pauses a corpus), in the middle of epochs and at their borders."""
    generator = random.Random(number)
    chosen = [folders[number], *generator.sample(folders, generator.choice([0, 0, 1, 2]))]
    chosen = list(dict.fromkeys(chosen))
    run_seed = generator.choice([0, 1, -3, generator.getrandbits(40)])
    ours = Journey(chosen, run_seed=run_seed)
    stranger = StrangersRun([StrangersSplit(folder, "train") for folder in chosen], run_seed=run_seed)
    num_changes = num_compared = 0
    for _ in range(1000):
        num_lanes, weights = random_settings(generator, len(chosen))
        try:
            ours.go_on(num_lanes=num_lanes, weights=weights)
        except (ConfigError, DataError):  # a corpus gets no lane, or has fewer tokens than lanes
            continue
        stranger.go_on(num_lanes=num_lanes, weights=weights)
        shortest = min(corpus.data.num_tokens // corpus.num_lanes for corpus in stranger.corpora if corpus.num_lanes)
        segment_len = generator.choice([1, 2, 7, 20, max(1, min(shortest, 60))])  # the last ends with an epoch
        num_ranks = generator.choice([ranks for ranks in range(1, num_lanes + 1) if num_lanes % ranks == 0])
        for ours_LT in islice(ours.steps(segment_len=segment_len, num_ranks=num_ranks), generator.randint(1, 5)):
            theirs = stranger.rows(segment_len)
            assert np.array_equal(ours_LT, theirs)
            num_compared += theirs.size
        assert ours.state is not None
        stored = ours.state.to_dict()
        as_told = StrangersRun(stranger.splits, run_seed=0)
        as_told.load(stored)
        assert np.array_equal(as_told.rows(3), stranger_copy(stranger).rows(3)), "a checkpoint's state says the same"
        num_changes += 1
        if num_changes == 5:
            break
    assert num_changes == 5
    assert num_compared > 0


def stranger_copy(run: StrangersRun) -> StrangersRun:
    other = copy(run)
    other.corpora = [copy(corpus) for corpus in run.corpora]
    return other


@pytest.mark.parametrize("number", range(0, NUM_CORPORA, 10))
def test_a_reader_made_from_the_page_alone_leaves_out_what_a_rewind_left_out(folders: list[Path], number: int) -> None:
    generator = random.Random(number)
    ours, split = Journey([folders[number]], run_seed=number), StrangersSplit(folders[number], "train")
    stranger = StrangersRun([split], run_seed=0)
    ours.go_on(num_lanes=generator.randint(1, min(6, split.num_tokens)), weights=[])
    for num_lanes in (generator.randint(1, min(6, split.num_tokens)) for _ in range(3)):
        states = [ours.state]
        for _ in islice(ours.steps(segment_len=5, num_ranks=1), 6):
            states.append(ours.state)
        first, last = sorted(generator.sample(range(1, 7), 2))
        target, begin, end = states[generator.randint(0, first)], states[first], states[last]
        assert target is not None
        assert begin is not None
        assert end is not None
        ours.state = target.with_skip(begin, end)
        stranger.load(ours.state.to_dict())
        for ours_LT in islice(ours.steps(segment_len=4, num_ranks=1), generator.randint(0, 5)):
            assert np.array_equal(ours_LT, stranger.rows(4))
        ours.go_on(num_lanes=num_lanes, weights=[])
        stranger.go_on(num_lanes=num_lanes)
        for ours_LT in islice(ours.steps(segment_len=3, num_ranks=1), 5):
            assert np.array_equal(ours_LT, stranger.rows(3))


def test_the_stranger_knows_nothing_of_ours() -> None:
    tree = ast.parse((Path(__file__).parents[2] / "helpers" / "stranger.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith(("txl_dist", "tests", "torch"))]
