"""What the lanes of a run read at a step, for `txl inspect`: from its configuration and its checkpoints alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from txl_dist.config import load_config
from txl_dist.data.corpus import Split
from txl_dist.data.stream import LaneStream, StreamState
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.train.checkpoint import continued_stream, list_checkpoints, read_state, step_of
from txl_dist.train.job import first_stream, open_corpora, train_splits


def stream_before_step(run_dir: Path, step: int) -> tuple[tuple[Split, ...], StreamState, int]:
    """(splits, where the stream was when a step began, tokens per lane and step). Step 1 is the first.

    The lanes of a run may have been cut anew and its segments have got another length. The newest checkpoint before
    the step knows where they were; the settings are those of the checkpoint behind it, else of the run.
    Raises TxlError if the corpora of the run are not there, ConfigError for a step below 1.
    """
    if step < 1:
        raise ConfigError(f"there is no step {step}: 1 is the first. Name the step as the log does.")
    checkpoints = list_checkpoints(run_dir)
    before = [folder for folder in checkpoints if step_of(folder) < step]
    behind = [folder for folder in checkpoints if step_of(folder) >= step]
    config = load_config((behind[0] if behind else run_dir) / "config.toml")
    corpora = open_corpora(config)
    splits = train_splits(config, corpora)
    state, start = first_stream(config, corpora), 0
    if before:
        state, _ = continued_stream(before[-1], state, splits)
        start = read_state(before[-1])["step"]
    segment_len = config.train.segment_len
    if behind:
        saved = StreamState.from_dict(read_state(behind[0])["stream"])
        state = state.skipping(saved, saved)  # the run may have come back to `before` and left out what went wrong
        reached = state.advanced((step_of(behind[0]) - start) * segment_len)
        if [(one.cut(), one.position) for one in reached.corpora] != [
            (one.cut(), one.position) for one in saved.corpora
        ]:
            raise CheckpointError(
                f"which lanes step {step} had is not known: they were cut anew before {behind[0].name}, and the "
                f"checkpoint from before that is gone. Name a step behind {step_of(behind[0])}."
            )
    return splits, state.advanced((step - 1 - start) * segment_len), segment_len


def documents_at(splits: Sequence[Split], state: StreamState, lanes: range) -> list[str]:
    """What lanes read at a state, for people: a document each."""
    stream = LaneStream(splits, state, segment_len=1, lanes=lanes)
    found = []
    for lane in lanes:
        number, stretch = stream.stretch_at(lane, state)
        corpus = splits[number].corpus
        found.append(
            f"lane {lane}: {splits[number].shards[stretch.shard].name} of {corpus.name}, document {stretch.document}, "
            f"token {stretch.offset}"
        )
    return found
