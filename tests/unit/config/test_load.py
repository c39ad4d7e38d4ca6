"""Settings: wrong ones are refused with a hint, loaded ones are frozen, and written ones are read back unchanged."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from txl_dist.config.load import (
    Config,
    check_config,
    check_vocabulary,
    config_changes,
    config_fingerprint,
    config_from_dict,
    config_to_toml,
    load_config,
    plan_batch,
    resume_policy,
    setting_names,
)
from txl_dist.config.schema import ModelSection, TrainSection, memory_of_layers
from txl_dist.errors import ConfigError


def with_values(**sections: dict[str, Any]) -> Config:
    return config_from_dict(sections, source="test")


TYPOS = [
    ("train", "segment_length", "train.segment_len"),
    ("train", "segmnt_len", "train.segment_len"),
    ("train", "num_lane", "train.num_lanes"),
    ("train", "max_step", "train.max_steps"),
    ("train", "mircobatch_lanes", "train.microbatch_lanes"),
    ("model", "num_layer", "model.num_layers"),
    ("model", "cutofs", "model.cutoffs"),
    ("model", "div_val", "model.div_value"),
    ("model", "tie_projection", "model.tie_projections"),
    ("model", "drpout", "model.dropout"),
    ("model", "same_lenght", "model.same_length"),
    ("optim", "weight_dcay", "optim.weight_decay"),
    ("optim", "warmup_step", "optim.warmup_steps"),
    ("optim", "lrr", "optim.lr"),
    ("engine", "zero_stages", "engine.zero_stage"),
    ("engine", "presicion", "engine.precision"),
    ("data", "paht", "data.path"),
    ("data", "document_maks", "data.document_mask"),
    ("checkpoint", "keeplast", "checkpoint.keep_last"),
    ("metrics", "tensorbord", "metrics.tensorboard"),
]


@pytest.mark.parametrize(("section", "key", "meant"), TYPOS)
def test_a_misspelt_setting_is_refused_and_the_near_one_suggested(section: str, key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({section: {key: 1}}, source="my.toml")
    assert str(caught.value) == f"my.toml: unknown setting {section}.{key}. Did you mean {meant}?"


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 5])
def test_one_missing_letter_never_leads_to_the_wrong_suggestion(every: int) -> None:
    """One letter in `every` is left out, each in turn."""
    for name in setting_names():
        section, key = name.split(".")
        for i in range(every // 2, len(key) if len(key) > 3 else 0, every):
            if f"{section}.{key[:i] + key[i + 1 :]}" in setting_names():
                continue  # memory_lens and memory_len
            with pytest.raises(ConfigError, match=f"Did you mean {name}\\?"):
                config_from_dict({section: {key[:i] + key[i + 1 :]: 1}}, source="test")


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("train", "lr", "optim.lr"),
        ("model", "lr", "optim.lr"),
        ("optim", "max_steps", "train.max_steps"),
        ("model", "memory_len", "train.memory_len"),
        ("train", "dropout", "model.dropout"),
        ("train", "precision", "engine.precision"),
        ("data", "seed", "run.seed"),
        ("checkpoint", "dir", "run.dir"),
    ],
)
def test_a_setting_in_the_wrong_section_is_sent_to_the_right_one(section: str, key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting {section}.{key}. Did you mean {meant}\\?"):
        config_from_dict({section: {key: 1}}, source="test")


@pytest.mark.parametrize(
    ("name", "meant"), [("trian", "train"), ("modle", "model"), ("optimizer", "optim"), ("lr", "optim.lr")]
)
def test_a_misspelt_section_is_refused_and_the_near_one_suggested(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting {name}. Did you mean {meant}\\?"):
        config_from_dict({name: {}}, source="test")


def test_a_name_that_resembles_nothing_is_answered_with_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting xyz\. Known: run, data, model, optim, train"):
        config_from_dict({"xyz": 1}, source="test")


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"train": {"num_lanes": 0, "segmnt_len": 8}, "optim": {"lr": "fast"}}, source="my.toml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("my.toml: ") for line in lines)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "num_lanes", 0),
        ("train", "num_lanes", -4),
        ("train", "num_lanes", 4.5),
        ("train", "memory_len", -1),
        ("train", "max_steps", "many"),
        ("model", "dropout", 1.0),
        ("model", "dropout", -0.1),
        ("model", "cutoffs", [0, 10]),
        ("model", "cutoffs", 10),
        ("model", "pre_norm", "perhaps"),
        ("optim", "lr", 0.0),
        ("optim", "lr", float("nan")),
        ("optim", "lr", float("inf")),
        ("optim", "betas", [0.9]),
        ("optim", "betas", [0.9, 1.0]),
        ("optim", "name", "adagrad"),
        ("optim", "schedule", "step"),
        ("engine", "zero_stage", 4),
        ("engine", "precision", "fp8"),
        ("data", "document_mask", "cut"),
        ("eval", "memory_len", -2),
        ("checkpoint", "keep_last", 0),
        ("run", "dir", 5),
    ],
)
def test_a_bad_value_is_refused_by_its_name(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"my.toml: {section}.{key}"):
        config_from_dict({section: {key: value}}, source="my.toml")


@pytest.mark.parametrize(("written", "read"), [(True, "on"), (False, "off"), ("auto", "auto"), ("on", "on")])
def test_cuda_graphs_may_be_asked_for_as_in_earlier_files(written: Any, read: str) -> None:
    engine = with_values(engine={"cuda_graph": written}).engine
    assert engine.cuda_graph == read
    assert engine.replays(on_gpu=True) is (read != "off")
    assert engine.replays(on_gpu=False) is (read == "on"), "which a CPU refuses"


def test_graphs_that_nobody_insists_on_give_way_to_what_they_cannot_go_with() -> None:
    for settings in ({"zero_stage": 3}, {"activation_checkpointing": True}):
        check_config(with_values(engine={**settings, "cuda_graph": "auto"}))
        assert not with_values(engine={**settings, "cuda_graph": "auto"}).engine.replays(on_gpu=True)
        with pytest.raises(ConfigError, match=r"engine\.cuda_graph=on needs engine\.zero_stage 0, 1 or 2"):
            check_config(with_values(engine={**settings, "cuda_graph": True}))


def test_a_file_that_is_missing_or_no_toml_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*missing\.toml"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load_config(tmp_path)
    (tmp_path / "broken.toml").write_text("[train\nnum_lanes = 4")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(tmp_path / "broken.toml")


def test_settings_written_as_toml_read_back_equal(tmp_path: Path) -> None:
    configs = [
        Config(),
        with_values(
            run={"dir": 'a "quoted"\\ path\u00e9\n', "seed": 2**40},
            model={"cutoffs": [10, 20], "tie_projections": [False, True, True], "div_value": 2, "dropout": 0.0},
            optim={"lr": 1.0000000000000002e-3, "eps": 1e-30, "betas": [0.5, 0.25], "min_lr": 5e-324},
            eval={"memory_len": -1},
        ),
    ]
    for config in configs:
        path = tmp_path / "config.toml"
        path.write_text(config_to_toml(config), encoding="utf-8")
        assert load_config(path) == config
        assert load_config(path).model_dump() == config.model_dump()


def test_the_toml_of_a_config_names_every_setting() -> None:
    sections: dict[str, list[str]] = {}
    for line in config_to_toml(Config()).splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = keys = []
        elif " = " in line:
            keys.append(line.split(" = ")[0])
    assert [f"{section}.{key}" for section, keys in sections.items() for key in keys] == setting_names()


def test_a_config_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.num_lanes = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.train = TrainSection()  # type: ignore[misc]


def test_every_setting_explains_itself() -> None:
    for section, info in Config.model_fields.items():
        assert type(info.default).__doc__, section
        for key, field in type(info.default).model_fields.items():
            assert field.description, f"{section}.{key} has no docstring"
            assert field.description.endswith("."), f"{section}.{key}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("microbatch_lanes", [1, 2, 4, 16])
def test_the_batch_is_the_same_on_any_number_of_ranks(world_size: int, microbatch_lanes: int) -> None:
    train = TrainSection(num_lanes=64, segment_len=10, microbatch_lanes=microbatch_lanes)
    plan = plan_batch(train, world_size=world_size)
    assert plan.world_size * plan.num_microbatches * plan.microbatch_lanes == 64
    assert plan.lanes_per_rank * world_size == 64
    assert plan.microbatch_lanes == microbatch_lanes
    assert plan.tokens_per_step == 640


@pytest.mark.parametrize(("microbatch_lanes", "world_size"), [(16, 3), (5, 1), (64, 2), (128, 1)])
def test_lanes_that_do_not_divide_are_refused_with_the_numbers(microbatch_lanes: int, world_size: int) -> None:
    train = TrainSection(num_lanes=64, microbatch_lanes=microbatch_lanes)
    with pytest.raises(ConfigError) as caught:
        plan_batch(train, world_size=world_size)
    message = str(caught.value)
    assert "train.num_lanes=64" in message
    assert "train.microbatch_lanes" in message
    assert f"{world_size} * {microbatch_lanes} = {world_size * microbatch_lanes}" in message


CONTRADICTIONS: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("model.cutoffs=[5, 5]", {"model": {"cutoffs": [5, 5]}}),
    ("model.cutoffs=[9, 5]", {"model": {"cutoffs": [9, 5]}}),
    ("model.tie_projections", {"model": {"cutoffs": [5], "tie_projections": [True]}}),
    ("model.tie_projections", {"model": {"tie_projections": [True, True]}}),
    ("model.div_value=8", {"model": {"cutoffs": [5, 9], "div_value": 8, "embed_width": 32}}),
    ("model.final_norm=True", {"model": {"final_norm": True}}),
    ("model.same_length='memory'", {"model": {"same_length": "memory"}, "train": {"memory_len": 0}}),
    ("memory_len of evaluation (is 0)", {"model": {"same_length": "memory"}, "eval": {"memory_len": 0}}),
    ("model.num_distances=0", {"model": {"positions": "learned_relative"}}),
    ("model.num_distances=9", {"model": {"num_distances": 9}}),
    ("train.memory_len=0 (is 128)", {"model": {"positions": "absolute"}}),
    ("eval.memory_len=0", {"model": {"positions": "absolute"}, "train": {"memory_len": 0}, "eval": {"memory_len": 5}}),
    ("eval.overlap_len=5", {"eval": {"overlap_len": 5}}),
    ("optim.name='lamb'", {"optim": {"name": "lamb"}}),
    ("engine.offload_optimizer=True", {"engine": {"offload_optimizer": True, "zero_stage": 0}}),
    ("engine.offload_parameters=True", {"engine": {"offload_parameters": True, "zero_stage": 2}}),
    ("optim.min_lr=0.5", {"optim": {"min_lr": 0.5, "lr": 0.1}}),
    ("eval.use_ema=True", {"eval": {"use_ema": True}}),
    ("model.absolute_with_memory=True to reproduce how a memory fails", {"model": {"positions": "absolute"}}),
    ("model.absolute_with_memory=True works only with", {"model": {"absolute_with_memory": True}}),
    (
        "train.initial_memory='zeros' needs data.document_mask=False",
        {"train": {"initial_memory": "zeros"}, "data": {"document_mask": True}},
    ),
    ("recover.copies=partner needs recover.spares=1", {"recover": {"copies": "partner"}}),
    ("recover.spare_nodes=1 needs recover.spares=1", {"recover": {"spare_nodes": 1}}),
    ("recover.on_loss=wait needs recover.spares=1", {"recover": {"on_loss": "wait"}}),
    ("recover.copy_every=2 needs recover.spares=1", {"recover": {"copy_every": 2}}),
    (
        "recover.copy_every=9 must not be above checkpoint.every_steps=8",
        {"recover": {"spares": 1, "copy_every": 9}, "checkpoint": {"every_steps": 8}},
    ),
    ("recover.partner_every=2 needs", {"recover": {"spares": 1, "partner_every": 2}}),
]


@pytest.mark.parametrize(("name", "sections"), CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused_by_name_and_value(
    name: str, sections: dict[str, dict[str, Any]]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(with_values(**sections))
    assert name in str(caught.value)
    assert str(caught.value).count(". ") == 0, "one contradiction, one sentence"


def test_several_contradictions_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"model\.final_norm=True.*optim\.min_lr=0\.5"):
        check_config(with_values(model={"final_norm": True}, optim={"min_lr": 0.5, "lr": 0.1}))


def test_the_defaults_and_the_uses_of_each_option_are_accepted() -> None:
    check_config(Config())
    check_config(
        with_values(
            model={
                "cutoffs": [5, 9],
                "div_value": 4,
                "tie_projections": [False, True, True],
                "pre_norm": True,
                "final_norm": True,
                "same_length": "memory_and_self",
            },
            engine={"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
            optim={"warmup_steps": 9, "min_lr": 1e-3, "lr": 1e-3},
            train={"max_steps": 10},
            recover={"spares": 1, "copies": "partner", "partner_every": 4, "spare_nodes": 1},
        )
    )


def test_the_other_kinds_of_positions_and_optimizers_are_accepted_where_they_belong() -> None:
    check_config(with_values(model={"positions": "learned_relative", "num_distances": 9, "clamp_len": 4}))
    vanilla = {"model": {"positions": "absolute"}, "train": {"memory_len": 0}, "eval": {"overlap_len": 64}}
    check_config(with_values(**vanilla))
    check_config(with_values(model={"positions": "absolute", "absolute_with_memory": True, "same_length": "memory"}))
    check_config(with_values(train={"memory_len": 0, "half_loss": True, "initial_memory": "zeros"}))
    check_config(with_values(optim={"name": "lamb"}, engine={"zero_stage": 0}))
    check_config(with_values(optim={"name": "sgd", "momentum": 0.9}, engine={"zero_stage": 2}))


@pytest.mark.parametrize(
    ("lens", "model", "words"),
    [
        ([64, 128, 32], {}, "has 3 entries, but needs one entry for each of the 2 layers"),
        ([64], {}, "has 1 entry"),
        ([64, 96], {}, r"the largest entry must equal train\.memory_len \(is 128\)"),
        ([64, 256], {}, r"the largest entry must equal train\.memory_len \(is 128\)"),
        ([-1, 128], {}, "memory_lens"),
        ([64, 128], {"value_residual": True}, "no layer may have a longer memory than the first layer"),
        ([0, 128], {"same_length": "memory"}, "needs a memory in every layer"),
    ],
)
def test_memories_per_layer_that_cannot_be_are_refused(lens: list[int], model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(with_values(model={"num_layers": 2, **model}, train={"memory_lens": lens}))


def test_a_layer_remembers_at_most_what_it_was_told_and_the_longest_one_all() -> None:
    train = with_values(model={"num_layers": 3}, train={"memory_lens": [64, 128, 0]}).train
    assert train.memory_per_layer(3) == (64, 128, 0)
    assert memory_of_layers(512, train.memory_lens, num_layers=3) == (64, 512, 0)
    assert memory_of_layers(32, train.memory_lens, num_layers=3) == (32, 32, 0)
    assert memory_of_layers(32, (), num_layers=3) == (32, 32, 32)


def test_cutoffs_must_lie_below_the_vocabulary() -> None:
    check_vocabulary(ModelSection(cutoffs=(5, 99)), vocab_size=100)
    check_vocabulary(ModelSection(), vocab_size=2)
    with pytest.raises(ConfigError, match=r"model\.cutoffs=\[5, 100\].*vocabulary size 100"):
        check_vocabulary(ModelSection(cutoffs=(5, 100)), vocab_size=100)


ADDED = {
    "cutoffs": 7,
    "more_paths": "a",
    "plugins": "my_package.my_module",
    "weights": 1.0,
    "sets": "news=a",
    "allow_protocols": "pipe",
    "phases": "until=0.5",
    "memory_lens": 7,
    "wandb_tags": "a",
}


def changed(value: Any, *, key: str) -> Any:
    if key in ("cuda_graph", "keep_scores", "pad_widths"):
        return "on"
    if key == "batch_tokens":
        return 32 * 64  # the tokens of the default lanes, so that no other setting changes
    if key in ADDED:
        return [*value, ADDED[key]]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value / 2 + 0.25
    if isinstance(value, list):
        return [0.5, 0.5] if len(value) == 2 else [*value, True]
    others = {"adamw": "adam", "cosine": "linear", "fp32": "bf16", "off": "memory"}
    others |= {
        "relu": "gelu",
        "layer": "rms",
        "node": "partner",
        "stop": "wait",
        "relative": "absolute",
        "empty": "zeros",
        "next": "permutation",
    }
    return (others | {"raise": "skip", "report": "rewind", "auto": "plain", "allow": "must"}).get(value, f"{value}x")


def test_the_fingerprint_of_the_defaults_is_that_of_0_2() -> None:
    """It is computed over the names of 0.2: a renamed setting changes nothing, so that runs of 0.2 continue."""
    assert config_fingerprint(Config()) == "2920767c56fefb4a38a5639a8565d1479f2e15d1eac7d660a1a8bf8015edbaba"


@pytest.mark.parametrize("name", setting_names())
def test_a_change_is_reported_with_its_class_and_only_frozen_ones_change_the_fingerprint(name: str) -> None:
    section, key = name.split(".")
    old = with_values(engine={"zero_stage": 1})
    value = old.model_dump(mode="json")[section][key]
    new = with_values(**{section: {key: changed(value, key=key)}})
    changes = config_changes(old, new)
    assert [(change.key, change.old, change.new) for change in changes] == [(name, value, changed(value, key=key))]
    is_frozen = changes[0].policy == "frozen"
    assert (config_fingerprint(new) != config_fingerprint(old)) is is_frozen
    assert config_changes(new, new) == []


def test_every_setting_has_one_of_three_classes_and_a_change_of_class_is_seen_here() -> None:
    counts = Counter(resume_policy(name) for name in setting_names())
    assert sum(counts.values()) == len(setting_names())
    assert counts == {"frozen": 40, "warned": 38, "free": 71}


def test_what_defines_the_run_is_frozen_and_what_only_watches_it_is_free() -> None:
    new = with_values(
        run={"seed": 2, "dir": "elsewhere"},
        model={"width": 64},
        train={"num_lanes": 64},
        optim={"lr": 1.0},
        checkpoint={"every_steps": 7},
        metrics={"tensorboard": False},
        eval={"every_steps": 5},
    )
    policies = {change.key: change.policy for change in config_changes(Config(), new)}
    assert policies == {
        "run.seed": "frozen",
        "run.dir": "free",
        "model.width": "frozen",
        "train.num_lanes": "warned",
        "optim.lr": "warned",
        "checkpoint.every_steps": "free",
        "metrics.tensorboard": "free",
        "eval.every_steps": "free",
    }


@pytest.mark.parametrize("module", ["txl_dist.config.load", "txl_dist.cli.main"])
def test_reading_settings_imports_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'deepspeed', 'numpy', 'webdataset'}} & set(sys.modules)))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("section", "values"),
    [("train", {"num_lanes": True}), ("train", {"num_lanes": "4"}), ("model", {"pre_norm": "yes"})],
)
def test_a_value_of_another_type_is_refused_and_not_converted(section: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{section}.{next(iter(values))}"):
        with_values(**{section: values})
