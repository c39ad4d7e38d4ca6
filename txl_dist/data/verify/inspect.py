"""`txl inspect`: what is in a corpus, in a shard, in a document, and what a lane reads at a step.

Each question has a function that gives facts (JSON values, for programs) and one that turns them into lines for
people. Nothing here changes a file; what is damaged is shown as damaged, beside the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_dist.console.formatting import counted, format_table, printable
from txl_dist.data.loader.corpus import Corpus, Split
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.errors import ConfigError, DataError
from txl_dist.vocabulary_clusters import cluster_edges, cluster_shares

PREVIEW_LEN = 24
"""Tokens of a document that a list shows."""

SORTED_ENOUGH = 0.9
"""Of the share that the most frequent ids have, cluster 0 should have so much."""

_COUNTED = ("documents", "tokens", "text_bytes", "text_characters", "longest")

_TEXT = "\n\t"
"""Of what steers a terminal, what a text may keep."""


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """Splits, sizes and statistics, from the index alone. Raises DataError if the tokenizer cannot be read."""
    return {
        "location": corpus.location,
        "fingerprint": corpus.fingerprint,
        "tokenizer": corpus.tokenizer.kind,
        "vocab_size": corpus.vocab_size,
        "end_of_text": corpus.end_of_text,
        "dtype": corpus.dtype.name,
        "splits": {
            name: {
                **{key: getattr(split, key) for key in _COUNTED},
                "shards": len(split.shards),
                "bytes": sum(shard.bytes for shard in split.shards),
            }
            for name, split in corpus.splits.items()
        },
        "statistics": corpus.statistics,
    }


def corpus_lines(facts: dict[str, Any]) -> list[str]:
    """For people."""
    end = "none" if facts["end_of_text"] is None else f"id {facts['end_of_text']}"
    rows = [["split", "documents", "tokens", "bytes/token", "mean", "longest", "shards", "MB on disk"]]
    for name, split in facts["splits"].items():
        rows.append(
            [
                name,
                f"{split['documents']:,}",
                f"{split['tokens']:,}",
                f"{split['text_bytes'] / max(split['tokens'], 1):.3f}",
                f"{split['tokens'] / max(split['documents'], 1):,.0f}",
                f"{split['longest']:,}",
                f"{split['shards']:,}",
                f"{split['bytes'] / 1e6:,.1f}",
            ]
        )
    return [
        f"{facts['location']}: {facts['vocab_size']:,} ids as {facts['dtype']} ({facts['tokenizer']}), end-of-text: "
        f"{end}, data fingerprint {facts['fingerprint'][:16]}",
        *format_table(rows),
        *(f"{key.replace('_', ' ')}: {count:,}" for key, count in facts["statistics"].items() if count),
    ]


def cluster_facts(split: Split, cutoffs: Sequence[int]) -> dict[str, Any]:
    """Tokens of the split per cluster. Raises ConfigError for cutoffs that do not fit, DataError for lost counts."""
    counts = split.counts()
    edges = cluster_edges(cutoffs, vocab_size=len(counts))
    shares = cluster_shares(counts, edges)
    best_head, *_ = cluster_shares(np.sort(counts)[::-1], edges)
    clusters = [
        {"first": first, "end": end, "share": float(share)}
        for (first, end), share in zip(itertools.pairwise(edges), shares, strict=True)
    ]
    return {"split": split.name, "cutoffs": list(cutoffs), "clusters": clusters, "best_head": best_head}


def cluster_lines(facts: dict[str, Any]) -> list[str]:
    """For people, with the flag to train with."""
    rows = [["cluster", "ids from", "to", "number", f"share of {facts['split']}"]]
    for number, one in enumerate(facts["clusters"]):
        first, end = one["first"], one["end"]
        rows.append([str(number), f"{first:,}", f"{end - 1:,}", f"{end - first:,}", f"{100 * one['share']:.2f} %"])
    lines = [*format_table(rows), "", " ".join(["--model.cutoffs", *map(str, facts["cutoffs"])])]
    head, best = facts["clusters"][0]["share"], facts["best_head"]
    if head < SORTED_ENOUGH * best:
        lines.append(
            f"the ids are not in the order of their frequency, so cutoffs bring little: as many of the most frequent "
            f"ids as are in cluster 0 have {100 * best:.2f} % of {facts['split']}"
        )
    return lines


def find_shard(corpus: Corpus, name: str) -> tuple[Split, int]:
    """The split and the number of a shard. Raises DataError naming the shards that there are."""
    wanted = name if name.lower().endswith(".tar") else f"{name}.tar"
    known = [(split, index, shard.name) for split in corpus.splits.values() for index, shard in enumerate(split.shards)]
    for split, index, shard in known:
        if shard == wanted:
            return split, index
    names = [shard for _, _, shard in known]
    shown = ", ".join(names if len(names) <= 6 else [*names[:5], "...", names[-1]])
    raise DataError(f"corpus {corpus.location} has no shard {wanted!r}; it has {shown}. Name one of these.")


def shard_facts(split: Split, index: int, *, max_documents: int) -> dict[str, Any]:
    """The first documents of a shard, each with its first text, or with what is wrong with it. Raises DataError."""
    shard, tokenizer = split.open_shard(index), split.corpus.tokenizer
    documents: list[dict[str, Any]] = []
    for document in range(min(len(shard.lengths), max_documents)):
        one: dict[str, Any] = {"document": document, "tokens": int(shard.lengths[document])}
        one["offset"] = int(shard.offsets[document])
        try:
            one["text"] = tokenizer.decode(shard.document(document)[:PREVIEW_LEN].tolist())
        except DataError as error:
            one["damage"] = str(error)
        documents.append(one)
    facts = split.shards[index]._asdict()
    return facts | {"num_documents": facts.pop("documents"), "documents": documents}


def shard_lines(facts: dict[str, Any]) -> list[str]:
    """For people."""
    rows = [["document", "tokens", "offset", "begins"]]
    for one in facts["documents"]:
        text = one["damage"] if "damage" in one else printable(" ".join(one["text"].split()))
        rows.append([f"{one['document']:,}", f"{one['tokens']:,}", f"{one['offset']:,}", text])
    rest = facts["num_documents"] - len(facts["documents"])
    return [
        f"{facts['name']}: {counted(facts['num_documents'], 'document')}, "
        f"{counted(facts['tokens'], 'token')}, {counted(facts['bytes'], 'byte')}",
        *format_table(rows),
        *([f"... and {rest:,} more"] if rest else []),
    ]


def document_facts(split: Split, index: int, document: int, *, max_tokens: int) -> dict[str, Any]:
    """One document, decoded up to `max_tokens` of it. Raises DataError if there is no such one, or it is damaged."""
    shard = split.open_shard(index)
    if not 0 <= document < len(shard.lengths):
        raise DataError(
            f"{shard.name} has no document {document}; it has {len(shard.lengths):,}, from 0 on. Name one of these."
        )
    ids = shard.document(document)[:max_tokens].tolist()
    return {
        "shard": split.shards[index].name,
        "document": document,
        "tokens": int(shard.lengths[document]),
        "offset": int(shard.offsets[document]),
        "ids": ids,
        "text": split.corpus.tokenizer.decode(ids),
    }


def document_lines(facts: dict[str, Any]) -> list[str]:
    """For people."""
    shown = len(facts["ids"])
    rest = f", the first {shown:,}:" if shown < facts["tokens"] else ":"
    head = f"{facts['shard']}, document {facts['document']}: {counted(facts['tokens'], 'token')}{rest}"
    return [head, printable(facts["text"], keep=_TEXT)]


def lane_facts(splits: Sequence[Split], state: StreamState, segment_len: int, *, lane: int) -> dict[str, Any]:
    """The segment that a lane is trained on next at a state: where each piece of it lies, and its text.

    `splits` are those of the state. Raises ConfigError if there is no such lane, DataError for damage.
    """
    if not 0 <= lane < state.num_lanes:
        raise ConfigError(f"there is no lane {lane}: the lanes are 0 to {state.num_lanes - 1}. Name one of these.")
    stream = LaneStream(splits, state, segment_len=segment_len, lanes=range(lane, lane + 1))
    tokenizer = splits[0].corpus.tokenizer  # that of all of them
    ids = stream.segment_at(state).tokens[0]
    pieces: list[dict[str, Any]] = []
    filled, corpus = 0, 0
    while filled < segment_len:
        corpus, stretch = stream.stretch_at(lane, state.advanced(filled))
        length = min(stretch.length, segment_len - filled)
        pieces.append(
            {
                "first": filled,
                "tokens": length,
                "epoch": stretch.epoch,
                "shard": splits[corpus].shards[stretch.shard].name,
                "document": stretch.document,
                "offset": stretch.offset,
                "text": tokenizer.decode(ids[filled : filled + length].tolist()),
            }
        )
        filled += length
    return {
        "lane": lane,
        "corpus": splits[corpus].corpus.location,
        "split": splits[corpus].name,
        "position": state.corpora[corpus].position,
        "pieces": pieces,
        "target": int(ids[-1]),
    }


def lane_lines(facts: dict[str, Any]) -> list[str]:
    """For people: a table of the pieces, then their text."""
    keys = ("first", "tokens", "epoch", "shard", "document", "offset")
    rows = [["token", *keys[1:]]]
    rows += [[piece[key] if key == "shard" else f"{piece[key]:,}" for key in keys] for piece in facts["pieces"]]
    return [
        f"lane {facts['lane']} reads {facts['corpus']} ({facts['split']}) from its token {facts['position']:,} on, "
        "counted since the lanes were cut:",
        *format_table(rows),
        *(f"[{piece['first']:,}] {printable(piece['text'], keep=_TEXT)}" for piece in facts["pieces"]),
    ]
