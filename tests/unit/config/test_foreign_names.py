"""Names of other code bases lead to their counterpart here, on the command line and in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from txl_dist.cli.main import COMMANDS, TrainArguments, main
from txl_dist.cli.plan import PlanArguments
from txl_dist.cli.sweep import SweepArguments
from txl_dist.cli.tyro_events import list_arguments
from txl_dist.config.foreign_names import COUNTERPARTS, FOREIGN_COMMANDS, SECTIONS, find_counterpart
from txl_dist.config.load import Config, choices_of, setting_names
from txl_dist.errors import ConfigError
from txl_dist.inference.options import SamplingParams

OWN_READERS = {"train": TrainArguments, "plan": PlanArguments, "sweep": SweepArguments}
"""Commands that read their words themselves, and the class of their flags."""

MEANINGS = [
    ("learning_rate", "optim.lr"),
    ("max_lr", "optim.lr"),
    ("batch_size", "train.num_lanes"),
    ("per_device_train_batch_size", "train.num_lanes"),
    ("train_micro_batch_size_per_gpu", "train.microbatch_lanes"),
    ("gradient_accumulation_steps", "train.microbatch_lanes"),
    ("accumulate_grad_batches", "train.microbatch_lanes"),
    ("batch_chunk", "train.microbatch_lanes"),
    ("epochs", "train.max_steps"),
    ("num_train_epochs", "train.max_steps"),
    ("max_iters", "train.max_steps"),
    ("max_step", "train.max_steps"),
    ("train_iters", "train.max_steps"),
    ("max_tokens", "train.max_steps"),
    ("seq_len", "train.segment_len"),
    ("ctx", "train.segment_len"),
    ("block_size", "train.segment_len"),
    ("tgt_len", "train.segment_len"),
    ("mem_len", "train.memory_len"),
    ("ext_len", "eval.overlap_len"),
    ("hidden_size", "model.width"),
    ("n_embd", "model.width"),
    ("d_model", "model.width"),
    ("d_inner", "model.ff_width"),
    ("d_head", "model.head_width"),
    ("d_embed", "model.embed_width"),
    ("n_layers", "model.num_layers"),
    ("n_layer", "model.num_layers"),
    ("num_hidden_layers", "model.num_layers"),
    ("n_heads", "model.num_heads"),
    ("n_head", "model.num_heads"),
    ("dropatt", "model.attention_dropout"),
    ("attn_pdrop", "model.attention_dropout"),
    ("resid_pdrop", "model.projection_dropout"),
    ("embd_pdrop", "model.embed_dropout"),
    ("hidden_dropout_prob", "model.dropout"),
    ("div_val", "model.div_value"),
    ("untie_r", "model.share_biases"),
    ("attn_type", "model.positions"),
    ("save_steps", "checkpoint.every_steps"),
    ("save_total_limit", "checkpoint.keep_last"),
    ("log_interval", "metrics.log_every_steps"),
    ("eval_interval", "eval.every_steps"),
    ("eval_iters", "eval.max_tokens"),
    ("eval_batch_size", "eval.num_lanes"),
    ("eval.batch_size", "eval.num_lanes"),
    ("output_dir", "run.dir"),
    ("work_dir", "run.dir"),
    ("warmup", "optim.warmup_steps"),
    ("warmup_ratio", "optim.warmup_steps"),
    ("grad_clip", "optim.clip_norm"),
    ("gradient_clipping", "optim.clip_norm"),
    ("lr_scheduler_type", "optim.schedule"),
    ("optimizer.params.lr", "optim.lr"),
    ("zero_optimization.stage", "engine.zero_stage"),
    ("fp16.enabled", "engine.precision"),
    ("bf16", "engine.precision"),
    ("offload_param", "engine.offload_parameters"),
    ("init_from", "run.init"),
    ("dataset", "data.path"),
]
"""A name of others, and the setting that it is in training."""
NOTES = [
    ("vocab_size", "txl prepare --vocab-size"),
    ("device", "CUDA_VISIBLE_DEVICES"),
    ("deepspeed", "engine.zero_stage"),
    ("loss_scale", "engine.precision bf16"),
    ("num_gpus", "txl launch"),
    ("rope", "Rotary positions are not supported"),
]
"""Names that no setting has, and what is said of them."""


def known_to(command: str) -> set[str]:
    """Names of the flags of a command, and of the settings where it takes them."""
    target = OWN_READERS.get(command, COMMANDS[command])
    default = TrainArguments(config=Path("c"), settings=Config()) if command == "train" else None
    listed = list_arguments(target, default=default) if default else list_arguments(target)
    names = {name.lstrip("-").replace("-", "_") for argument in listed for name in argument.names}
    return names | (set(setting_names()) if command in OWN_READERS else set())


def answer(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The refusal of a configuration file."""
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    assert main(["train", str(path)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("foreign", "here"), MEANINGS)
def test_a_name_from_another_code_base_leads_to_the_setting_in_a_flag_and_in_a_file(
    foreign: str, here: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_file = answer(f"{foreign} = 1\n", tmp_path, capsys)
    section = here.partition(".")[0]
    assert re.search(rf"unknown setting \S+ Did you mean ({here}\b|{section}\?)", in_file), in_file
    (tmp_path / "c.toml").write_text("")
    assert main(["train", str(tmp_path / "c.toml"), f"--{foreign}", "1"]) == 2
    assert f"Did you mean --{here.replace('_', '-')}" in capsys.readouterr().err


@pytest.mark.parametrize(("foreign", "said"), NOTES)
def test_a_name_without_a_counterpart_is_answered_with_what_there_is_instead(
    foreign: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in answer(f"{foreign} = 1\n", tmp_path, capsys)
    (tmp_path / "c.toml").write_text("")
    assert main(["train", str(tmp_path / "c.toml"), f"--{foreign}=1"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("section", ["", "train.", "optim.", "optimizer.", "trainer."])
@pytest.mark.parametrize(
    "key", ["learning_rate", "learning-rate", "learningrate", "Learning_Rate", "learning_rat", "leraning_rate"]
)
def test_the_learning_rate_is_never_taken_for_the_smallest_one(
    section: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text("")
    for command, more in (("train", []), ("plan", ["--gpus", "8", "--gpu", "h100"]), ("sweep", [])):
        assert main([command, str(tmp_path / "c.toml"), *more, f"--{section}{key}", "1e-3"]) == 2
        said = capsys.readouterr().err
        assert "Did you mean --optim.lr?" in said
        assert "min" not in said.replace("Did you mean", "")


def test_the_smallest_learning_rate_keeps_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("min_lr", "eta_min", "lr_min", "min_learning_rate"):
        assert "optim.min_lr" in answer(f"{name} = 1\n", tmp_path, capsys)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("fp16 = true", 'engine.precision = "fp16"?'),
        ("[model]\nnot_tied = true", "model.tie_weights = false?"),
        ("[model]\nswiglu = true", 'model.activation = "swiglu"?'),
        ("[training]\nsteps = 1", "unknown setting training. Did you mean train?"),
        ("[optimizer]\nlr = 1", "unknown setting optimizer. Did you mean optim?"),
        ("[fp16]\nenabled = true", 'engine.precision = "fp16"?'),
        ("[train]\nbatch_size = 8", "batch size per GPU * GPUs * accumulation steps."),
        ("[train]\nepochs = 8", "epochs * tokens of the corpus / (train.num_lanes * train.segment_len)"),
        ("[train]\nresume_from_checkpoint = 'x'", "Give --resume CHECKPOINT on the command line."),
    ],
)
def test_a_file_of_another_code_base_is_answered_in_the_words_of_a_file(
    text: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answer(text, tmp_path, capsys)
    assert meant in said
    assert "--engine" not in said


def test_every_counterpart_is_a_setting_or_a_flag_of_some_command_and_its_value_is_possible() -> None:
    known = set().union(*(known_to(command) for command in COMMANDS if command != "launch"))
    assert [row.here for row in COUNTERPARTS if row.here and row.here not in known] == []
    assert [row.needs for row in COUNTERPARTS if row.needs and row.needs not in known] == []
    of_settings = [row for row in COUNTERPARTS if row.value and row.here in setting_names()]
    assert len(of_settings) >= 8
    assert [row for row in of_settings if row.value not in choices_of(row.here)] == []


def test_notes_name_settings_that_exist_and_end_as_sentences() -> None:
    notes = [row.note for row in COUNTERPARTS if row.note]
    sections = "|".join({name.partition(".")[0] for name in setting_names()})
    named = {name for note in notes for name in re.findall(rf"\b(?:{sections})\.[a-z][a-z_]+", note)} - {"run.dir"}
    assert {name for name in named if name not in setting_names()} == set()
    assert [note for note in notes if not note.endswith(".")] == []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if command in ("plan", "sweep") else [])  # settings as of train
        for command in COMMANDS
        if command != "launch"
    ],
)
def test_no_name_of_ours_is_taken_for_one_of_others(command: str) -> None:
    known = known_to(command)
    settings = [name for name in known if "." in name]
    misread = {name: find_counterpart(name, known - {name}) for name in settings}
    shadowed = {name: row.here for name, row in misread.items() if row and row.here.partition(".")[2] == ""}
    assert {name: here for name, here in shadowed.items() if here and here not in known} == {}


@pytest.mark.parametrize(("section", "ours"), SECTIONS.items())
def test_sections_of_others_lead_to_sections_of_ours(section: str, ours: str) -> None:
    assert section not in Config.model_fields
    assert ours in Config.model_fields


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("run c.toml", "`txl train CONFIG.toml`"),
        ("fit", "`txl train CONFIG.toml`"),
        ("finetune", "`txl train CONFIG.toml --init BUNDLE`"),
        ("eval runs/x", "`txl evaluate RUN`"),
        ("EVAL runs/x", "`txl evaluate RUN`"),
        ("sample b", "`txl generate RUN --prompt TEXT`"),
        ("chat", "`txl generate"),
        ("tokenize t.txt", "`txl prepare TEXT --out CORPUS`"),
        ("preprocess", "`txl prepare"),
        ("convert x", "`txl import FILE BUNDLE --format NAME`"),
        ("torchrun", "`txl launch CONFIG.toml`"),
        ("tune", "`txl sweep"),
        ("info", "`txl inspect PATH`"),
        ("evalute", "evaluate?"),
        ("genrate", "generate?"),
        ("my.toml", "`txl train my.toml`"),
        ("--verison", "--version?"),
        ("--hlep", "--help?"),
        ("--gpus 3", "Flags follow the command"),
        ("frobnicate", "`txl --help` lists the commands."),
        ("help trian", "Did you mean train?"),
    ],
)
def test_a_command_of_others_is_answered_in_one_line_with_ours(
    words: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("txl: error: unknown ") or words == "my.toml"
    assert ours in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("words", [["--version"], ["-V"], ["-v"], ["version"]])
def test_the_version_is_printed_however_it_is_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"], ["help", "--help"]])
def test_the_usage_is_printed_however_it_is_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("usage: txl ")


def test_no_command_of_others_is_one_of_ours() -> None:
    others = [word for words in FOREIGN_COMMANDS for word in words.split()]
    assert len(others) == len(set(others))
    assert set(others) & set(COMMANDS) == set()
    assert {ours.split()[0] for ours, _ in FOREIGN_COMMANDS.values()} <= {*COMMANDS, "completion"}


def test_settings_of_generation_in_a_program_are_answered_too() -> None:
    with pytest.raises(ConfigError, match=r"'max_new_tokens'\. Did you mean max_tokens\?"):
        SamplingParams.of({"max_new_tokens": 3})


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--max-tokens", "prepare a shorter text and give its corpus with --data"),
        ("--max_samples", "prepare a shorter text and give its corpus with --data"),
        ("--eval-iters", "eval.max_tokens limits the evaluations"),
        ("--temperature", "txl generate MODEL --prompt TEXT --max-tokens N"),
        ("--max-new-tokens", "txl generate MODEL --prompt TEXT --max-tokens N"),
        ("--limit", "lm-evaluation-harness"),
    ],
)
def test_evaluate_answers_a_flag_of_another_command_with_what_to_do(
    flag: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "run", flag, "5"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"txl evaluate: error: unknown flag {flag}. ")
    assert remedy in line
