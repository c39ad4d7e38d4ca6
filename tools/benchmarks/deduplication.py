"""Measure `txl prepare --near-duplicates drop`: what it finds, what it costs, and the packages that compute signatures.

    python -m tools.benchmarks.deduplication TEXT.jsonl [...] [--documents 2000] [--megabytes 64] [--rounds 3]
    python -m tools.benchmarks.deduplication TEXT.jsonl --documents 40 --megabytes 0.1 --rounds 1 --vocab-size 300

A line of a file is a JSON object with a `text`. The texts are cut into passages of 100 to 600 words. A quarter of the
documents are edited copies of other passages: up to a tenth of the words is replaced, left out or added.

    packages  rensa, and datasketch if installed: text per CPU second, and the error of the estimated similarity
    quality   documents that were dropped, compared with those that an exact comparison of all pairs drops
    cost      CPU seconds of the whole preparation with one worker, and of the search in it, best of the rounds
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from tools.benchmarks.measuring import announced, positive
from tools.benchmarks.prepare import learn, read_texts, write
from txl_dist.errors import TxlError

THRESHOLDS = (0.7, 0.8, 0.9)
NUM_HASHES = 128
SHARE_OF_COPIES = 0.25

Runs = npt.NDArray[np.uint64]
"""Distinct hashes of the runs of a document, sorted."""


def main() -> None:
    """Measure the packages, the quality and the cost, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="file of JSON lines, each with a text")
    parser.add_argument("--documents", type=positive, default=2000, help="documents whose pairs are all compared")
    parser.add_argument("--megabytes", type=float, default=64.0, help="megabytes of text for the cost")
    parser.add_argument("--rounds", type=positive, default=3, help="timed runs of each variant")
    parser.add_argument("--vocab-size", type=int, default=16_384, help="vocabulary size of the tokenizer")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    texts = read_texts(arguments.files, num_bytes=int(arguments.megabytes * 1e6))
    documents = with_copies(texts, random.Random(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = learn(texts, folder, vocab_size=arguments.vocab_size)
        some = list(dict.fromkeys(documents[: arguments.documents]))
        tokens = encoded(some, tokenizer)
        runs = [distinct_runs(document) for document in tokens]
        pairs = similar_pairs(runs)
        measure_packages(runs, pairs, num_bytes=sum(len(document.encode()) for document in some))
        measure_quality(some, tokens, pairs, folder, tokenizer)
        measure_cost(documents, folder, tokenizer, rounds=arguments.rounds)


def with_copies(texts: list[str], generator: random.Random) -> list[str]:
    """Return passages of the texts, of which `SHARE_OF_COPIES` are edited copies of the passage before them."""
    documents = []
    for text in texts:
        words = text.split(" ")
        begin = 0
        while begin < len(words):
            passage = words[begin : begin + generator.randint(100, 600)]
            begin += len(passage)
            documents.append(" ".join(passage))
            if generator.random() < SHARE_OF_COPIES / (1 - SHARE_OF_COPIES):
                documents.append(" ".join(edited(passage, generator)))
    return documents


def edited(words: list[str], generator: random.Random) -> list[str]:
    """Return a copy in which up to a tenth of the words, from 0.1 % on, is replaced, left out or added."""
    share = 10 ** generator.uniform(-3, -1)
    copy = []
    for word in words:
        if generator.random() >= share:
            copy.append(word)
            continue
        other = generator.choice(words)
        copy += generator.choice([[other], [], [word, other]])
    return copy


def encoded(documents: list[str], tokenizer_file: Path) -> list[npt.NDArray[Any]]:
    """Return the token ids of the documents."""
    from txl_dist.tokenizers.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer_file).encode_batch(documents)


def distinct_runs(document: npt.NDArray[Any]) -> Runs:
    """Return the distinct hashes of a document's runs."""
    from txl_dist.data.prepare.duplicates import hashed_runs, run_len_of

    hashes = [part for _, part in hashed_runs([document], run_len=run_len_of("bpe"), chunk=1 << 20)]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]))


def measure_packages(runs: list[Runs], pairs: dict[tuple[int, int], float], *, num_bytes: int) -> None:
    """Print speed and error of the packages that are installed. Hashing the runs is not part of the time."""
    print(f"packages: {len(runs):,} documents, {num_bytes / 1e6:.1f} MB, {len(pairs):,} pairs that share a run")
    signers: dict[str, Callable[[list[Runs]], npt.NDArray[Any]]] = {"rensa": rensa_signatures}
    if importlib.util.find_spec("datasketch") is not None:
        signers["datasketch"] = datasketch_signatures
    for name, signer in signers.items():
        begin = time.process_time()
        signatures = signer(runs)
        seconds = time.process_time() - begin
        errors = [(signatures[a] == signatures[b]).mean() - exact for (a, b), exact in pairs.items() if exact > 0.3]
        rms = float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0
        rate = num_bytes / max(seconds, 1e-9) / 1e6
        print(f"  {name:<12} {rate:8.1f} MB per CPU second   rms error of similarities above 0.3: {rms:.4f}")


def rensa_signatures(runs: list[Runs]) -> npt.NDArray[Any]:
    """Return signatures by rensa: [documents, hashes]."""
    import rensa

    borders = np.cumsum([0, *(len(hashes) for hashes in runs)]).astype(np.uint64)
    flat = np.concatenate(runs)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(flat, borders, NUM_HASHES, 1)
    return np.array(matrix.to_rows(), dtype=np.uint32)


def datasketch_signatures(runs: list[Runs]) -> npt.NDArray[Any]:
    """Return signatures by datasketch, which gets our hashes instead of computing its own: [documents, hashes]."""
    import datasketch

    empty = datasketch.MinHash(num_perm=NUM_HASHES)
    signatures = []
    for hashes in runs:
        signature = datasketch.MinHash(
            num_perm=NUM_HASHES, hashfunc=lambda hashed: hashed, permutations=empty.permutations, scheme=empty.scheme
        )
        low_bits = hashes & np.uint64(0xFFFFFFFF)
        signature.update_batch(low_bits.tolist())
        signatures.append(signature.hashvalues)
    return np.array(signatures)


def similar_pairs(runs: list[Runs]) -> dict[tuple[int, int], float]:
    """Return the exact Jaccard similarity of all pairs of documents that share a run."""
    lengths = np.array([len(hashes) for hashes in runs])
    owners = np.repeat(np.arange(len(runs)), lengths)
    flat = np.concatenate(runs)
    order = np.argsort(flat, kind="stable")
    borders = np.flatnonzero(np.diff(flat[order])) + 1
    num_common = np.zeros((len(runs), len(runs)), dtype=np.int32)
    for sharing in np.split(owners[order], borders):
        if len(sharing) > 1:
            num_common[np.ix_(sharing, sharing)] += 1
    pairs = {}
    for first, second in zip(*np.nonzero(np.triu(num_common, 1)), strict=True):
        common = int(num_common[first, second])
        union = int(lengths[first] + lengths[second]) - common
        pairs[int(first), int(second)] = common / union
    return pairs


def measure_quality(
    documents: list[str],
    tokens: list[npt.NDArray[Any]],
    pairs: dict[tuple[int, int], float],
    folder: Path,
    tokenizer: Path,
) -> None:
    """Print precision and recall of the dropped documents for several thresholds."""
    source = folder / "some.jsonl"
    write(source, documents)
    print(f"quality: {len(documents):,} documents, all pairs compared exactly")
    for threshold in THRESHOLDS:
        expected = later_members(len(documents), [pair for pair, exact in pairs.items() if exact >= threshold])
        prepare(source, folder, tokenizer, near_duplicates="drop", near_threshold=threshold)
        dropped = missing_documents(tokens, folder / "corpus")
        num_right = len(expected & dropped)
        precision = num_right / max(len(dropped), 1)
        recall = num_right / max(len(expected), 1)
        print(
            f"  threshold {threshold:.2f}: {len(dropped):,} dropped, {len(expected):,} expected, "
            f"precision {precision:.3f}, recall {recall:.3f}"
        )


def later_members(count: int, links: list[tuple[int, int]]) -> set[int]:
    """Return all numbers below `count` except the first of each connected component."""
    first = list(range(count))
    for a, b in links:
        one, other = first_of(first, a), first_of(first, b)
        first[max(one, other)] = min(one, other)
    return {number for number in range(count) if first[number] != number}


def first_of(first: list[int], number: int) -> int:
    """Follow `first` from a number to the first member of its component."""
    while first[number] != number:
        number = first[number]
    return number


def missing_documents(tokens: list[npt.NDArray[Any]], corpus: Path) -> set[int]:
    """Return the numbers of the documents whose tokens are not in the train split of a corpus. Removes the corpus."""
    from txl_dist.data.loader.corpus import open_corpus

    documents = open_corpus(corpus).split("train").each_document()
    kept = {document[:-1].astype(np.int64).tobytes() for document in documents}
    shutil.rmtree(corpus)
    return {number for number, ids in enumerate(tokens) if ids.astype(np.int64).tobytes() not in kept}


def measure_cost(documents: list[str], folder: Path, tokenizer: Path, *, rounds: int) -> None:
    """Print CPU seconds of a preparation that drops near duplicates, and of the search in it."""
    from txl_dist.data.prepare import merge, tokenize

    source = folder / "all.jsonl"
    num_bytes = write(source, documents)
    best: dict[str, float] = {}
    for _ in announced(range(1, rounds + 1), what="round"):
        seconds = {"whole": 0.0, "sign": 0.0, "band_table": 0.0, "find_near": 0.0}
        with ExitStack() as patches:
            for module, name in ((tokenize, "sign"), (tokenize, "band_table"), (merge, "find_near")):
                function = timed(getattr(module, name), name, seconds)
                patches.enter_context(patch.object(module, name, function))
            timed(prepare, "whole", seconds)(source, folder, tokenizer, near_duplicates="drop")
        shutil.rmtree(folder / "corpus")
        best = {name: min(spent, best.get(name, spent)) for name, spent in seconds.items()}
    print(f"cost: {num_bytes / 1e6:.1f} MB of text in {len(documents):,} documents, 1 worker, best of {rounds}")
    for name, spent in best.items():
        print(f"  {name:<12} {spent:8.2f} CPU seconds   {spent / (num_bytes / 1e9):7.1f} per GB")


def timed(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """Return a function that calls `function`, and adds its CPU seconds to `seconds[name]`."""

    def call(*arguments: Any, **settings: Any) -> Any:
        begin = time.process_time()
        result = function(*arguments, **settings)
        seconds[name] += time.process_time() - begin
        return result

    return call


def prepare(source: Path, folder: Path, tokenizer_file: Path, **settings: Any) -> None:
    """Prepare a corpus with one worker."""
    from txl_dist.data.prepare.run import prepare_corpus

    given: dict[str, Any] = {"inputs": [source], "tokenizer_path": tokenizer_file, "valid_fraction": 0.0}
    prepare_corpus(folder / "corpus", **given, **settings, num_workers=1)


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"deduplication: {error}")
