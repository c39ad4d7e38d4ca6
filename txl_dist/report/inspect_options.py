"""Options of `txl inspect`. This module imports little, because the command line makes its flags from these options."""

from __future__ import annotations

from dataclasses import dataclass

from txl_dist.artifacts import ArtifactKind
from txl_dist.console.formatting import flag_of
from txl_dist.errors import ConfigError

_FOR_CORPORA = ("shard", "cutoffs", "num_clusters", "num_lanes", "segment_len", "seed")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Selection of facts about a corpus, a run or a checkpoint. The default options select a summary."""

    split: str = "train"
    """Split of a corpus to inspect with --cutoffs, --num-clusters or --lane."""
    cutoffs: tuple[int, ...] = ()
    """Show the share of the tokens in each vocabulary cluster for these cutoffs."""
    num_clusters: int = 0
    """Compute the cutoffs with which this number of vocabulary clusters needs the least work per token, and show the
    share of the tokens in each cluster."""
    width: int = 512
    """Embedding width of the most frequent ids, for --num-clusters."""
    div_value: int = 1
    """Divisor of embedding widths for --num-clusters: cluster i has the embedding width `width // div_value**i`."""
    shard: str = ""
    """List the documents of the shard with this name."""
    document: int = -1
    """Show the document with this number in --shard, counted from 0."""
    max_tokens: int = 500
    """Maximum number of tokens of a document to show."""
    max_documents: int = 1000
    """Maximum number of documents of a shard, or of parameters of a checkpoint, to list."""
    lane: int = -1
    """Show what the lane (batch row) with this number reads at --step: corpus, epoch, shard, document, offset, text."""
    step: int = 1
    """Step for --lane, counted from 1 as in the log of a run."""
    num_lanes: int = 0
    """Number of lanes (batch rows) into which a corpus is divided, for --lane. 0: the default of
    train.num_lanes."""
    segment_len: int = 0
    """Number of tokens that a lane reads per step, for --lane on a corpus. 0: the default of train.segment_len."""
    seed: int = 0
    """Seed of the order in which the documents of a corpus are read, for --lane. 0: the default of run.seed."""
    cache_dir: str = ""
    """Folder that caches whole shards of a corpus at a URL. Without it, only the needed byte ranges are read."""
    allow_protocols: tuple[str, ...] = ()
    """Additional URL schemes to allow. `pipe` allows locations that run shell commands."""

    def check(self, path: str, kind: ArtifactKind) -> None:
        """Raise ConfigError for flags that contradict each other, or that have no meaning for this kind of path."""
        if self.document >= 0 and not self.shard:
            raise ConfigError(
                f"--document {self.document} is the number of a document within a shard. Name the shard with `--shard`."
            )
        if self.lane >= 0 and self.step < 1:
            raise ConfigError(
                f"--step {self.step}: the first step is 1. Give the number of a step as the log prints it."
            )
        if self.num_clusters and self.cutoffs:
            raise ConfigError("--num-clusters and --cutoffs both set the cutoffs. Use only one of these flags.")
        if kind is not ArtifactKind.CORPUS and any(getattr(self, name) for name in _FOR_CORPORA):
            raise ConfigError(
                f"{path} is {kind.value}, which already contains the number of lanes and the seed. Remove "
                f"{', '.join(flag_of(name) for name in _FOR_CORPORA)}, or inspect the corpus that this run reads."
            )
        if kind is ArtifactKind.CHECKPOINT and self.lane >= 0:
            raise ConfigError(
                f"{path} is a checkpoint. To see what a lane reads, name the run directory of this checkpoint."
            )
