"""Measure how fast the loader is, as ratios to other loaders in the same run.

    python -m tools.benchmarks.loader                                                   100 million tokens, some minutes
    python -m tools.benchmarks.loader --tokens 1200000 --rounds 1 --read-mib 64         the smallest size, some seconds

The program writes a synthetic corpus into a temporary folder (documents of 3,000 to 40,000 tokens, uint16). It then
reads batches of 32 lanes (batch rows) x 512 tokens with these variants in turn, and reports the best of several rounds:

    ours         LaneStream as in training: tokens as int64, into a ring of buffers, crc32 of every document once
    marked       the same with document numbers, as training with document masks needs them
    webdataset   plain webdataset over the same shards, raw bytes, np.frombuffer, copied into 32 lanes (int64)
    memmap       a Python loop over 32 rows of one flat np.memmap (int64)

It also measures the resuming in the middle of an epoch, the size of the state, the planning of an epoch of 100,000
shards, and the anonymous memory of a process that reads one gigabyte (`--read-mib`). The times are those with a warm
page cache. Run the program on one idle core.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.lanes import LanePartition, LanePlan
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import CorpusState, StreamState, first_state
from txl_dist.data.prepare.reindex import reindex_corpus
from txl_dist.tokenizers.training import train_tokenizer

LANES, SEGMENT_LEN = 32, 512
SHARD_TOKENS = 1 << 24
LEFT_OVER_BATCHES = 64
"""Number of batches at the end of a corpus that are not timed, because webdataset's lanes end at different times."""
LEAST_TOKENS = (LEFT_OVER_BATCHES + 8) * LANES * (SEGMENT_LEN + 1)
"""Number of tokens of the smallest corpus. 8 batches of it are timed."""


def write_corpus(folder: Path, *, num_tokens: int, seed: int = 0) -> Corpus:
    """Write random tokens in documents of different lengths as webdataset shards, and make a corpus of them with
    `reindex`."""
    from webdataset import TarWriter

    generator = np.random.default_rng(seed)
    folder.mkdir()
    tokenizer = train_tokenizer("byte", lambda: ["a"])
    tokenizer.save(folder / "tokenizer.json")
    number = written = shard = 0
    while written < num_tokens:
        with TarWriter(str(folder / f"train-{shard:06d}.tar"), encoder=False, mtime=0) as tar:
            in_shard = 0
            while in_shard < SHARD_TOKENS and written < num_tokens:
                tokens = generator.integers(0, 257, int(generator.integers(3_000, 40_000)), dtype=np.uint16)
                buffer = io.BytesIO()
                np.save(buffer, tokens)
                tar.write({"__key__": f"{number:09d}", "npy": buffer.getvalue()})
                number, in_shard, written = number + 1, in_shard + len(tokens), written + len(tokens)
        shard += 1
    reindex_corpus(folder, tokenizer_path=folder / "tokenizer.json")
    return open_corpus(folder)


def start(corpus: Corpus, *, position: int = 0) -> StreamState:
    """Return the state in which all lanes are at `position`."""
    return first_state([corpus.split("train")], num_lanes=LANES, seed=1).advanced(position)


def ours(corpus: Corpus, *, steps: int, mark_documents: bool = False) -> float:
    """Return the seconds in which our loader reads `steps` batches."""
    stream = LaneStream(
        [corpus.split("train")],
        start(corpus),
        segment_len=SEGMENT_LEN,
        lanes=range(LANES),
        mark_documents=mark_documents,
        num_buffers=6,
    )
    began = time.perf_counter()
    for _ in itertools.islice(stream, steps):
        pass
    return time.perf_counter() - began


def webdataset_lanes(corpus: Corpus, *, steps: int) -> float:
    """Return the seconds in which webdataset reads the same number of batches."""
    began = time.perf_counter()
    for _ in itertools.islice(webdataset_batches(corpus), steps):
        pass
    return time.perf_counter() - began


def webdataset_batches(corpus: Corpus) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of lanes from plain webdataset. A sample fills the next lane that is not full. webdataset can reach
    a position only by reading up to it."""
    import webdataset

    urls = [str(corpus.folder / shard.name) for shard in corpus.split("train").shards]
    samples = iter(webdataset.WebDataset(urls, shardshuffle=False))
    waiting = [np.empty(0, np.uint16)] * LANES
    while True:
        batch = np.empty((LANES, SEGMENT_LEN + 1), np.int64)
        for lane in range(LANES):
            filled = 0
            while filled <= SEGMENT_LEN:
                if not len(waiting[lane]):
                    # Each .npy of this corpus has a header of 128 bytes before its tokens.
                    waiting[lane] = np.frombuffer(next(samples)["npy"], dtype=np.uint16, offset=128)
                count = min(len(waiting[lane]), SEGMENT_LEN + 1 - filled)
                batch[lane, filled : filled + count] = waiting[lane][:count]
                waiting[lane] = waiting[lane][count:]
                filled += count
        yield batch


def memmap_rows(flat: Path, *, steps: int) -> float:
    """Return the seconds for the same batches from one flat file that is divided into 32 equal parts."""
    tokens = np.memmap(flat, dtype=np.uint16, mode="r")
    stripe_len = len(tokens) // LANES
    began = time.perf_counter()
    for step in range(steps):
        batch = np.empty((LANES, SEGMENT_LEN + 1), np.int64)
        for lane in range(LANES):
            first = lane * stripe_len + step * SEGMENT_LEN
            batch[lane] = tokens[first : first + SEGMENT_LEN + 1]
    return time.perf_counter() - began


def resume(folder: Path, *, share: float) -> float:
    """Return the seconds from the opening of the corpus to the first batch at a share of the epoch."""
    began = time.perf_counter()
    corpus = open_corpus(folder)
    position = int(corpus.split("train").tokens // LANES * share)
    stream = LaneStream(
        [corpus.split("train")], start(corpus, position=position), segment_len=SEGMENT_LEN, lanes=range(LANES)
    )
    next(iter(stream))
    return time.perf_counter() - began


def replay(corpus: Corpus, *, share: float) -> float:
    """Return the seconds in which webdataset reads up to a share of the epoch."""
    steps = int(corpus.split("train").tokens * share) // (LANES * SEGMENT_LEN)
    return webdataset_lanes(corpus, steps=steps)


def best_of(rounds: int, actions: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return the best time of each action, all of them once per round; a line on standard error says which round."""
    best = dict.fromkeys(actions, float("inf"))
    for number in range(1, rounds + 1):
        print(f"{', '.join(actions)}: round {number} of {rounds} ...", file=sys.stderr, flush=True)
        for name, action in actions.items():
            best[name] = min(best[name], action())
    return best


def print_speed(corpus: Corpus, flat: Path, *, rounds: int) -> None:
    """Print million tokens per second of each variant, and the ratios to webdataset and memmap."""
    steps = corpus.split("train").tokens // (LANES * (SEGMENT_LEN + 1)) - LEFT_OVER_BATCHES
    seconds = best_of(
        rounds,
        {
            "ours": lambda: ours(corpus, steps=steps),
            "marked": lambda: ours(corpus, steps=steps, mark_documents=True),
            "webdataset": lambda: webdataset_lanes(corpus, steps=steps),
            "memmap": lambda: memmap_rows(flat, steps=steps),
        },
    )
    for name, value in seconds.items():
        print(f"{name:<12}{steps * LANES * SEGMENT_LEN / value / 1e6:10.1f} Mtok/s")
    for name in ("ours", "marked"):
        print(
            f"{name} / webdataset {seconds['webdataset'] / seconds[name]:.2f}   "
            f"{name} / memmap rows {seconds['memmap'] / seconds[name]:.2f}"
        )


def print_resume(corpus: Corpus, *, rounds: int) -> None:
    """Print the milliseconds to the first batch at several positions of the epoch, and the time in which webdataset
    reads up to the middle."""
    shares = (0.0, 0.1, 0.5, 0.9)
    actions: dict[str, Callable[[], float]] = {
        f"at {share:.0%}": functools.partial(resume, corpus.folder, share=share) for share in shares
    }
    for name, value in best_of(rounds, actions).items():
        print(f"resume {name}: {1000 * value:.1f} ms")
    name = "webdataset replay to 50%"
    print(f"{name}: {1000 * best_of(rounds, {name: lambda: replay(corpus, share=0.5)})[name]:.0f} ms")


def print_state() -> None:
    """Print the size of the state in bytes after several changes of the number of lanes in an epoch of 10**13 tokens.
    Each change adds ranges of unread tokens to the state."""
    one = CorpusState("corpus", "f" * 64, "train", num_lanes=1024, position=10**9)
    for cuts, next_lanes in enumerate((768, 1024, 768, 1024)):
        size = len(json.dumps(StreamState(1, (one,)).to_dict(), indent=1))
        print(f"state of {one.num_lanes:,} lanes, divided again {cuts} times within an epoch: {size:,} bytes")
        plan = LanePlan([10**12] * 10, one.cut(), seed=0, document_tokens=lambda shard: np.ones(1, np.int64))
        epoch, rest = plan.rest_of_epoch(10**9 * (cuts + 1))
        one = CorpusState("corpus", "f" * 64, "train", num_lanes=next_lanes, epoch=epoch, unread=rest)


def plan_epoch() -> float:
    """Return the seconds to plan an epoch of 100,000 shards and to find a lane's position in it."""
    tokens = np.random.default_rng(0).integers(30_000_000, 36_000_000, 100_000)
    began = time.perf_counter()
    plan = LanePlan(tokens, LanePartition(1024), seed=0, document_tokens=lambda shard: tokens[shard : shard + 1])
    plan.locate(77, 12_345)
    return time.perf_counter() - began


def print_memory(corpus: Corpus, *, read_mib: int) -> None:
    """Print the anonymous memory of a process while it reads `read_mib` MiB, after each eighth of them."""
    code = "import sys; from tools.benchmarks.loader import memory_while_reading as run; "
    code += "run(sys.argv[1], int(sys.argv[2]))"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(corpus.folder), str(read_mib)]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    print(f"RssAnon while reading {read_mib:,} MiB, MiB:", done.stdout.strip())


def memory_while_reading(folder: str, read_mib: int) -> None:
    """Read `read_mib` MiB and print the anonymous memory. `print_memory` runs this function in a separate process."""
    corpus = open_corpus(folder)
    stream = LaneStream(
        [corpus.split("train")], start(corpus), segment_len=SEGMENT_LEN, lanes=range(LANES), num_buffers=6
    )
    steps = (read_mib << 20) // (2 * LANES * SEGMENT_LEN)
    for step, _ in enumerate(itertools.islice(stream, steps)):
        if step % (steps // 8) == steps // 16:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            kib = next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]
            print(round(int(kib) / 1024, 1), end=" ")


def main() -> None:
    """Write the corpus, measure everything and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, default=100_000_000, help=f"tokens of the corpus; at least {LEAST_TOKENS:,}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each reader")
    parser.add_argument("--read-mib", type=int, default=1024, help="MiB of tokens to read while the memory is measured")
    arguments = parser.parse_args()
    if arguments.tokens < LEAST_TOKENS:
        parser.error(f"--tokens {arguments.tokens:,} is too few: the smallest corpus has {LEAST_TOKENS:,}")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} measures nothing: type --rounds 1 or more")
    if arguments.read_mib < 1:
        parser.error(f"--read-mib {arguments.read_mib} reads nothing: type --read-mib 1 or more")
    with tempfile.TemporaryDirectory() as scratch:
        corpus = write_corpus(Path(scratch) / "corpus", num_tokens=arguments.tokens)
        flat = Path(scratch) / "flat.bin"
        corpus.split("train").read_all().tofile(flat)
        split = corpus.split("train")
        print(f"{split.tokens:,} tokens, {split.documents:,} documents, {len(split.shards)} shards")
        print_speed(corpus, flat, rounds=arguments.rounds)
        print_resume(corpus, rounds=arguments.rounds)
        print_state()
        name = "planning 100,000 shards"
        print(f"{name}: {1000 * best_of(arguments.rounds, {name: plan_epoch})[name]:.0f} ms")
        print_memory(corpus, read_mib=arguments.read_mib)


if __name__ == "__main__":
    main()
