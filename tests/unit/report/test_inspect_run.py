"""`txl inspect` shows the contents of a run and a checkpoint, and the text of a step, also after a change of the
lanes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import GOLDEN, GOLDEN_CHECKPOINT, golden_at
from tests.helpers.corpora import flip_bit, random_texts, tiny_corpus
from txl_dist.artifacts import ArtifactKind, checkpoint_folder
from txl_dist.cli.main import main
from txl_dist.config.load import Config, config_from_dict, config_to_toml
from txl_dist.data.loader.corpora import open_corpora
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import StreamState, continued
from txl_dist.data.verify.inspect import lane_facts
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.report.inspect_options import InspectOptions
from txl_dist.report.inspect_run import checkpoint_facts, stream_before_step


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
        corpora = open_corpora(config.data, num_lanes=config.train.num_lanes, seed=config.run.seed)
        splits, wanted = corpora.train, corpora.begin
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
        values = json.loads((GOLDEN_CHECKPOINT / "state.json").read_text())
        values |= {"step": self.step, "stream": self.state.to_dict()}
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
    run.state = run.state.with_skip(run.state.advanced(20), run.state.advanced(50))
    run.train(config_of(corpora, num_lanes=8, segment_len=16), num_steps=6)  # the skip begins within a segment
    run.state = run.state.with_skip(run.state, run.state.advanced(16))  # the skip begins at the checkpoint
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
    with pytest.raises(ConfigError, match="the first step is 1"):
        InspectOptions(lane=0, step=0).check(str(run.folder), ArtifactKind.RUN)


def test_where_the_step_lies_is_not_guessed_and_what_was_changed_is_named(tmp_path: Path, corpora: list[Path]) -> None:
    for name, second, changed in (
        ("lanes", {"num_lanes": 4, "segment_len": 10}, "the corpora were divided among lanes again"),
        ("segments", {"num_lanes": 8, "segment_len": 16}, "train.segment_len was changed"),
    ):
        run = Run(tmp_path / name)
        run.train(config_of(corpora, num_lanes=8, segment_len=10), num_steps=5)
        run.train(config_of(corpora, **second), num_steps=7)
        shutil.rmtree(checkpoint_folder(run.folder, 5))
        with pytest.raises(
            CheckpointError, match=f"the text of step 7 cannot be computed: {changed} before step_000000012, .* exists"
        ):
            stream_before_step(run.folder, 7)


def test_what_is_nothing_known_is_said_to_be_so_and_a_missing_checkpoint_with_those_that_there_are(
    golden_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    checkpoints = golden_run / "checkpoints"
    for path, sentence in (
        (tmp_path / "missing", f"does not exist. Name a corpus, a run or a checkpoint: {tmp_path} has {golden_run}."),
        (tmp_path / "empty", "it has no index.json (a corpus), config.toml (a run), state.json (a checkpoint). "),
        (checkpoints / "step_12", f"Did you mean {checkpoints}/step_000000012?"),
        (checkpoints / "latest", f"{checkpoints} has {checkpoints}/step_000000008, {checkpoints}/step_000000012, "),
        (checkpoints / "step_00000012", f"Did you mean {checkpoints}/step_000000012?"),
        (tmp_path / "empty" / "checkpoints" / "step_000000001", "does not exist. Name a corpus"),
    ):
        assert main(["inspect", str(path)]) == 2
        message = capsys.readouterr().err
        assert f"error: {path} " in message
        assert sentence in message


@pytest.mark.parametrize("part", ["", "checkpoints/step_000000008"])
def test_a_run_and_a_checkpoint_generate_what_their_bundle_generates(
    golden_run: Path, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", "ab", "--max-tokens", "12", "--seed", "3"]
    assert main(["export", str(golden_run / part), str(tmp_path / "bundle")]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "bundle"), *words]) == 0
    expected = capsys.readouterr().out
    assert main(["generate", str(golden_run / part), *words]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected
    kind = "a checkpoint" if part else "a run"
    assert captured.err.startswith(f"generating up to 12 tokens with {golden_run / part}, {kind}; seed 3 ...")


def test_the_command_names_corpus_shard_and_document_and_refuses_what_a_run_knows_itself(
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
    for flags in (["--shard", "a"], ["--lane", "1", "--num-lanes", "4"], ["--lane", "1", "--seed", "4"]):
        assert main([*words, *flags]) == 2
        assert "which already contains the number of lanes and the seed" in capsys.readouterr().err
    assert main([*words, "--lane", "8"]) == 2
    assert "the lanes are 0 to 7" in capsys.readouterr().err


@pytest.fixture
def golden_run(tmp_path: Path) -> Path:
    """A run of three copies of the golden checkpoint, one of them damaged, with what may lie beside them."""
    run = tmp_path / "run"
    for step in (8, 12, 16):
        golden_at(run, step)
    flip_bit(checkpoint_folder(run, 16) / "engine" / "00001.safetensors")
    for name in ("step_000000020.tmp-a1b2", "step_000000012.damaged-1", "step_000000014.rewound-1", "step_x"):
        (run / "checkpoints" / name).mkdir()
    shutil.copy(GOLDEN / "settings.toml", run / "config.toml")
    records = [{"kind": "eval", "step": step, "loss": loss} for step, loss in ((8, 5.5), (12, 5.25), (16, 5.375))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_a_run_shows_each_checkpoint_whole_or_why_not_the_best_one_and_what_lies_beside(
    golden_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(golden_run), "--json", str(tmp_path / "facts.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{golden_run}: not done; newest whole checkpoint: step 12"
    rows = {line.split()[0]: line for line in lines[1:]}
    assert " ".join(rows["step_000000012"].split()) == "step_000000012 480 0.1 2 1 fp32 5.2500 (best) whole"
    assert rows["step_000000008"].endswith(" 5.5000  whole")
    assert rows["step_000000016"].endswith("damaged: engine/00001.safetensors does not match its sha256")
    assert "unfinished save or removal" in rows["step_000000020.tmp-a1b2:"]
    assert "damaged checkpoint" in rows["step_000000012.damaged-1:"]
    assert "set aside by a rewind" in rows["step_000000014.rewound-1:"]
    assert "not a file or folder of txl_dist" in rows["step_x:"]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["newest_whole"], facts["best_step"], facts["done"]) == (12, 12, False)
    assert [one["eval_loss"] for one in facts["checkpoints"]] == [5.5, 5.25, 5.375]
    assert [bool(one["problems"]) for one in facts["checkpoints"]] == [False, False, True]
    with pytest.raises(SystemExit, match="1"):
        main(["verify", str(golden_run)])
    damaged = checkpoint_folder(golden_run, 16)
    assert capsys.readouterr().out == f"{damaged}: engine/00001.safetensors does not match its sha256\n"


def test_a_run_with_held_out_sets_alone_shows_the_losses_of_the_first_set(
    golden_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = []
    for step, first, second in ((8, 5.5, 4.0), (12, 5.25, 4.5)):  # an evaluation writes its first set last
        records.append({"kind": "eval_books", "step": step, "loss": second})
        records.append({"kind": "eval_news", "step": step, "loss": first})
    (golden_run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["inspect", str(golden_run)]) == 0
    assert "5.2500 (best)" in capsys.readouterr().out


def test_a_run_without_checkpoints_and_one_with_a_torn_state_are_shown_too(
    golden_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint_folder(golden_run, 12) / "state.json").write_text("{")
    (checkpoint_folder(golden_run, 8) / "MANIFEST.json").unlink()
    assert main(["inspect", str(golden_run)]) == 0
    out = capsys.readouterr().out
    assert "newest whole checkpoint: none" in out
    assert "damaged: state.json has 1 bytes instead of" in out
    assert "MANIFEST.json is missing" in out
    shutil.rmtree(golden_run / "checkpoints")
    assert main(["inspect", str(golden_run)]) == 0
    assert capsys.readouterr().out == f"{golden_run}: not done; newest whole checkpoint: none\n"


def test_a_checkpoint_copied_elsewhere_shows_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copied"
    shutil.copytree(GOLDEN / "step_000000016", copy)
    words = ["inspect", str(copy), "--max-documents", "2", "--json", str(tmp_path / "facts.json")]
    assert main(words) == 0
    out = capsys.readouterr().out
    facts, state = json.loads((tmp_path / "facts.json").read_text()), json.loads((copy / "state.json").read_text())
    assert facts["parameters"] == state["parameters"]
    assert facts["kinds"] == ["exp_avg", "exp_avg_sq", "weight"]
    assert [(one["first"], one["last"]) for one in facts["lanes"]] == [(0, 1), (2, 3)]
    assert facts["lanes"][0]["memory_len"] == 12
    assert facts["health"] == {"skipped_steps": 1, "num_spikes": 2, "rewinds": 1}
    (corpus,) = facts["stream"]
    # 16 steps of 8 tokens and 2 steps' worth that the rewind left out; where the corpus lies is not known here.
    assert (corpus["position"], corpus["skips"], corpus["epochs_read"]) == (144, [[72, 88]], None)
    assert "whole, 117 KiB, format version 2" in out
    assert "step 16, 480 tokens; 2 ranks, ZeRO 1, fp32" in out
    assert "skipped steps: 1; spikes: 2; rewinds: 1" in out
    assert "and 36 more" in out
    assert out.count("embedding.") == 2
    assert main(["inspect", str(copy), "--lane", "1"]) == 2
    assert "is a checkpoint. To see what a lane reads, name the run" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_shown_with_its_damage_and_epochs_where_the_corpus_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copied"
    shutil.copytree(GOLDEN / "step_000000016", copy)
    settings = (copy / "config.toml").read_text().replace('"corpus"', f'"{GOLDEN / "corpus"}"')
    (copy / "config.toml").write_text(settings)
    (copy / "engine" / "00000.safetensors").write_bytes(b"torn")
    facts = checkpoint_facts(copy)
    tokens = open_corpus(GOLDEN / "corpus")
    assert facts["stream"][0]["epochs_read"] == pytest.approx(4 * 144 / tokens.split("train").tokens)
    assert main(["inspect", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "copied: damaged" in out
    assert "00000.safetensors has 4 bytes instead of" in out
    (copy / "MANIFEST.json").unlink()
    with pytest.raises(SystemExit, match="1"):
        main(["verify", str(copy)])
    assert "MANIFEST.json is missing" in capsys.readouterr().out
