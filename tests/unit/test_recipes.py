"""Every file in configs/ is a run that can be started, describes itself, and has the model that it describes."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.recipes import CONFIGS, header
from txl_dist.cli.main import COMMANDS, main
from txl_dist.config.load import Config, check_config, config_changes, load_config, plan_batch
from txl_dist.config.schema import TrainSection
from txl_dist.convert.xlnet import inexpressible, other_dropout_rates
from txl_dist.data.prepare.datasets import NAMED
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.errors import ConfigError
from txl_dist.model.flops import count_parameters
from txl_dist.train.preflight import warnings_on_settings

NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
RECIPES = [name for name in NAMES if name not in ("quickstart", "modern_quickstart", "mine")]

VOCABULARIES = {
    "enwik8": 204,
    "text8": 27,
    "wikitext-103": 267_735,
    "wikitext-2": 33_278,
    "lm1b": 793_471,
    "ptb": 10_000,
    "tinyshakespeare": 65,
    "classic-books": 257,
    "classic-books-bpe": 4_096,
    "stdlib": 4_096,
    "xlnet": 32_000,
    "web": 32_768,
}
"""Ids of a corpus as the papers or our own recipes read it, by its folder in data/."""
PUBLISHED = {
    "enwik8_base": 41_055_436,
    "enwik8_large": 277_231_820,
    "text8_base": 40_964_635,
    "text8_large": 277_050_395,
    "wt103_base": 151_107_538,
    "wt103_large": 285_170_506,
    "nvidia_wt103_base": 191_950_298,
    "nvidia_wt103_large": 285_167_482,
    "lm1b_base": 357_812_082,
    "lm1b_large": 841_295_982,
}
"""Parameters of the peers' own code with these vocabularies, counted there."""
UNPUBLISHED = {
    "ptb": 24_208_000,
    "wikitext2": 26_810_078,
    "tinyshakespeare": 838_001,
    "tinyshakespeare_cpu": 1_937_156,
    "tinyshakespeare_cpu_2h": 5_143_366,
    "wikitext2_cpu": 8_347_651,
    "books_bytes_cpu": 1_974_212,
    "books_bpe_cpu": 2_715_525,
    "stdlib_cpu": 2_715_525,
    "xlnet_base": 116_722_688,
    "xlnet_large": 360_227_072,
    "xlnet_cpu": 1_386_112,
    "xl_300m": 306_360_339,
}
OWN_CORPORA = ("classic-books", "classic-books-bpe", "stdlib", "xlnet", "web")
"""Which no paper has."""


OPTIONAL = ("phases", "memory_lens", "initial_memory", "half_loss", "objective", "reuse_len", "predicted_len")
OPTIONAL += ("order_len", "longest_span", "span_context", "batch_tokens")
"""Of a batch: what few runs ask for."""


def recipe(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.toml")


def corpus_of(name: str) -> str:
    """Name of the corpus, which is that of its folder."""
    return Path(recipe(name).data.path).name


def assumed_ranks(name: str) -> int:
    """The number in the header's own command."""
    found = re.findall(r"--num_(?:gpus|accelerators) (\d+) --module txl_dist train configs/(\w+)\.toml", header(name))
    nodes = re.findall(
        r"sbatch --nodes (\d+) --gpus-per-node (\d+) launch/slurm\.sbatch configs/(\w+)\.toml", header(name)
    )
    found += [(str(int(count) * int(gpus)), file) for count, gpus, file in nodes]
    assert [file for _, file in found] == [name]
    return int(found[0][0])


def commands(name: str) -> list[list[str]]:
    """The `txl` commands of the header, continued lines joined, without comments."""
    text = re.sub(r"\\\n#\s*", "", header(name))
    lines = [line.removeprefix("#").strip() for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("txl ")]


def called(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Return the arguments that the header's commands, one of each, give to their functions, which are not run."""
    calls: dict[str, dict[str, Any]] = {}
    for command in ("prepare", "evaluate"):
        signature = inspect.signature(COMMANDS[command])

        @functools.wraps(COMMANDS[command])
        def record(
            *values: Any, command: str = command, signature: inspect.Signature = signature, **named: Any
        ) -> None:
            bound = signature.bind(*values, **named)
            bound.apply_defaults()
            calls[command] = bound.arguments

        monkeypatch.setitem(COMMANDS, command, record)
    found = commands(name)
    assert [words[1] for words in found] == ["prepare", "evaluate"]
    assert [main(words[1:]) for words in found] == [0, 0]
    return calls


def splits_of(prepared: Any) -> set[str]:
    """Splits of the corpus that a command makes."""
    if prepared.inputs == ("stdlib",):
        return {"train", "valid"}
    name = PrepareSettings(prepared.inputs).name
    if name is not None:
        return {split for _, split in NAMED[name].file_names()}
    given = {"train": prepared.inputs, "valid": prepared.valid_inputs, "test": prepared.test_inputs}
    return {split for split, inputs in given.items() if inputs}


def test_every_recipe_is_held_to_its_count() -> None:
    assert sorted(PUBLISHED.keys() | UNPUBLISHED.keys()) == RECIPES


@pytest.mark.parametrize("name", NAMES)
def test_a_config_holds_together_and_its_batch_falls_evenly_onto_its_ranks(name: str) -> None:
    config = recipe(name)
    check_config(config)
    ranks = assumed_ranks(name)
    plan = plan_batch(config.train, world_size=ranks)
    assert plan.microbatch_lanes * plan.num_microbatches * ranks == config.train.num_lanes
    assert warnings_on_settings(config, plan=plan) == [], "no setting is without effect"
    assert config.run.dir == f"runs/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_header_says_what_to_expect_on_what_in_which_time_and_how(name: str) -> None:
    parts = ["Expected", "Hardware", "Duration", "Command"] + (["Parameters"] if name in RECIPES else [])
    for part in parts:
        assert re.search(rf"^# {part}:", header(name), flags=re.MULTILINE), part
    assert max(map(len, header(name).splitlines())) <= 120


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_states_its_batch_and_else_only_what_differs_from_the_defaults(name: str) -> None:
    config = recipe(name)
    given = {
        f"{section}.{key}" for section in config.model_fields_set for key in getattr(config, section).model_fields_set
    }
    batch = {f"train.{key}" for key in TrainSection.model_fields if key not in OPTIONAL}
    batch.add("optim.clip_norm")  # the default too is a choice there
    assert batch <= given
    assert given - batch == {change.key for change in config_changes(Config(), config)} - batch


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_number_of_parameters(name: str) -> None:
    vocab_size, expected = VOCABULARIES[corpus_of(name)], (PUBLISHED | UNPUBLISHED)[name]
    assert count_parameters(recipe(name).model, vocab_size=vocab_size) == expected
    assert re.search(rf"^# Parameters: {expected:,} with the corpus' {vocab_size:,} ", header(name), re.MULTILINE)


def test_the_headers_counts_of_other_forms_are_right() -> None:
    large = recipe("lm1b_large").model.model_copy(update={"share_biases": False, "project_same_width": False})
    assert f"{count_parameters(large, vocab_size=VOCABULARIES['lm1b']):,}" in header("lm1b_large")
    words = recipe("wt103_large").model
    untied = words.model_copy(update={"share_biases": False})
    extra = count_parameters(untied, vocab_size=VOCABULARIES["wikitext-103"]) - PUBLISHED["wt103_large"]
    assert f"{extra:,} more" in header("wt103_large")
    tiny = recipe("tinyshakespeare").model
    whole_tables = count_parameters(tiny.model_copy(update={"num_distances": 2 * 4096}), vocab_size=65)
    assert f"{whole_tables:,}" in header("tinyshakespeare"), "labml's own"


@pytest.mark.parametrize(("name", "published"), [("xlnet_base", 116_750_336), ("xlnet_large", 360_300_800)])
def test_with_segment_terms_a_model_of_xlnet_has_hugging_faces_number_of_parameters(name: str, published: int) -> None:
    model = recipe(name).model.model_copy(update={"segment_terms": True})
    assert count_parameters(model, vocab_size=VOCABULARIES["xlnet"]) == published
    assert f"Hugging Face counts {published:,}" in header(name)
    assert inexpressible(recipe(name).model) == [], "an export has the format of XLNet"
    assert other_dropout_rates(recipe(name).model) == [], "the paper has one rate"


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_header_are_understood_and_make_train_and_score_one_corpus(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(name)
    calls = called(name, monkeypatch)
    prepared, scored = calls["prepare"]["arguments"], calls["evaluate"]
    assert str(prepared.out) == config.data.path
    assert str(scored["target"]) == config.run.dir
    assert not scored["data"], "the run knows its own"
    splits = splits_of(prepared)
    assert {config.data.train_split, config.data.eval_split} <= splits
    assert scored["overrides"].split == ("test" if "test" in splits else "valid")
    assert "test" in splits or corpus_of(name) in ("tinyshakespeare", "stdlib", "web")


@pytest.mark.parametrize("name", [name for name in RECIPES if corpus_of(name) not in OWN_CORPORA])
def test_a_recipes_corpus_has_the_tokenizer_of_the_papers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = called(name, monkeypatch)["prepare"]["arguments"]
    settings = prepared.completed()
    assert not settings.end_of_text, "it would be one more id"
    if name == "ptb":
        by_hand = PrepareSettings((), kind="word", lower_case=True, end_of_text=False)
        assert (settings.kind, settings.learning()) == (by_hand.kind, by_hand.learning())
    else:
        own = PrepareSettings([corpus_of(name)]).completed()
        assert settings.name == corpus_of(name)
        assert (settings.kind, settings.learning(), settings.tokenizer_all_splits) == (
            own.kind,
            own.learning(),
            own.tokenizer_all_splits,
        )


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


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_names_its_gradient_norm_and_says_whose_it_is_where_it_is_small(name: str) -> None:
    """At the default of 0.25 nearly every step of a small model is clipped."""
    optim = recipe(name).optim
    assert "clip_norm" in optim.model_fields_set
    if optim.clip_norm < 1:
        assert re.search(r"^# Clipping: .*\b0\.25 is kept, ", header(name), re.MULTILINE)
        assert name in PUBLISHED
