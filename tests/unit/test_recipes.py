"""Every file in configs/ is a run that can be started, says what it is, and is the model that it says it is."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

import txl_dist
from txl_dist.cli import VERBS
from txl_dist.config import Config, check_config, config_changes, load_config, plan_batch
from txl_dist.errors import ConfigError
from txl_dist.model.flops import count_parameters
from txl_dist.sections import TrainSection
from txl_dist.train.job import remarks

CONFIGS = Path(txl_dist.__file__).parent.parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
RECIPES = [name for name in NAMES if name != "quickstart"]

PUBLISHED = {
    "enwik8_base": (204, 41_055_436),
    "enwik8_large": (204, 277_231_820),
    "text8_base": (27, 40_964_635),
    "text8_large": (27, 277_050_395),
    "wt103_base": (267_735, 151_107_538),
    "wt103_large": (267_735, 285_170_506),
    "nvidia_wt103_base": (267_735, 191_950_298),
    "nvidia_wt103_large": (267_735, 285_167_482),
    "lm1b_base": (793_471, 357_812_082),
    "lm1b_large": (793_471, 841_295_982),
}
"""Vocabulary and parameters of the peers' own code, counted there."""
UNPUBLISHED = {"ptb": (10_000, 24_208_000), "wikitext2": (33_278, 26_810_078), "tinyshakespeare": (65, 838_001)}
OWN = {
    "enwik8_base": (257, 41_082_625),
    "enwik8_large": (257, 277_286_145),
    "text8_base": (29, 40_965_661),
    "text8_large": (29, 277_052_445),
    "wt103_base": (267_736, 151_107_949),
    "wt103_large": (267_736, 285_170_523),
    "nvidia_wt103_base": (267_736, 191_950_811),
    "nvidia_wt103_large": (267_736, 285_167_499),
    "ptb": (10_001, 24_208_401),
    "wikitext2": (33_279, 26_810_479),
    "tinyshakespeare": (67, 838_515),
}
"""With the vocabulary that `txl prepare` makes of the corpus."""


def header(name: str) -> str:
    lines = (CONFIGS / f"{name}.toml").read_text(encoding="ascii").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert max(map(len, lines)) <= 120
    return "\n".join(lines[:end])


def recipe(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.toml")


def assumed_ranks(name: str) -> int:
    """The number in the header's own command."""
    found = re.findall(r"--num_(?:gpus|accelerators) (\d+) --module txl_dist train configs/(\w+)\.toml", header(name))
    assert [file for _, file in found] == [name]
    return int(found[0][0])


def commands(name: str) -> list[list[str]]:
    """The `txl` commands of the header, continued lines joined, without comments."""
    text = re.sub(r"\\\n#\s*", "", header(name))
    lines = [line.removeprefix("#").strip() for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("txl ")]


def test_every_recipe_is_held_to_its_count() -> None:
    assert sorted(PUBLISHED.keys() | UNPUBLISHED.keys()) == RECIPES
    assert sorted([*OWN, "lm1b_base", "lm1b_large"]) == RECIPES


@pytest.mark.parametrize("name", NAMES)
def test_a_config_holds_together_and_its_batch_falls_evenly_onto_its_ranks(name: str) -> None:
    config = recipe(name)
    check_config(config)
    ranks = assumed_ranks(name)
    plan = plan_batch(config.train, world_size=ranks)
    assert plan.microbatch_lanes * plan.num_microbatches * ranks == config.train.num_lanes
    assert remarks(config, plan=plan) == [], "no setting is without effect"
    assert config.run.dir == f"runs/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_header_says_what_to_expect_on_what_in_which_time_and_how(name: str) -> None:
    parts = ["Expected", "Hardware", "Duration", "Command"] + (["Parameters"] if name in RECIPES else [])
    for part in parts:
        assert re.search(rf"^# {part}:", header(name), flags=re.MULTILINE), part


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_states_its_batch_and_else_only_what_differs_from_the_defaults(name: str) -> None:
    config = recipe(name)
    given = {
        f"{section}.{key}" for section in config.model_fields_set for key in getattr(config, section).model_fields_set
    }
    batch = {f"train.{key}" for key in TrainSection.model_fields}
    assert batch <= given
    assert given - batch == {change.key for change in config_changes(Config(), config)} - batch


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_number_of_parameters(name: str) -> None:
    model = recipe(name).model
    vocab_size, expected = (PUBLISHED | UNPUBLISHED)[name]
    assert count_parameters(model, vocab_size=vocab_size) == expected
    assert f"{expected:,}" in header(name)
    if name in OWN:
        vocab_size, expected = OWN[name]
        assert count_parameters(model, vocab_size=vocab_size) == expected
        assert f"{expected:,}" in header(name)


def test_the_headers_counts_of_other_forms_are_right() -> None:
    large = recipe("lm1b_large").model.model_copy(update={"share_biases": False, "project_same_width": False})
    assert f"{count_parameters(large, vocab_size=793_471):,}" in header("lm1b_large")
    words = recipe("wt103_large").model
    untied = words.model_copy(update={"share_biases": False})
    extra = count_parameters(untied, vocab_size=267_735) - PUBLISHED["wt103_large"][1]
    assert f"{extra:,} more" in header("wt103_large")
    tiny = recipe("tinyshakespeare").model
    whole_tables = count_parameters(tiny.model_copy(update={"num_distances": 2 * 4096}), vocab_size=65)
    assert f"{whole_tables:,}" in header("tinyshakespeare"), "labml's own"


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_header_have_flags_that_exist_and_name_the_recipes_folders(name: str) -> None:
    config = recipe(name)
    found = commands(name)
    assert {words[1] for words in found} == {"prepare", "evaluate"}
    for _, verb, *words in found:
        flags = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
        assert flags <= inspect.signature(VERBS[verb]).parameters.keys()
    outputs = [words[words.index("--out") + 1].removeprefix("../") for words in found if words[1] == "prepare"]
    scored = next(words for words in found if words[1] == "evaluate")
    assert config.data.path in outputs
    assert scored[2] == config.run.dir
    assert "--data" not in scored or scored[scored.index("--data") + 1] in outputs


def test_tiny_shakespeare_is_labmls_experiment() -> None:
    config = recipe("tinyshakespeare")
    assert config.optim.lr == pytest.approx((128 * config.optim.warmup_steps) ** -0.5, rel=1e-15)
    train = config.train
    steps_per_epoch = int(0.9 * 1_115_394) // train.num_lanes // train.segment_len
    assert train.max_steps == 128 * steps_per_epoch
    assert config.model.num_distances == train.segment_len + train.memory_len


@pytest.mark.parametrize("name", ["nvidia_wt103_base", "nvidia_wt103_large"])
def test_nvidias_lamb_runs_where_whole_tensors_are_compared(name: str) -> None:
    config = recipe(name)
    assert (config.optim.name, config.engine.zero_stage, config.engine.precision) == ("lamb", 0, "fp32")
    with pytest.raises(ConfigError, match="lamb"):
        check_config(config.model_copy(update={"engine": config.engine.model_copy(update={"zero_stage": 1})}))
