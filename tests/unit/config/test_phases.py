"""Phases of a run: which lengths apply in which step, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_dist.config.load import Config, changed, config_from_dict, config_to_toml
from txl_dist.config.phases import at_step, check_phases, each_phase, end_of_phase, max_ranks, whole
from txl_dist.errors import ConfigError

TRAIN = {"num_lanes": 32, "segment_len": 64, "memory_len": 128, "microbatch_lanes": 16, "max_steps": 100}
TWO = ("until=0.25 num_lanes=128 segment_len=16 memory_len=32", "until=0.5 num_lanes=64 segment_len=32")


def config_of(*stages: str, **sections: Any) -> Config:
    return config_from_dict({"train": TRAIN | {"phases": list(stages)}, **sections}, source="a test")


def lengths(config: Config) -> tuple[int, int, int, int]:
    train = config.train
    return train.num_lanes, train.segment_len, train.memory_len, train.microbatch_lanes


def test_each_step_has_the_lengths_of_its_stage_and_micro_batches_keep_their_tokens() -> None:
    config = config_of(*TWO)
    check_phases(config)
    assert [(steps, lengths(stage)) for steps, stage in each_phase(config)] == [
        (range(25), (128, 16, 32, 64)),
        (range(25, 50), (64, 32, 128, 32)),
        (range(50, 100), (32, 64, 128, 16)),
    ]
    assert [end_of_phase(config, step) for step in (0, 24, 25, 49, 50, 99, 100, 120)] == [25, 25, 50, 50, *[100] * 4]


def test_without_stages_a_config_is_its_own_whole_and_its_only_stage() -> None:
    config = config_of()
    check_phases(config)
    assert at_step(config, 50) is config
    assert whole(config) == config
    assert list(each_phase(config)) == [(range(100), config)]


def test_as_many_ranks_are_possible_as_the_phase_with_the_fewest_micro_batches_allows() -> None:
    assert max_ranks(config_of()) == 2
    assert max_ranks(config_of("until=0.5 num_lanes=48 segment_len=64 microbatch_lanes=8")) == 2
    assert max_ranks(config_of("until=0.5 num_lanes=48 segment_len=64 microbatch_lanes=16")) == 1


@given(steps=st.lists(st.integers(0, 120), min_size=1, max_size=4))
def test_any_stage_can_be_made_of_any_other_and_the_whole_again(steps: list[int]) -> None:
    given_config, config = config_of(*TWO), config_of(*TWO)
    for step in steps:
        config = at_step(config, step)
        assert config == at_step(given_config, step)
        assert end_of_phase(config, step) == end_of_phase(given_config, step)
        assert whole(config) == given_config
        assert config_to_toml(whole(config)) == config_to_toml(given_config)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (["num_lanes=128 segment_len=16"], "has no `until` (the share of the run"),
        (["until=x"], "until=x is not a share of the run"),
        (["until=0.5 num_lanes=1.5"], "num_lanes=1.5 is not a whole number"),
        (["until=0.5 lanes=128"], "a phase has no setting lanes. Did you mean num_lanes"),
        (
            ["until=0.5 width=8"],
            "no setting width. Its settings are until, num_lanes, segment_len, memory_len, "
            "microbatch_lanes, reuse_len, predicted_len, order_len, weights. Write",
        ),
        (["until=0.5 until=0.6"], "until occurs twice"),
        (["until=0.5 num_lanes=64"], "64 x 64 = 4,096 tokens, but [train] has steps of 32 x 64 = 2,048 tokens"),
        (["until=0.5", "until=0.5"], "until=0.5 cannot precede a phase with until=0.5"),
        (["until=0"], "until=0 cannot precede"),
        (["until=1.5"], "until=1.5 cannot precede a phase with until=1"),
        (["until=0.5 memory_len=-1"], "memory_len must be from 0 to 16,777,216"),
        (["until=0.5 num_lanes=1 segment_len=2048"], "needs its own microbatch_lanes"),
        (["until=0.001"], "until=0.001 has no step in a run of 100 steps"),
        (["until=0.25", "until=0.251"], "until=0.251 has no step in a run of 100 steps"),
        (["until=0.5 memory_len=99999999999"], "memory_len must be from 0 to 16,777,216"),
    ],
)
def test_what_cannot_be_is_refused_with_its_stage(stages: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=r"^train\.phases") as caught:
        check_phases(config_of(*stages))
    assert words in str(caught.value)


def test_a_stage_keeps_the_rules_of_the_other_settings() -> None:
    config = config_of("until=0.5 memory_len=0", model={"same_length": "memory"}, eval={"memory_len": 8})
    with pytest.raises(ConfigError, match=r"train\.phases: in .until=0\.5 memory_len=0.: model\.same_length"):
        check_phases(config)


def test_layers_with_memories_of_their_own_keep_them_in_every_stage() -> None:
    config = config_of(*TWO, model={"num_layers": 2})
    lens = {"train.memory_lens": (48, 128)}
    check_phases(changed(config, lens))
    assert at_step(changed(config, lens), 0).train.memory_per_layer(2) == (32, 32)
    assert at_step(changed(config, lens), 30).train.memory_per_layer(2) == (48, 128)
    for wrong, words in (((48,), "has 1 entry"), ((48, 96), "the largest entry must equal train.memory_len")):
        with pytest.raises(ConfigError, match=words):
            check_phases(changed(config, {"train.memory_lens": wrong}))


XLNET = {"objective": "permutation", "reuse_len": 32, "predicted_len": 12, "order_len": 16}


def permutation_config(*phases: str, **train: Any) -> Config:
    values = {"train": TRAIN | XLNET | {"phases": list(phases)} | train, "model": {"any_order": True}}
    return config_from_dict(values, source="a test")


def test_the_lengths_of_xlnets_objective_are_the_same_share_of_a_segment_in_all_phases() -> None:
    config = permutation_config(*TWO)
    check_phases(config)
    names = ("segment_len", "reuse_len", "predicted_len", "order_len")
    found = [tuple(getattr(phase.train, name) for name in names) for _, phase in each_phase(config)]
    assert found == [(16, 8, 3, 4), (32, 16, 6, 8), (64, 32, 12, 16)]
    for step in (0, 30, 60, 10):
        config = at_step(config, step)
        assert whole(config) == permutation_config(*TWO)
    automatic = permutation_config(*TWO, reuse_len=0, predicted_len=0, order_len=0)
    check_phases(automatic)
    assert [phase.train.num_predicted for _, phase in each_phase(automatic)] == [2, 5, 10]
    assert [phase.train.step_len for _, phase in each_phase(automatic)] == [16, 32, 64]


@pytest.mark.parametrize(
    ("phase", "train", "message"),
    [
        (
            "until=0.5 num_lanes=64 segment_len=32",
            {"predicted_len": 11},
            "train.predicted_len=11 of train.segment_len=64 would be 5.5 tokens of them. Choose segments",
        ),
        (
            "until=0.5 num_lanes=512 segment_len=4",
            {"predicted_len": 16, "order_len": 8},
            "train.order_len=8 of train.segment_len=64 would be 0.5 tokens of them. Choose segments",
        ),
        (
            "until=0.5 num_lanes=64 segment_len=32 reuse_len=8",
            {},
            "train.reuse_len=32 of train.segment_len=64 would be 16 tokens of them. Choose segments",
        ),
    ],
)
def test_a_phase_with_another_share_of_reused_or_predicted_tokens_is_refused(
    phase: str, train: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"train\.phases") as refusal:
        check_phases(permutation_config(phase, **train))
    assert f'"{phase}" has segments of' in str(refusal.value)
    assert message in str(refusal.value)
    assert " to 0 for " in str(refusal.value)
    assert "\n" not in str(refusal.value)


TWO_CORPORA = {"path": "a", "more_paths": ["b"]}


def test_a_phase_has_its_own_weights_of_the_corpora() -> None:
    for weights in ([], [1.0, 3.0]):
        config = config_of("until=0.2", "until=0.5 weights=3,1", data=TWO_CORPORA | {"weights": weights})
        check_phases(config)
        given_weights = tuple(weights)
        assert [stage.data.weights for _, stage in each_phase(config)] == [given_weights, (3.0, 1.0), given_weights]
        for step in (30, 0, 60, 30, 99):
            config = at_step(config, step)
        assert whole(config) == config_of("until=0.2", "until=0.5 weights=3,1", data=TWO_CORPORA | {"weights": weights})


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("3", 'in "until=0.5 weights=3": data.weights has 1 entry'),
        ("3,-1", "weights=3,-1 is not a list of weights, which are 0 or more"),
        ("3,nan", "weights=3,nan is not a list of weights"),
        ("3;1", "weights=3;1 is not a list of weights"),
    ],
)
def test_weights_that_cannot_be_are_refused_with_their_phase(weights: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^train\.phases") as caught:
        check_phases(config_of(f"until=0.5 weights={weights}", data=TWO_CORPORA))
    assert words in str(caught.value)
