"""`train.batch_tokens`, the other way to give the number of lanes (batch rows)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from txl_dist.cli.main import _train_arguments
from txl_dist.config.load import (
    Config,
    changed,
    changes_to_toml,
    check_config,
    config_from_dict,
    config_to_toml,
    configure,
    plan_batch,
)
from txl_dist.config.phases import each_phase
from txl_dist.errors import ConfigError

TRAIN = {"batch_tokens": 4096, "segment_len": 128, "microbatch_lanes": 4}


def config_of(**train: object) -> Config:
    return config_from_dict({"train": TRAIN | train}, source="a test")


def lanes_and_tokens(config: Config) -> tuple[int, int]:
    return config.train.num_lanes, config.train.batch_tokens


def test_the_number_of_lanes_follows_and_the_settings_read_back_equal() -> None:
    config = config_of()
    check_config(config)
    assert lanes_and_tokens(config) == (32, 4096)
    assert plan_batch(config.train, world_size=8).tokens_per_step == 4096
    for text in (config_to_toml(config), changes_to_toml(config)):
        assert "num_lanes" not in tomllib.loads(text)["train"]
        assert config_from_dict(tomllib.loads(text), source="a test") == config


def test_both_are_refused_in_one_place_and_the_later_place_counts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_tokens=4096 and train\.num_lanes=32 both give the number"):
        config_of(num_lanes=32)
    (tmp_path / "c.toml").write_text(config_to_toml(config_of()), encoding="utf-8")
    words = [str(tmp_path / "c.toml"), "--train.num-lanes", "8"]
    assert lanes_and_tokens(_train_arguments(words).settings) == (8, 0)
    with pytest.raises(ConfigError, match=r"--train\.batch-tokens 64 and --train\.num-lanes 8 both give"):
        _train_arguments([*words, "--train.batch_tokens", "64"])
    assert lanes_and_tokens(_train_arguments([words[0], "--train.segment_len", "64"]).settings) == (64, 4096)
    assert lanes_and_tokens(configure(words[0], train={"num_lanes": 8})) == (8, 0)
    assert lanes_and_tokens(configure(words[0], train={"batch_tokens": 1024})) == (8, 1024)
    assert lanes_and_tokens(configure(train={"batch_tokens": 1024})) == (16, 1024)
    with pytest.raises(ConfigError, match=r"give train\.num_lanes or train\.batch_tokens"):
        check_config(changed(config_of(), {"train.num_lanes": 8}))


@pytest.mark.parametrize(
    ("tokens", "world_size", "nearest"), [(1000, 1, 1024), (4096, 3, 4608), (100, 1, 512), (8192, 5, 7680)]
)
def test_tokens_that_do_not_divide_are_refused_with_the_nearest_that_fit(
    tokens: int, world_size: int, nearest: int
) -> None:
    config = config_of(batch_tokens=tokens)
    with pytest.raises(ConfigError, match=f"The nearest value that fits is {nearest}") as caught:
        plan_batch(config.train, world_size=world_size)
    assert "\n" not in str(caught.value)
    plan_batch(config_of(batch_tokens=nearest).train, world_size=world_size)


def test_the_phases_have_the_same_tokens() -> None:
    config = config_of(phases=["until=0.5 num_lanes=128 segment_len=32"])
    for _, stage in each_phase(config):
        check_config(stage)
        assert stage.train.num_lanes * stage.train.segment_len == 4096
