"""`txl inspect RUN --lane L --step K` shows what that step trained on, also after lanes were cut anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import random_texts, tiny_corpus
from txl_dist.cli import main
from txl_dist.config import Config, config_from_dict, config_to_toml
from txl_dist.data.inspect import lane_facts
from txl_dist.data.position import StreamState, continued
from txl_dist.data.stream import LaneStream
from txl_dist.errors import ConfigError
from txl_dist.train.checkpoint import FORMAT_VERSION, checkpoint_folder
from txl_dist.train.inspection import stream_before_step
from txl_dist.train.job import first_stream, open_corpora, train_splits


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, of one tokenizer, to be mixed."""
    folder = tmp_path_factory.mktemp("corpora")
    first = tiny_corpus(folder, name="first", texts=random_texts(count=80))
    second = tiny_corpus(
        folder,
        name="second",
        texts=random_texts(count=60, seed=7),
        kind="auto",
        tokenizer_path=first.folder / "tokenizer.json",
    )
    return [first.folder, second.folder]


def config_of(corpora: list[Path], **train: int) -> Config:
    values: dict[str, Any] = {
        "data": {"path": str(corpora[0]), "more_paths": [str(corpora[1])]},
        "train": {"microbatch_lanes": 2, **train},
    }
    return config_from_dict(values, source="test")


class Run:
    """A run without a model: it reads its stream and writes what inspection needs of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.state: StreamState | None = None
        self.read: list[list[list[int]]] = []
        """Per step, per lane: the tokens."""

    def train(self, config: Config, *, num_steps: int) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.toml").write_text(config_to_toml(config))
        corpora = open_corpora(config)
        splits = train_splits(config, corpora)
        wanted = first_stream(config, corpora)
        state = continued(self.state, wanted, splits) if self.state else wanted
        lanes = range(config.train.num_lanes)
        stream = iter(LaneStream(splits, state, segment_len=config.train.segment_len, lanes=lanes))
        for _ in range(num_steps):
            segment, self.state = next(stream)
            self.read.append(segment.tokens.tolist())
        self.step += num_steps
        checkpoint = checkpoint_folder(self.folder, self.step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.toml").write_text(config_to_toml(config))
        assert self.state is not None
        values = {"format_version": FORMAT_VERSION, "step": self.step, "stream": self.state.to_dict()}
        (checkpoint / "state.json").write_text(json.dumps(values))


def tokens_shown(run: Run, *, step: int, lane: int) -> list[int]:
    """The inputs of a lane, put together from the documents that inspection names."""
    splits, state, segment_len = stream_before_step(run.folder, step)
    facts = lane_facts(splits, state, segment_len, lane=lane)
    (split,) = [split for split in splits if split.corpus.location == facts["corpus"]]
    names = [shard.name for shard in split.shards]
    found: list[int] = []
    for piece in facts["pieces"]:
        document = split.open_shard(names.index(piece["shard"])).document(piece["document"])
        found += document[piece["offset"] : piece["offset"] + piece["tokens"]].tolist()
    assert facts["target"] == run.read[step - 1][lane][-1]
    return found


def test_each_step_of_a_run_is_shown_as_it_was_though_lanes_and_segments_changed(
    tmp_path: Path, corpora: list[Path]
) -> None:
    run = Run(tmp_path / "run")
    run.train(config_of(corpora, num_lanes=8, segment_len=10), num_steps=5)
    run.train(config_of(corpora, num_lanes=8, segment_len=16), num_steps=7)
    run.train(config_of(corpora, num_lanes=4, segment_len=16), num_steps=30)
    run.train(config_of(corpora, num_lanes=4, segment_len=16), num_steps=3)
    for step in range(1, run.step + 1):
        for lane in range(len(run.read[step - 1])):
            assert tokens_shown(run, step=step, lane=lane) == run.read[step - 1][lane][:-1], (step, lane)


def test_steps_behind_a_rewind_are_shown_without_what_was_left_out(tmp_path: Path, corpora: list[Path]) -> None:
    run = Run(tmp_path / "run")
    run.train(config_of(corpora, num_lanes=8, segment_len=10), num_steps=5)
    assert run.state is not None
    run.state = run.state.skipping(run.state.advanced(20), run.state.advanced(50))
    run.train(config_of(corpora, num_lanes=8, segment_len=16), num_steps=6)  # the skip begins within a segment
    run.state = run.state.skipping(run.state, run.state.advanced(16))  # the skip begins at the checkpoint
    run.train(config_of(corpora, num_lanes=8, segment_len=16), num_steps=4)
    run.train(config_of(corpora, num_lanes=4, segment_len=16), num_steps=4)
    for step in range(1, run.step + 1):
        for lane in range(len(run.read[step - 1])):
            assert tokens_shown(run, step=step, lane=lane) == run.read[step - 1][lane][:-1], (step, lane)


def test_steps_that_are_still_to_come_are_shown_too(tmp_path: Path, corpora: list[Path]) -> None:
    config = config_of(corpora, num_lanes=4, segment_len=16)
    run, longer = Run(tmp_path / "run"), Run(tmp_path / "longer")
    run.train(config, num_steps=3)
    longer.train(config, num_steps=9)
    run.read = longer.read
    assert tokens_shown(run, step=9, lane=3) == longer.read[8][3][:-1]
    with pytest.raises(ConfigError, match="1 is the first"):
        stream_before_step(run.folder, 0)


def test_the_verb_names_corpus_shard_and_document_and_refuses_what_a_run_knows_itself(
    tmp_path: Path, corpora: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    run.train(config_of(corpora, num_lanes=8, segment_len=10), num_steps=2)
    words = ["inspect", str(run.folder)]
    shown = ""
    for lane in range(8):
        assert main([*words, "--lane", str(lane), "--step", "2"]) == 0
        shown += capsys.readouterr().out
    assert all(str(corpus) in shown for corpus in corpora), "both corpora have lanes"
    assert shown.count("from its token 10 on") == 8
    for flags in ([], ["--lane", "1", "--num-lanes", "4"], ["--lane", "1", "--seed", "4"]):
        assert main([*words, *flags]) == 2
        assert "is a run, which knows its lanes and seed itself" in capsys.readouterr().err
    assert main([*words, "--lane", "8"]) == 2
    assert "the lanes are 0 to 7" in capsys.readouterr().err
