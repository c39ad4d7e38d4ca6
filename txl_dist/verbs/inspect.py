"""The verb that looks into corpora, lanes, runs and checkpoints: each kind of question gives facts and lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional

from txl_dist.console import say
from txl_dist.errors import ConfigError
from txl_dist.run_files import Kind, require

if TYPE_CHECKING:
    from txl_dist.data.read.corpus import Corpus

Answer = tuple[dict[str, Any], list[str]]
"""(facts for programs, lines for people)."""


@dataclass(frozen=True)
class Question:
    """The flags of `txl inspect`."""

    path: Positional[str]
    """Folder or URL of a corpus; a run, with --lane too: it knows its corpora, lanes and seed; or a checkpoint."""
    split: str = "train"
    """Split of a corpus to look into, for clusters and lanes."""
    cutoffs: tuple[int, ...] = ()
    """Show the share of the tokens per cluster of these cutoffs."""
    num_clusters: int = 0
    """Compute the cutoffs of so many clusters that cost least, and show the same for them."""
    width: int = 512
    """Width of the embeddings of the most frequent ids, for --num-clusters."""
    div_value: int = 1
    """Cluster i has embeddings of width // div_value**i, for --num-clusters."""
    shard: str = ""
    """List the documents of this shard."""
    document: int = -1
    """Show this document of --shard, counted from 0."""
    max_tokens: int = 500
    """Most tokens of a document to show."""
    max_documents: int = 1000
    """Most documents of a shard, or parameters of a checkpoint, to list."""
    lane: int = -1
    """Show what this lane reads at --step: corpus, epoch, shard, document, offset and text."""
    step: int = 1
    """Step as in the log of a run: 1 is the first."""
    num_lanes: int = 0
    """Lanes, for a corpus; 0 means the default of train.num_lanes."""
    segment_len: int = 0
    """Tokens per lane and step, for a corpus; 0 means the default of train.segment_len."""
    seed: int = 0
    """Seed of the run, for a corpus; 0 means the default of run.seed."""
    cache_dir: str = ""
    """Folder for whole shards of a corpus at a URL; empty reads ranges."""
    allow_protocols: tuple[str, ...] = ()
    """URL schemes to allow beyond the usual ones."""
    json: Path | None = None
    """Write the facts to this file too."""


def inspect(question: Annotated[Question, tyro.conf.arg(name="")]) -> None:
    """Look into a corpus, its clusters, a shard, a document, a run, a checkpoint, or what a lane reads at a step."""
    import json

    from txl_dist.files import write_output

    facts, lines = _answer(question)
    say("\n".join(lines))
    if question.json is not None:
        write_output(question.json, json.dumps(facts, indent=1).encode() + b"\n")


def _answer(question: Question) -> Answer:
    from txl_dist.data.read.corpus import open_corpus
    from txl_dist.sections import DataSection

    if question.document >= 0 and not question.shard:
        raise ConfigError(f"--document {question.document} is one of a shard. Name the shard with `--shard`.")
    if question.lane >= 0 and question.step < 1:
        raise ConfigError(f"there is no step {question.step}: 1 is the first. Name the step as the log does.")
    kind = require(question.path, Kind.CORPUS, Kind.RUN, Kind.CHECKPOINT)
    if kind is not Kind.CORPUS:
        return _run_or_checkpoint(question, Path(question.path), kind)
    settings = DataSection(cache_dir=question.cache_dir, allow_protocols=question.allow_protocols)
    corpus = open_corpus(question.path, settings)
    if question.lane >= 0:
        return _lane_of_corpus(question, corpus)
    return _shard(question, corpus) if question.shard else _corpus(question, corpus)


def _run_or_checkpoint(question: Question, folder: Path, kind: Kind) -> Answer:
    from txl_dist.data.check.inspect import lane_facts, lane_lines
    from txl_dist.ops import inspect_run as view

    for_corpora = ("shard", "cutoffs", "num_clusters", "num_lanes", "segment_len", "seed")
    if any(getattr(question, name) for name in for_corpora):
        raise ConfigError(
            f"{folder} is no corpus but {kind.value}, which knows its lanes and seed itself: leave out "
            f"{', '.join('--' + name.replace('_', '-') for name in for_corpora)}, or inspect the corpus that it reads."
        )
    if kind is Kind.CHECKPOINT:
        if question.lane >= 0:
            raise ConfigError(f"{folder} is a checkpoint: name the run that it is of to see what a lane reads.")
        facts = view.checkpoint_facts(folder)
        return facts, view.checkpoint_lines(facts, max_parameters=question.max_documents)
    if question.lane >= 0:
        facts = lane_facts(*view.stream_before_step(folder, question.step), lane=question.lane)
        return facts, lane_lines(facts)
    facts = view.run_facts(folder)
    return facts, view.run_lines(facts)


def _lane_of_corpus(question: Question, corpus: Corpus) -> Answer:
    from txl_dist.data.check.inspect import lane_facts, lane_lines
    from txl_dist.data.read.position import first_state
    from txl_dist.rng import derive_seed
    from txl_dist.sections import RunSection, TrainSection

    splits, train = [corpus.split(question.split)], TrainSection()
    seed = derive_seed(question.seed or RunSection().seed, "documents")
    start = first_state(splits, num_lanes=question.num_lanes or train.num_lanes, seed=seed)
    segment_len = question.segment_len or train.segment_len
    state = start.advanced((question.step - 1) * segment_len)
    facts = lane_facts(splits, state, segment_len, lane=question.lane)
    return facts, lane_lines(facts)


def _shard(question: Question, corpus: Corpus) -> Answer:
    from txl_dist.data.check import inspect as view

    split, index = view.find_shard(corpus, question.shard)
    if question.document < 0:
        facts = view.shard_facts(split, index, max_documents=question.max_documents)
        return facts, view.shard_lines(facts)
    facts = view.document_facts(split, index, question.document, max_tokens=question.max_tokens)
    return facts, view.document_lines(facts)


def _corpus(question: Question, corpus: Corpus) -> Answer:
    from txl_dist.data.check import inspect as view
    from txl_dist.text.clusters import best_cutoffs

    facts = view.corpus_facts(corpus)
    lines = view.corpus_lines(facts)
    cutoffs = question.cutoffs
    if question.num_clusters and cutoffs:
        raise ConfigError("--num-clusters computes the cutoffs that --cutoffs gives. Leave one of them out.")
    if question.num_clusters:
        counts = corpus.split(question.split).counts()
        cutoffs = best_cutoffs(
            counts, num_clusters=question.num_clusters, width=question.width, div_value=question.div_value
        )
    if cutoffs:
        facts["clusters"] = view.cluster_facts(corpus.split(question.split), cutoffs)
        lines += ["", *view.cluster_lines(facts["clusters"])]
    if question.num_clusters:
        lines.append("These cost least work per token; wider clusters, as in the papers' recipes, cost less loss.")
    return facts, lines
