"""Output of `txl inspect`: the contents of a corpus, a shard or a document, and the text that a lane reads at a step.

A lane is a row of the batch with its own token stream. Functions named `..._facts` return JSON values for programs, and
functions named `..._lines` turn these values into lines for the user. No function changes a file. For a damaged
document the damage is shown in place of its text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from txl_dist.console.formatting import counted, format_table, printable
from txl_dist.data.loader.corpus import Corpus
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.errors import ConfigError, DataError
from txl_dist.vocabulary_clusters import cluster_edges, cluster_shares

PREVIEW_LEN = 24
"""Number of tokens whose text is shown for each document in the list of a shard's documents."""

SORTED_ENOUGH = 0.9
"""Ids count as sorted by frequency if cluster 0 contains at least this fraction of the tokens that it would contain
with perfectly sorted ids."""

_COUNTED = ("documents", "tokens", "text_bytes", "text_characters", "longest")

_LABELS = {
    "held_out_duplicates": "train documents that are also in the validation or test split",
    "near_held_out_duplicates": "train documents near a document of the validation or test split",
    "near_threshold_pct": "similarity of near duplicates",
    "documents_cut": "documents cut to hold out their ends",
    "invalid_records_skipped": "invalid records left out (not JSON, or text missing, null, repeated or not a string)",
}
"""Labels of statistics whose keys do not explain themselves."""
_TEXT = "\n\t"
"""Control characters that are shown unchanged in a text: newline and tab."""


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """Return the splits, sizes and statistics of a corpus from its index, as JSON values.

    Raises DataError if the tokenizer cannot be read.
    """
    splits = {}
    for name, split in corpus.splits.items():
        values = {key: getattr(split, key) for key in _COUNTED}
        num_bytes = sum(shard.bytes for shard in split.shards)
        splits[name] = {**values, "shards": len(split.shards), "bytes": num_bytes}
    return {
        "location": corpus.location,
        "fingerprint": corpus.fingerprint,
        "tokenizer": corpus.tokenizer.kind,
        "vocab_size": corpus.vocab_size,
        "end_of_text": corpus.end_of_text,
        "dtype": corpus.dtype.name,
        "splits": splits,
        "statistics": corpus.statistics,
    }


def corpus_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts of a corpus as lines for the user."""
    end = "none" if facts["end_of_text"] is None else f"id {facts['end_of_text']}"
    fingerprint = facts["fingerprint"][:16]
    rows = [["split", "documents", "tokens", "bytes/token", "mean", "longest", "shards", "MB on disk"]]
    for name, split in facts["splits"].items():
        bytes_per_token = split["text_bytes"] / max(split["tokens"], 1)
        mean_len = split["tokens"] / max(split["documents"], 1)
        megabytes = split["bytes"] / 1e6
        rows.append(
            [
                name,
                f"{split['documents']:,}",
                f"{split['tokens']:,}",
                f"{bytes_per_token:.3f}",
                f"{mean_len:,.0f}",
                f"{split['longest']:,}",
                f"{split['shards']:,}",
                f"{megabytes:,.1f}",
            ]
        )
    lines = [
        f"{facts['location']}: {facts['vocab_size']:,} ids as {facts['dtype']} ({facts['tokenizer']}), end-of-text: "
        f"{end}, data fingerprint {fingerprint}"
    ]
    lines += format_table(rows)
    return lines + statistics_lines(facts["statistics"])


def statistics_lines(statistics: Mapping[str, int]) -> list[str]:
    """Return the counts of a preparation as lines for the user. Counts of 0 are left out, except of dropped near
    duplicates."""
    lines = []
    for key, count in statistics.items():
        name = _LABELS.get(key, key.replace("_", " "))
        if key == "near_threshold_pct":
            lines.append(f"{name}: {count / 100:.2f} or more")
        elif count or key == "near_duplicates_dropped":
            lines.append(f"{name}: {count:,}")
    return lines


def cluster_facts(split: Split, cutoffs: Sequence[int]) -> dict[str, Any]:
    """Return the share of a split's tokens in each cluster of ids, as adaptive softmax would divide them by `cutoffs`.

    Raises ConfigError if the cutoffs do not fit the vocabulary, DataError if the counts of ids cannot be read.
    """
    counts = split.counts()
    edges = cluster_edges(cutoffs, vocab_size=len(counts))
    shares = cluster_shares(counts, edges)
    descending = np.sort(counts)[::-1]
    best_head, *_ = cluster_shares(descending, edges)
    clusters = []
    for (first, end), share in zip(itertools.pairwise(edges), shares, strict=True):
        clusters.append({"first": first, "end": end, "share": float(share)})
    return {"split": split.name, "cutoffs": list(cutoffs), "clusters": clusters, "best_head": best_head}


def cluster_lines(facts: dict[str, Any]) -> list[str]:
    """Return the shares of the clusters as lines for the user, with the flag --model.cutoffs for a training run."""
    rows = [["cluster", "ids from", "to", "number", f"share of {facts['split']}"]]
    for number, cluster in enumerate(facts["clusters"]):
        first = cluster["first"]
        last = cluster["end"] - 1
        count = cluster["end"] - first
        percent = 100 * cluster["share"]
        rows.append([str(number), f"{first:,}", f"{last:,}", f"{count:,}", f"{percent:.2f} %"])
    cutoffs = " ".join(str(cutoff) for cutoff in facts["cutoffs"])
    lines = [*format_table(rows), "", f"--model.cutoffs {cutoffs}".rstrip()]
    head = facts["clusters"][0]["share"]
    best = facts["best_head"]
    if head < SORTED_ENOUGH * best:
        lines.append(
            f"the ids are not in order of frequency, so cutoffs save little. If the ids were in order, cluster 0 would "
            f"contain {100 * best:.2f} % of {facts['split']}"
        )
    return lines


def find_shard(corpus: Corpus, name: str) -> tuple[Split, int]:
    """Return (split that contains the shard, index of the shard in the split).

    Raises DataError that lists the shards of the corpus if there is no shard of this name.
    """
    if name.lower().endswith(".tar"):
        wanted = name
    else:
        wanted = f"{name}.tar"
    names = []
    for split in corpus.splits.values():
        for index, shard in enumerate(split.shards):
            if shard.name == wanted:
                return split, index
            names.append(shard.name)
    if len(names) > 6:
        names = [*names[:5], "...", names[-1]]
    shown = ", ".join(names)
    raise DataError(
        f"corpus {corpus.location} has no shard {wanted!r}. Its shards are {shown}. Name one of these shards."
    )


def shard_facts(split: Split, index: int, *, max_documents: int) -> dict[str, Any]:
    """Return the first `max_documents` documents of a shard as JSON values, each with the beginning of its text.

    A damaged document has a description of the damage in place of the text. Raises DataError if the shard or the
    tokenizer cannot be read.
    """
    shard = split.open_shard(index)
    tokenizer = split.corpus.tokenizer
    documents: list[dict[str, Any]] = []
    for number in range(min(len(shard.lengths), max_documents)):
        document: dict[str, Any] = {
            "document": number,
            "tokens": int(shard.lengths[number]),
            "offset": int(shard.offsets[number]),
        }
        try:
            first_ids = shard.document(number)[:PREVIEW_LEN].tolist()
            document["text"] = tokenizer.decode(first_ids)
        except DataError as error:
            document["damage"] = str(error)
        documents.append(document)
    facts = split.shards[index]._asdict()
    num_documents = facts.pop("documents")
    return {**facts, "num_documents": num_documents, "documents": documents}


def shard_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts of a shard as lines for the user."""
    rows = [["document", "tokens", "offset", "begins"]]
    for document in facts["documents"]:
        if "damage" in document:
            text = document["damage"]
        else:
            words = document["text"].split()
            text = printable(" ".join(words))
        rows.append([f"{document['document']:,}", f"{document['tokens']:,}", f"{document['offset']:,}", text])
    num_documents = counted(facts["num_documents"], "document")
    num_tokens = counted(facts["tokens"], "token")
    num_bytes = counted(facts["bytes"], "byte")
    lines = [f"{facts['name']}: {num_documents}, {num_tokens}, {num_bytes}", *format_table(rows)]
    num_others = facts["num_documents"] - len(facts["documents"])
    if num_others:
        lines.append(f"... and {num_others:,} more")
    return lines


def document_facts(split: Split, index: int, document: int, *, max_tokens: int) -> dict[str, Any]:
    """Return one document of a shard as JSON values, with the text of its first `max_tokens` tokens.

    Raises DataError if there is no such document, or if the document is damaged.
    """
    shard = split.open_shard(index)
    if not 0 <= document < len(shard.lengths):
        raise DataError(
            f"{shard.name} has no document {document}. The shard has {len(shard.lengths):,} documents, counted from 0. "
            f"Name one of these documents."
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
    """Return the facts of a document as lines for the user."""
    num_shown = len(facts["ids"])
    num_tokens = counted(facts["tokens"], "token")
    rest = f", the first {num_shown:,}:" if num_shown < facts["tokens"] else ":"
    head = f"{facts['shard']}, document {facts['document']}: {num_tokens}{rest}"
    return [head, printable(facts["text"], keep=_TEXT)]


def lane_facts(splits: Sequence[Split], state: StreamState, segment_len: int, *, lane: int) -> dict[str, Any]:
    """Return the next training segment of a lane (row of the batch) at `state`, as JSON values.

    The segment consists of pieces of documents, each with its place in the corpus and its text. `splits` are the
    training splits of the corpora of `state`. Raises ConfigError if there is no such lane, DataError if a document is
    damaged.
    """
    if not 0 <= lane < state.num_lanes:
        raise ConfigError(
            f"there is no lane {lane}: the lanes are 0 to {state.num_lanes - 1}. Name one of these lanes."
        )
    stream = LaneStream(splits, state, segment_len=segment_len, lanes=range(lane, lane + 1))
    tokenizer = splits[0].corpus.tokenizer  # all splits have the same one
    ids = stream.segment_at(state).tokens[0]
    pieces: list[dict[str, Any]] = []
    filled = 0
    corpus = 0
    while filled < segment_len:
        corpus, stretch = stream.stretch_at(lane, state.advanced(filled))
        length = min(stretch.length, segment_len - filled)
        piece_ids = ids[filled : filled + length].tolist()
        pieces.append(
            {
                "first": filled,
                "tokens": length,
                "epoch": stretch.epoch,
                "shard": splits[corpus].shards[stretch.shard].name,
                "document": stretch.document,
                "offset": stretch.offset,
                "text": tokenizer.decode(piece_ids),
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
    """Return the facts of a lane as lines for the user: a table of the pieces, then the text of each piece."""
    keys = ("first", "tokens", "epoch", "shard", "document", "offset")
    rows = [["token", *keys[1:]]]
    for piece in facts["pieces"]:
        row = [piece[key] if key == "shard" else f"{piece[key]:,}" for key in keys]
        rows.append(row)
    lines = [
        f"lane {facts['lane']} reads {facts['corpus']} ({facts['split']}) from its token {facts['position']:,} on, "
        "counted since the corpus was divided among the lanes:"
    ]
    lines += format_table(rows)
    for piece in facts["pieces"]:
        text = printable(piece["text"], keep=_TEXT)
        lines.append(f"[{piece['first']:,}] {text}")
    return lines
