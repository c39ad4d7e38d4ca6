"""engine.precision = "auto": what a device answers, what rank 0 decides from all answers, and what a run keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import sign
from tests.helpers.corpora import tiny_corpus
from tests.helpers.tiny import tiny_config
from txl_dist.config.load import Config, changed, config_from_dict, config_to_toml, load_config
from txl_dist.distributed.collectives import RankInfo
from txl_dist.planning import dry_run as dry_run_file
from txl_dist.planning.dry_run import dry_run
from txl_dist.train.engine import precision as precision_file
from txl_dist.train.engine.precision import (
    Bf16Support,
    ChosenPrecision,
    bf16_instructions,
    choose_precision,
    cpu_support,
    gpu_support,
    needs_support,
    product_speedup,
    warn_of_slow_inference,
)
from txl_dist.train.run_dir import kept_precision
from txl_dist.train.run_plan import plan_run

FAST = Bf16Support(True, "AMX, products 4.0 times as fast as in fp32")
SLOW = Bf16Support(False, "the processor has neither AMX nor AVX-512 BF16")


def never() -> float:
    raise AssertionError("a product was timed")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu avx2 avx512_bf16 avx512f", "AVX-512 BF16"),
        ("avx512_bf16 amx_bf16 amx_tile amx_int8", "AMX"),
        ("fpu avx2 avx512f amx_tile amx_int8 avx512_bf16x", ""),
    ],
)
def test_the_instructions_are_those_that_cpuinfo_lists(flags: str, found: str, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    text = f"processor\t: 0\nvmx flags\t: amx_bf16\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
    cpuinfo.write_text(text, encoding="utf-8")
    assert bf16_instructions(cpuinfo) == found


def test_a_machine_without_cpuinfo_or_with_another_one_has_no_instructions(tmp_path: Path) -> None:
    assert bf16_instructions(tmp_path / "missing") == ""
    (tmp_path / "cpuinfo").write_text("processor: 0\nFeatures: fp asimd bf16\n", encoding="utf-8")
    assert bf16_instructions(tmp_path / "cpuinfo") == ""


def test_a_processor_without_instructions_is_slow_and_no_product_is_timed() -> None:
    assert cpu_support("", measure_speedup=never) == SLOW


@pytest.mark.parametrize(("speedup", "is_fast"), [(1.29, False), (1.3, True), (0.01, False)])
def test_instructions_count_only_if_a_product_is_1_3_times_as_fast(speedup: float, is_fast: bool) -> None:
    support = cpu_support("AVX-512 BF16", measure_speedup=lambda: speedup)
    assert support.is_fast is is_fast
    assert "AVX-512 BF16" in support.reason
    assert f"{speedup:.1f} times as fast as in fp32" in support.reason


def test_a_gpu_has_bf16_from_capability_8_0_on() -> None:
    answers = [gpu_support(capability) for capability in ((7, 0), (7, 5), (8, 0), (9, 0))]
    assert [answer.is_fast for answer in answers] == [False, False, True, True]


def test_timing_products_draws_no_random_numbers_and_returns_a_ratio() -> None:
    state = torch.get_rng_state()
    assert product_speedup() > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_products_are_timed_with_one_thread_because_waiting_for_others_would_measure_their_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda rows, weight: counts.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        product_speedup()
        assert set(counts) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_new_run_is_in_bf16_only_if_every_rank_is_fast() -> None:
    assert choose_precision("auto", kept=None, answers=[FAST, FAST]) == ChosenPrecision("bf16", FAST.reason)
    assert choose_precision("auto", kept=None, answers=[SLOW]) == ChosenPrecision("fp32", SLOW.reason)
    mixed = choose_precision("auto", kept=None, answers=[FAST, SLOW, FAST, SLOW])
    assert mixed.word == "fp32"
    assert mixed.reason == f"2 of 4 ranks without fast bf16, the first is rank 1 ({SLOW.reason})"
    assert not mixed.warnings


def test_inference_on_several_ranks_warns_of_a_slow_rank_that_is_not_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(precision_file, "run_on_all_ranks", lambda action: FAST)
    monkeypatch.setattr(precision_file, "gather_objects", lambda answer: [answer, SLOW])
    monkeypatch.setattr(precision_file, "warn_for_all", lambda message, *values: warnings.append(message % values))
    warn_of_slow_inference("fp32", torch.device("cpu"))
    assert warnings == []
    warn_of_slow_inference("bf16", torch.device("cpu"))
    (warning,) = warnings
    assert "1 of 2 ranks without fast bf16, the first is rank 1" in warning


def test_a_run_that_continues_keeps_its_precision_and_says_when_it_is_slow() -> None:
    kept = choose_precision("auto", kept="bf16", answers=[SLOW])
    assert (kept.word, kept.reason) == ("bf16", "the run's precision so far")
    assert kept.warnings == (
        f"engine.precision=bf16 is slower than fp32 here: {SLOW.reason}. Use --engine.precision fp32",
    )
    assert choose_precision("auto", kept="bf16", answers=[FAST]).warnings == ()
    assert choose_precision("auto", kept="fp32", answers=[]) == ChosenPrecision("fp32", "the run's precision so far")


def test_a_named_precision_is_used_and_bf16_is_warned_about_where_it_is_slow() -> None:
    assert choose_precision("fp32", kept=None, answers=[]) == ChosenPrecision("fp32")
    assert choose_precision("bf16", kept=None, answers=[FAST]) == ChosenPrecision("bf16")
    named = choose_precision("bf16", kept=None, answers=[SLOW])
    assert (named.word, named.reason, len(named.warnings)) == ("bf16", "", 1)


def test_devices_are_asked_only_where_bf16_is_possible() -> None:
    asked = [needs_support("auto", kept=kept) for kept in (None, "bf16", "fp32", "tf32")]
    assert asked == [True, True, False, False]
    assert [needs_support(given, kept=None) for given in ("fp32", "tf32", "fp16", "bf16")] == [False] * 3 + [True]


def test_the_kept_precision_is_that_of_the_run_directory_or_of_its_newest_checkpoint(tmp_path: Path) -> None:
    def write(folder: str, precision: str) -> Path:
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        config = config_from_dict({"engine": {"precision": precision}}, source="test")
        (path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
        return path

    assert kept_precision(tmp_path / "run") is None
    older = write("run/checkpoints/step_000000001", "fp32")
    newer = write("run/checkpoints/step_000000002", "bf16")
    for checkpoint in (older, newer):
        sign(checkpoint)
    assert kept_precision(tmp_path / "run") == "bf16"
    settings = (newer / "config.toml").read_bytes()
    (newer / "config.toml").write_text("][", encoding="utf-8")
    assert kept_precision(tmp_path / "run") == "fp32"  # a start skips the damaged checkpoint too
    (newer / "config.toml").write_bytes(settings)
    write("run", "tf32")
    assert kept_precision(tmp_path / "run", resume="must") == "tf32"
    assert kept_precision(tmp_path / "other", resume=str(older)) == "fp32"
    assert kept_precision(tmp_path / "run", resume=str(tmp_path / "pruned since")) == "tf32"  # a recovery goes on
    write("run", "auto")  # edited by hand
    assert kept_precision(tmp_path / "run") == "bf16"


def planned_config(folder: Path) -> Config:
    tiny_corpus(folder)
    train = {"num_lanes": 4, "segment_len": 8, "microbatch_lanes": 2}
    data, run = {"path": str(folder / "corpus")}, {"dir": str(folder / "run")}
    return tiny_config(data=data, train=train, run=run, engine={"precision": "auto"})


def test_a_plan_contains_the_chosen_precision_in_all_its_settings(tmp_path: Path) -> None:
    ranks = RankInfo(0, 1, 0, torch.device("cpu"), num_threads=1)
    plan = plan_run(planned_config(tmp_path), ranks, precision=ChosenPrecision("bf16", "why", ("slow",)))
    assert plan.stages[0].context.config.engine.precision == "bf16"
    assert plan.saved_settings.config.engine.precision == "bf16"
    assert 'precision = "bf16"' in plan.saved_settings.toml
    assert plan.stages[0].warnings.settings[0] == "slow"


@pytest.mark.parametrize(
    ("instructions", "speedup", "said"),
    [
        ("", never, "fp32 (auto: the processor has neither AMX nor AVX-512 BF16)"),
        ("AMX", lambda: 4.0, "bf16 (auto: AMX, products 4.0 times as fast as in fp32)"),
    ],
)
def test_a_dry_run_says_the_chosen_precision_and_why(
    instructions: str, speedup: Callable[[], float], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run_file, "uses_gpu", lambda: False)
    monkeypatch.setattr(precision_file, "bf16_instructions", lambda: instructions)
    monkeypatch.setattr(precision_file, "product_speedup", speedup)
    config = planned_config(tmp_path)
    lines = list(dry_run(config, world_size=2))
    assert f"; ZeRO-1, {said}, attention fused" in "\n".join(lines)
    assert not [line for line in lines if line.startswith("warning") and "precision" in line]
    assert ('precision = "bf16"' in lines[0]) is ("bf16 (auto" in said)
    (tmp_path / "run").mkdir()
    bf16 = config_from_dict({"engine": {"precision": "bf16"}}, source="test")
    (tmp_path / "run/config.toml").write_text(config_to_toml(bf16), encoding="utf-8")
    again = "\n".join(dry_run(config, world_size=2))
    assert "bf16 (auto: the run's precision so far)" in again
    assert ("is slower than fp32 here" in again) is (not instructions)
    assert load_config(tmp_path / "run/config.toml") == bf16


def test_a_dry_run_from_a_checkpoint_says_the_precision_of_that_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run_file, "uses_gpu", lambda: False)
    monkeypatch.setattr(precision_file, "bf16_instructions", lambda: "")
    checkpoint = tmp_path / "other/checkpoints/step-00000004"
    checkpoint.mkdir(parents=True)
    bf16 = config_from_dict({"engine": {"precision": "bf16"}}, source="test")
    (checkpoint / "config.toml").write_text(config_to_toml(bf16), encoding="utf-8")
    lines = "\n".join(dry_run(planned_config(tmp_path), world_size=1, resume=str(checkpoint)))
    assert "bf16 (auto: the run's precision so far)" in lines


def test_a_dry_run_asks_the_mirror_for_the_precision_if_the_run_directory_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run_file, "uses_gpu", lambda: False)
    monkeypatch.setattr(precision_file, "bf16_instructions", lambda: "")
    mirrors = []

    def mirrored(config: Config) -> str:
        mirrors.append(config.checkpoint.mirror)
        return "bf16"

    monkeypatch.setattr(dry_run_file, "mirrored_precision", mirrored)
    config = changed(planned_config(tmp_path), {"checkpoint.mirror": "memory://bucket/run"})
    assert "bf16 (auto: the run's precision so far)" in "\n".join(dry_run(config, world_size=1))
    assert mirrors == ["memory://bucket/run"]
    named = changed(config, {"engine.precision": "fp32"})
    assert "; ZeRO-1, fp32, " in "\n".join(dry_run(named, world_size=1))
    assert len(mirrors) == 1
