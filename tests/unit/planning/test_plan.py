"""`txl plan`: its choices, its output, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import tiny_corpus
from txl_dist.cli.main import main
from txl_dist.config.load import Config, plan_batch
from txl_dist.config.load import changed as with_settings
from txl_dist.errors import ConfigError
from txl_dist.planning import plan
from txl_dist.planning.hardware import CONTEXT_GIB, FRAGMENTED_SHARE, GPUS, GpuCluster
from txl_dist.planning.plan import Option, Plan, PlannedOption, PlanOptions, attention_kind, make_plan, usable_gpus
from txl_dist.planning.scaling import Point
from txl_dist.planning.text import plan_lines
from txl_dist.train.footprint.rank import bytes_per_rank


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    return with_settings(config, {f"{name}.{key}": one for name, keys in sections.items() for key, one in keys.items()})


CONFIG = changed(
    Config(),
    model={"num_layers": 1, "width": 64, "num_heads": 2, "head_width": 32, "ff_width": 128},
    train={"num_lanes": 32, "segment_len": 32, "memory_len": 32, "microbatch_lanes": 4, "max_steps": 1000},
)
VOCAB_SIZE = 1000


def question(gpu: str = "h100", gpus: int = 4, **values: Any) -> PlanOptions:
    return PlanOptions(GpuCluster(GPUS[gpu]), gpus=gpus, vocab_size=VOCAB_SIZE, **values)


@pytest.fixture(scope="module")
def facts() -> Plan:
    return make_plan(CONFIG, question=question())


def choice(facts: Plan) -> PlannedOption:
    assert facts.chosen is not None
    return facts.chosen


def test_bytes_grow_with_the_micro_batch(facts: Plan) -> None:
    needed = {(row.engine.zero_stage, row.lanes): row.needed_gib for row in facts.options}
    assert set(needed) == {(stage, lanes) for stage in range(4) for lanes in (1, 2, 4, 8)}
    for stage in range(4):
        sizes = [needed[stage, lanes] for lanes in (1, 2, 4)]  # the whole of a rank's lanes accumulates no gradients
        assert sizes == sorted(sizes)
        assert stage < 2 or needed[stage, 8] > needed[stage, 4]


def test_bytes_fall_with_the_stage_where_parameters_are_most_of_them() -> None:
    config = changed(CONFIG, model={"num_layers": 6, "width": 512, "ff_width": 2048}, train={"num_lanes": 32})
    # Of two micro-batches: of one, stage 2 holds its sums in fp32 besides what it exchanges.
    rows = [row for row in make_plan(config, question=question(gpus=16)).options if row.lanes == 1]
    states = [row.needed_gib for row in rows]
    assert [row.engine.zero_stage for row in rows] == [0, 1, 2, 3]
    assert states[1] > states[2] > states[3]
    assert states[0] > states[2]


def test_what_is_chosen_fits_is_counted_and_is_within_2_percent_of_the_fastest(facts: Plan) -> None:
    chosen = choice(facts)
    assert chosen.fits
    assert chosen.engine.precision == "bf16"
    assert "--engine.precision bf16" in chosen.flags
    assert chosen.tokens_per_s >= 0.98 * max(row.tokens_per_s for row in facts.options if row.fits)
    assert chosen.needed_gib == pytest.approx(sum(chosen.needed_by_part_gib.values()))
    assert chosen.step.total_s == pytest.approx(sum(dataclasses.asdict(chosen.step).values()))
    assert 32 * 32 / chosen.step.total_s == pytest.approx(chosen.tokens_per_s)


def test_little_memory_is_not_bought_with_much_speed() -> None:
    wide = {"num_layers": 2, "width": 1024, "num_heads": 16, "head_width": 64, "ff_width": 4096}
    train = {"num_lanes": 64, "segment_len": 256, "memory_len": 256}
    facts = make_plan(changed(CONFIG, model=wide, train=train), question=question(gpus=2))
    chosen, fastest = choice(facts), max(facts.options, key=lambda row: row.tokens_per_s)
    assert 0.98 * fastest.tokens_per_s <= chosen.tokens_per_s < fastest.tokens_per_s
    assert chosen.needed_gib < 0.9 * fastest.needed_gib
    assert min(row.needed_gib for row in facts.options) < 0.7 * chosen.needed_gib


def test_days_and_gpu_hours_follow_from_the_speed(facts: Plan) -> None:
    chosen = choice(facts)
    assert chosen.budget_tokens == 1000 * 32 * 32
    assert chosen.length_s == pytest.approx(chosen.budget_tokens / chosen.tokens_per_s)
    assert chosen.gpu_hours == pytest.approx(chosen.length_s / 3600 * 4)
    more = choice(make_plan(CONFIG, question=question(budget_tokens=10 * chosen.budget_tokens)))
    assert more.length_s == pytest.approx(10 * chosen.length_s)


def test_a_checkpoint_is_weights_and_moments_in_fp32_and_all_memories(facts: Plan) -> None:
    memories = 1 * 32 * 64 * 32 * 2  # layers, tokens, width, lanes, bytes
    train = choice(facts).config.train
    documents = 8 * train.num_lanes * train.memory_len  # which document each place is of, in 64 bits
    assert choice(facts).saving.size_gib * 2**30 == pytest.approx(12 * facts.parameters + memories + documents)


def test_the_interval_is_youngs_unless_a_run_would_have_less_than_ten() -> None:
    long = choice(make_plan(CONFIG, question=question(gpus=32, budget_tokens=10**15))).saving
    mean_s = long.between_failures_s
    assert mean_s == pytest.approx(3600 / 32 / (419 / 54 / 24 / 16_384))
    assert long.interval_s == pytest.approx((2 * long.wait_s * mean_s) ** 0.5)
    day = choice(make_plan(CONFIG, question=question(budget_tokens=10**10)))
    assert day.length_s > 1000 * day.saving.wait_s
    assert day.saving.interval_s == pytest.approx(day.length_s / 10)


def test_a_run_of_seconds_is_saved_at_its_end_only(facts: Plan) -> None:
    assert choice(facts).saving.interval_s == pytest.approx(choice(facts).length_s)
    assert choice(facts).saving.every_steps == 1000


def test_an_old_gpu_gets_fp16_and_no_kernels() -> None:
    chosen = choice(make_plan(CONFIG, question=question("v100-16gb")))
    assert (chosen.engine.precision, chosen.attention) == ("fp16", "fused")
    assert chosen.needed_by_part_gib["scores"] > 0
    assert attention_kind(changed(CONFIG, engine={"precision": "bf16"}), gpu=GPUS["h100"]) == "kernels"
    assert attention_kind(CONFIG, gpu=GPUS["h100"]) == "fused"  # fp32
    as_bf16 = make_plan(changed(CONFIG, engine={"precision": "bf16"}), question=question("t4"))
    assert as_bf16.as_configured == "T4 has no bf16."


def test_the_plan_of_auto_is_bf16_where_the_gpu_has_it_and_fp32_elsewhere() -> None:
    config = changed(CONFIG, engine={"precision": "auto"})
    for gpu, precision in (("h100", "bf16"), ("v100-16gb", "fp32")):
        given = make_plan(config, question=question(gpu)).as_configured
        assert isinstance(given, Option)
        assert given.engine.precision == precision


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_the_bytes_and_seconds_of_any_order_are_those_of_the_fused_path(attention_dropout: float) -> None:
    """The Triton kernels know causal order only, so a run takes the fused path on every GPU."""
    model = {"any_order": True, "width": 256, "num_heads": 4, "head_width": 64, "attention_dropout": attention_dropout}
    train = {"objective": "permutation", "segment_len": 256, "reuse_len": 128, "memory_len": 192, "num_lanes": 8}
    config = changed(CONFIG, model=model | {"num_layers": 3}, train=train, engine={"precision": "bf16"})
    facts = make_plan(config, question=question(gpus=2))
    given = facts.as_configured
    assert isinstance(given, Option)
    assert (given.attention, choice(facts).attention) == ("fused", "fused")
    assert "the Triton kernels compute causal attention only (model.any_order)" in "\n".join(plan_lines(facts))
    plan = plan_batch(config.train, world_size=2)
    found = sum(bytes_per_rank(config, plan=plan, vocab_size=VOCAB_SIZE, on_gpu=True).values())
    assert 0.9 < given.needed_gib * 2**30 / found < 1.2
    causal = changed(CONFIG, model=model | {"num_layers": 3, "any_order": False}, engine={"precision": "bf16"})
    assert attention_kind(causal, gpu=GPUS["h100"]) == "kernels"


def test_tf32_is_as_large_as_fp32_and_faster() -> None:
    fp32, tf32 = (
        make_plan(changed(CONFIG, engine={"precision": precision}), question=question())
        for precision in ("fp32", "tf32")
    )
    assert isinstance(fp32.as_configured, Option)
    assert isinstance(tf32.as_configured, Option)
    assert tf32.as_configured.needed_gib == fp32.as_configured.needed_gib
    assert tf32.as_configured.step.products < fp32.as_configured.step.products
    assert choice(tf32).engine.precision == "bf16"
    old = make_plan(changed(CONFIG, engine={"precision": "tf32"}), question=question("t4"))
    assert old.as_configured == "T4 has no tf32."


def test_lamb_leaves_stage_0_alone() -> None:
    facts = make_plan(changed(CONFIG, optim={"name": "lamb"}, engine={"zero_stage": 0}), question=question())
    assert {row.engine.zero_stage for row in facts.options} == {0}
    assert any("rule out ZeRO 1, 2, 3" in line for line in plan_lines(facts))


def test_recomputing_is_tried_where_memory_is_short_and_nothing_is_chosen_where_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = GpuCluster(GPUS["h100"])
    monkeypatch.setattr(type(tight.gpu), "usable_bytes", property(lambda _: 1000.0))
    facts = make_plan(CONFIG, question=question())
    assert {row.engine.activation_checkpointing for row in facts.options} == {False, True}
    assert facts.chosen is None
    lines = list(plan_lines(facts))
    assert lines[-1].startswith("nothing fits: at least ")
    assert lines[-1].endswith(".")


def test_lanes_that_do_not_divide_are_planned_for_the_nearest_number() -> None:
    assert usable_gpus(32, gpus=8) == (8, [])
    used, (note,) = usable_gpus(32, gpus=12)
    assert used == 8
    assert (
        "so the plan uses 8. The next larger possible number is 16. To use all 12, give --train.num_lanes 36." in note
    )
    used, (note,) = usable_gpus(32, gpus=100)
    assert used == 32
    assert "give --train.num_lanes 100" in note


def test_between_counted_micro_batches_memory_is_never_too_little(facts: Plan) -> None:
    config = changed(CONFIG, engine={"zero_stage": 1, "precision": "bf16"})
    for row in facts.options:
        if row.engine.zero_stage == 1:
            one = changed(config, train={"microbatch_lanes": row.lanes})
            batch = plan_batch(one.train, world_size=4)
            counted = bytes_per_rank(one, plan=batch, vocab_size=VOCAB_SIZE, on_gpu=True)
            assert row.needed_gib * 2**30 >= sum(counted.values()) * (1 - 1e-9)


@pytest.mark.slow
def test_kept_distance_scores_are_planned_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"num_lanes": 8, "segment_len": 256, "memory_len": 256, "microbatch_lanes": 8}
    config = changed(CONFIG, model={"num_layers": 4}, train=train, engine={"precision": "bf16"})

    def planned(choice: str = "auto") -> Option:
        facts = make_plan(changed(config, engine={"keep_scores": choice}), question=question(gpus=1))
        rows = [row for row in facts.options if row.lanes == 8 and row.engine.zero_stage == 1]
        row = min(rows, key=lambda row: row.needed_gib)
        assert isinstance(facts.as_configured, Option)
        assert facts.as_configured.needed_gib == pytest.approx(row.needed_gib)
        assert facts.as_configured.step == row.step
        return row

    kept, given_up = planned("on"), planned("off")
    layer = 2 * 8 * 2 * 256 * 512 / 2**30
    assert 3 * layer <= kept.needed_gib - given_up.needed_gib <= 4 * layer
    assert kept.step.attention == pytest.approx(10 / 11 * given_up.step.attention)
    assert planned().needed_gib == pytest.approx(kept.needed_gib)
    assert planned().step == kept.step
    between = (kept.needed_gib + given_up.needed_gib) / 2
    small = dataclasses.replace(GPUS["h100"], memory_gib=CONTEXT_GIB + between / (1 - FRAGMENTED_SHARE))
    monkeypatch.setitem(GPUS, "h100", small)
    assert planned().needed_gib == pytest.approx(given_up.needed_gib)
    assert planned().step == given_up.step


CONFIG_TEXT = """
[model]
num_layers = 1
width = 64
num_heads = 2
head_width = 32
ff_width = 128
[train]
num_lanes = 32
segment_len = 32
memory_len = 32
microbatch_lanes = 4
"""


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG_TEXT, encoding="utf-8")
    return str(path)


def test_the_command_prints_and_writes_json_and_a_picture(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpus", "4", "--gpu", "H100", "--vocab-size", "1000", "--train.num_lanes", "64", "--interconnect", "25"]
    files = ["--json", str(tmp_path / "plan.json"), "--png", str(tmp_path / "plan.png")]
    assert main(["plan", config_file, *words, *files]) == 0
    printed = capsys.readouterr().out
    assert "predicted, not measured" in printed
    assert "network 25 GB/s per machine" in printed
    facts = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert facts["tokens_per_step"] == 64 * 32
    assert facts["chosen"]["strong"][-1]["gpus"] == 64
    assert facts["chosen"]["weak"][-1]["gpus"] == 4096

    from matplotlib.image import imread

    pixels = imread(tmp_path / "plan.png")
    assert min(pixels.shape[:2]) > 300
    assert float(np.var(pixels[..., :3])) > 1e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "4", "--gpu", "h10"], "Did you mean h100"),
        (["--gpus", "0", "--gpu", "h100"], "--gpus 0 is out of range"),
        (
            ["--gpus", "4", "--gpu", "h100", "--interconnect", "0"],
            "--interconnect 0.0 is out of range. Give a value from 0.001 to",
        ),
        (["--gpus", "4", "--gpu", "h100", "--interconnect", "nan"], "--interconnect nan is out of range"),
        (["--gpus", "4", "--gpu", "h100", "--interconnect", "inf"], "--interconnect inf is out of range"),
        (["--gpus", "4", "--gpu", "h100", "--intra-node", "nan"], "--intra-node nan is out of range"),
        (["--gpus", "4", "--gpu", "h100", "--intra-node", "-1"], "--intra-node -1.0 is out of range"),
        (["--gpus", "4", "--gpu", "h100", "--tokens", "-1"], "--tokens -1 is out of range"),
        (["--gpus", "4", "--gpu", "h100", "--tokens", "1" + 400 * "0"], "--tokens 1000"),
        (["--gpus", "4", "--gpu", "h100", "--vocab-size", "1"], "--vocab-size 1 is out of range"),
        (
            ["--gpus", "4", "--gpu", "h100", "--vocab-size", "-5", "--model.cutoffs", "9"],
            "--vocab-size -5 is out of range",
        ),
        (["--gpus", "4", "--gpu", "h100", "--tokkens", "2"], "unknown flag --tokkens. Did you mean --tokens?"),
        (["--gpus", "4", "--gpu", "h100", "--train.num-lane", "2"], "train.num_lanes"),
    ],
)
def test_impossible_questions_are_refused_with_a_remedy(
    config_file: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config_file, "--vocab-size", "1000", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["stray"], "See txl plan --help."),
        (["--train.num_lanes", "64", "stray"], "see txl plan --help."),
        (["--tokens", "inf"], "--tokens inf: it must be a whole number"),
    ],
)
def test_a_word_too_many_leads_to_the_help_of_this_command(
    config_file: str, words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config_file, *words, "--gpus", "4", "--gpu", "h100", "--vocab-size", "1000"]) == 2
    printed = capsys.readouterr().err
    assert remedy.lower() in printed.lower()
    assert "txl train" not in printed


def test_a_picture_that_is_not_drawn_is_owned_up_to(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(GPUS["h100"]), "usable_bytes", property(lambda _: 1000.0))
    words = ["--gpus", "4", "--gpu", "h100", "--vocab-size", "1000", "--png", str(tmp_path / "p.png")]
    assert main(["plan", config_file, *words]) == 0
    assert (
        f"no picture was drawn to {tmp_path / 'p.png'}, because no option fits into GPU memory"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "p.png").exists()


def test_the_facts_are_json_that_every_reader_takes(
    config_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dataclasses.replace(make_plan(CONFIG, question=question()), usable_gib=math.nan)
    monkeypatch.setattr(plan, "make_plan", lambda *_, **__: made)
    words = ["--gpus", "4", "--gpu", "h100", "--vocab-size", "1000", "--json", str(tmp_path / "p.json")]
    with pytest.raises(ValueError, match="not JSON compliant"):
        main(["plan", config_file, *words])
    assert not (tmp_path / "p.json").exists()


def test_an_efficiency_under_the_half_is_not_printed_as_the_half(facts: Plan) -> None:
    point = Point(gpus=2, lanes_per_gpu=1, tokens_per_s=1.0, efficiency=0.4999, limited_by="exchange")
    busy = dataclasses.replace(choice(facts).step, host=0.0)
    chosen = dataclasses.replace(choice(facts), step=busy, strong=[point], weak=[point])
    lines = [line for line in plan_lines(dataclasses.replace(facts, chosen=chosen)) if "under 50%" in line]
    assert len(lines) == 2
    assert all("from 2 GPUs on (49.9%): the exchange" in line for line in lines)


def test_a_plan_leaves_out_what_means_nothing_for_a_tiny_model_or_a_short_run(facts: Plan) -> None:
    """A model that a GPU does not notice has no MFU and no scaling, a run of seconds no failures and no GPU-hours."""
    text = "\n".join(plan_lines(facts))
    for words in (r"MFU \d", r"scaling \(", "GPU-hours,? \\d", "checkpoint:", "failure every"):
        assert re.search(words, text) is None, words
    assert "memory: every micro-batch of 1 to 8 lanes fits at ZeRO 0, 1, 2, 3, in 0." in text
    assert "not shown: memory by ZeRO stage, MFU and scaling, because the model is too small for such a GPU (" in text
    assert "not shown: GPU-hours, failures and how often to save, because the run takes only 2 s" in text
    long = "\n".join(plan_lines(make_plan(CONFIG, question=question(budget_tokens=10**11))))
    assert " GPU-hours\n" in long
    assert "checkpoint: " in long
    wide = {"num_layers": 4, "width": 2048, "num_heads": 16, "head_width": 128, "ff_width": 8192}
    large = "\n".join(plan_lines(make_plan(changed(CONFIG, model=wide), question=question(budget_tokens=10**11))))
    assert "MFU " in large
    assert "weak scaling (" in large
    assert "left out" not in large


def test_the_config_file_comes_first(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--train.num_lanes", "64", "--gpus", "4", "--gpu", "h100", config_file]) == 2
    assert "the configuration file must come first: txl plan CONFIG" in capsys.readouterr().err


def test_without_a_corpus_the_vocabulary_must_be_given(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = ["--data.path", str(tmp_path / "none")]
    assert main(["plan", config_file, "--gpus", "4", "--gpu", "h100", *corpus]) == 2
    assert "Or give --vocab-size" in capsys.readouterr().err


def test_a_plan_needs_no_split_that_is_evaluated(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = ["--data.path", tiny_corpus(tmp_path).location, "--data.eval_split", "none", "--model.cutoffs", "10"]
    assert main(["plan", config_file, "--gpus", "4", "--gpu", "h100", *corpus]) == 0
    assert "with a vocabulary of 2" in capsys.readouterr().out


def test_help_answers_without_torch() -> None:
    program = "import sys; from txl_dist.cli.main import main\ntry: main(['plan', '--help'])\nexcept SystemExit: pass\n"
    program += "assert 'torch' not in sys.modules"
    begin = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "--interconnect" in result.stdout
    assert time.monotonic() - begin < 20  # hangs, no more


def test_a_vocabulary_below_the_cutoffs_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be below the vocabulary size 1000"):
        make_plan(changed(CONFIG, model={"cutoffs": (2000,)}), question=question())
    assert plan.ENOUGH < 1


def test_stages_are_planned_one_by_one_and_all_must_fit() -> None:
    staged = changed(CONFIG, train={"phases": ("until=0.5 num_lanes=128 segment_len=8 memory_len=8",)})
    plain, facts = (make_plan(config, question=question()) for config in (CONFIG, staged))
    assert plain.chosen is not None
    assert facts.chosen is not None
    assert plain.chosen.stages == []
    first, last = facts.chosen.stages
    assert (first.first_step, first.last_step, last.first_step, last.last_step) == (1, 500, 501, 1000)
    assert (first.num_lanes, first.segment_len, first.memory_len) == (128, 8, 8)
    assert first.microbatch_lanes == 4 * last.microbatch_lanes, "as many tokens in a micro-batch"
    assert last.needed_gib == pytest.approx(facts.chosen.needed_gib)
    assert last.tokens_per_s == pytest.approx(facts.chosen.tokens_per_s)
    tokens = facts.chosen.budget_tokens
    expected_s = tokens / 2 / first.tokens_per_s + tokens / 2 / last.tokens_per_s
    assert facts.chosen.length_s == pytest.approx(expected_s)
    lines = list(plan_lines(facts))
    table = lines[lines.index("by stage:") + 1 :][:3]
    assert "1 to 500" in table[1]
    assert "128 x 8" in table[1]
    assert "501 to 1,000" in table[2]
    assert "by stage:" not in list(plan_lines(plain))


def test_shorter_memories_of_some_layers_are_less_work_and_fewer_bytes() -> None:
    two = changed(CONFIG, model={"num_layers": 2})
    config = changed(two, train={"memory_lens": (8, 32)})
    whole, less = (make_plan(one, question=question()) for one in (two, config))
    assert sum(less.flops_per_token.values()) < sum(whole.flops_per_token.values())
    assert whole.chosen is not None
    assert less.chosen is not None
    assert less.chosen.saving.size_gib < whole.chosen.saving.size_gib
