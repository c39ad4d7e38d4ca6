"""The time model: checked by hand where possible, by its direction elsewhere, and against published speeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tools.checks import plan
from txl_dist.config.schema import ModelSection
from txl_dist.errors import ConfigError
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.planning.hardware import GPUS, Gpu, GpuCluster, find_gpu
from txl_dist.planning.scaling import breaking_point, curve, largest_divisor, strong, weak
from txl_dist.planning.timing import (
    OURS,
    Product,
    StepTime,
    Work,
    exchange_bytes,
    exchange_s,
    step_time,
)
from txl_dist.train.engine.muon import matrices_of, newton_schulz

H100 = GpuCluster(GPUS["h100"])
WORK = Work(
    model=ModelSection(num_layers=12, width=512, num_heads=8, head_width=64, ff_width=2048),
    vocab_size=10_000,
    shares=(1.0,),
    parameters=43_000_000,
    segment_len=256,
    memory_lens=(256,) * 12,
    microbatch_lanes=16,
    num_microbatches=1,
    world_size=8,
    zero_stage=1,
    precision="bf16",
    attention="kernels",
)


def test_nvidias_published_speeds_are_predicted_within_30_percent_and_mostly_within_10() -> None:
    errors = plan.errors()
    assert len(errors) == 42
    assert max(map(abs, errors)) < 0.15
    assert sum(abs(error) < 0.10 for error in errors) >= 38


def test_each_gpu_is_calibrated_on_one_row_and_the_table_holds_what_that_row_gives() -> None:
    assert list(plan.CALIBRATION) == ["DGX A100", "DGX-1", "DGX-2H"]
    for machine, row in plan.CALIBRATION.items():
        assert row in plan.PUBLISHED
        share = plan.CLUSTERS[machine].gpu.matmul_share
        assert plan.calibrated(row) == pytest.approx(share, abs=0.005)


def test_the_check_fails_where_a_row_is_off_by_more_than_30_percent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([]) == 0
    monkeypatch.setitem(plan.RECIPES, "base", plan.RECIPES["large"])
    assert plan.main([]) == 1
    assert "predicted speed (not measured)" in capsys.readouterr().out


def test_a_product_is_its_operations_and_its_operands() -> None:
    gpu = GPUS["a100-40gb"]
    work = replace(WORK, precision="fp16")
    seconds = Product(1000, 2000, 3000, times=4).seconds(gpu, work)
    operations_s = 4 * 2 * 1000 * 2000 * 3000 / (0.55 * 312e12)
    operands_s = 4 * 2 * (2e6 + 6e6 + 3e6) / (0.85 * 1555e9)
    assert seconds == pytest.approx(operations_s + operands_s)


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_rank_sends_twice_the_parameters_and_at_stage_3_thrice(stage: int, volumes: int) -> None:
    """Rajbhandari et al. 2020, section 7: an all-reduce is a reduce-scatter and an all-gather."""
    work = replace(WORK, parameters=1000, world_size=4, zero_stage=stage)
    assert exchange_bytes(work) == volumes * 1000 * 2 * 3 / 4
    assert exchange_bytes(replace(work, precision="fp32")) == volumes * 1000 * 4 * 3 / 4


def test_from_stage_2_on_each_micro_batch_reduces_its_gradients() -> None:
    sent = {
        stage: exchange_bytes(replace(WORK, parameters=1000, world_size=2, zero_stage=stage, num_microbatches=4))
        for stage in range(4)
    }
    assert sent == {0: 2000, 1: 2000, 2: 1000 * (4 + 1), 3: 1000 * (4 + 8)}


def test_the_update_moves_46_bytes_per_parameter_of_the_rank() -> None:
    step = step_time(replace(WORK, parameters=8_000_000, world_size=8), H100)
    assert step.optimizer == pytest.approx(1_000_000 * 46 / (3350e9 * 0.85))
    whole = step_time(replace(WORK, parameters=8_000_000, world_size=8, zero_stage=0), H100)
    assert whole.optimizer == pytest.approx(8 * step.optimizer)


def test_adams_kernel_moves_30_bytes_per_parameter_in_half_precision() -> None:
    work = replace(WORK, parameters=8_000_000, world_size=8, updates_by_kernel=True)
    assert step_time(work, H100).optimizer == pytest.approx(1_000_000 * 30 / (3350e9 * 0.85))


def test_kept_distance_scores_save_one_of_eleven_products_of_the_kernels() -> None:
    kept, computed_again = (step_time(replace(WORK, keeps_scores=keeps), H100) for keeps in (True, False))
    assert kept.attention == pytest.approx(10 / 11 * computed_again.attention)
    # Each product is H multiplications and additions for each lane, head and visible pair of query and key.
    operations = 12 * 16 * 8 * 11 * 2 * 64 * 256 * (256 + 257 / 2)
    assert computed_again.attention == pytest.approx(operations / (0.3 * H100.gpu.flops("bf16")))


def test_muons_products_are_those_of_its_matrices_and_divided_among_the_ranks() -> None:
    model = WORK.model
    alone = replace(WORK, world_size=1, zero_stage=0)
    extra = [
        step_time(replace(alone, orthogonalizes=True, world_size=n), H100).optimizer
        - step_time(replace(alone, world_size=n), H100).optimizer
        for n in (1, 4)
    ]
    with torch.device("meta"):
        network = TransformerXL(model, vocab_size=WORK.vocab_size)
    matrices = [one for name, p in network.named_parameters() for one in matrices_of(name, p.shape)]
    assert len(matrices) == 7 * model.num_layers
    with FlopCounterMode(display=False) as counter:
        for one in matrices:
            newton_schulz(torch.empty(1, *sorted((one.rows, one.columns)), device="meta"))
    gpu = H100.gpu
    assert extra[0] == pytest.approx(counter.get_total_flops() / (gpu.matmul_share * gpu.flops(alone.precision)))
    assert extra[1] == pytest.approx(extra[0] / 4)


def test_one_gpu_exchanges_nothing() -> None:
    assert exchange_s(replace(WORK, world_size=1), H100, backward_s=0.0) == 0.0
    assert exchange_s(replace(WORK, world_size=2), H100, backward_s=0.0) > 0.0


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(
    "better",
    [
        lambda cluster: replace(cluster, network_gb_s=2 * cluster.network_gb_s),
        lambda cluster: replace(cluster, gpu=replace(cluster.gpu, bus_gb_s=2 * cluster.gpu.bus_gb_s)),
        lambda cluster: replace(cluster, gpu=replace(cluster.gpu, bandwidth_gb_s=2 * cluster.gpu.bandwidth_gb_s)),
        lambda cluster: replace(cluster, gpu=replace(cluster.gpu, matmul_share=1.0)),
        lambda cluster: replace(cluster, gpu=replace(cluster.gpu, host_ms=0.1)),
    ],
)
def test_a_better_machine_is_never_slower(is_ours: bool, better: Callable[[GpuCluster], GpuCluster]) -> None:
    program = OURS if is_ours else plan.NVIDIA
    for stage in (0, 3):
        for world_size in (1, 8, 64, 512):
            work = replace(WORK, attention="plain", zero_stage=stage, world_size=world_size)
            slow_s, fast_s = (step_time(work, cluster, program).total_s for cluster in (H100, better(H100)))
            assert fast_s <= slow_s * (1 + 1e-12)


def test_a_slow_network_costs_what_does_not_hide_behind_the_backward_pass() -> None:
    work = replace(WORK, world_size=16, zero_stage=0)
    slow = GpuCluster(GPUS["h100"], network_gb_s=1.0)
    waiting = exchange_s(work, slow, backward_s=0.0) - exchange_s(work, slow, backward_s=0.1)
    assert waiting == pytest.approx(0.05)
    assert exchange_s(work, slow, backward_s=1e9) == pytest.approx(exchange_s(work, H100, backward_s=1e9))


def test_recomputing_costs_a_third_of_the_blocks_and_nothing_else() -> None:
    plain, twice = (step_time(replace(WORK, recomputed=share), H100) for share in (0.0, 1.0))
    assert twice.products == pytest.approx(plain.products * 4 / 3)
    assert twice.attention == pytest.approx(plain.attention * 4 / 3)
    assert (twice.vocabulary, twice.optimizer) == (plain.vocabulary, plain.optimizer)


def test_a_graph_takes_the_hosts_time_away() -> None:
    small = replace(WORK, microbatch_lanes=1)
    assert step_time(small, H100).host > 2 * step_time(replace(small, graphed=True), H100).host


def test_longer_memory_more_lanes_and_wider_numbers_take_longer() -> None:
    base = replace(WORK, graphed=True)  # else it is the host that takes the time
    for longer in (
        replace(base, memory_lens=(512,) * 12),
        replace(base, memory_lens=(256,) * 11 + (512,)),
        replace(base, microbatch_lanes=32),
        replace(base, precision="fp32", attention="fused"),
    ):
        assert step_time(longer, H100).total_s > step_time(base, H100).total_s


def test_the_host_hides_behind_a_gpu_that_has_more_to_do() -> None:
    needed_s = 1.2 * GPUS["h100"].host_ms * 1e-3 * 12 * 1.05
    step = step_time(WORK, H100)
    computing_s = step.products + step.attention + step.elementwise + step.vocabulary
    assert step.host - OURS.update_host_s == pytest.approx(needed_s - computing_s)
    assert step_time(replace(WORK, microbatch_lanes=128), H100).host == OURS.update_host_s


def test_nvidias_program_is_slower_than_ours_at_the_same_work() -> None:
    for gpu in ("a100", "h200", "v100-16gb"):
        ours = replace(WORK, attention="kernels" if GPUS[gpu].has_bf16 else "fused", precision="fp16")
        theirs = replace(ours, attention="plain")
        cluster = GpuCluster(GPUS[gpu])
        assert 1.2 * step_time(ours, cluster).total_s < step_time(theirs, cluster, plan.NVIDIA).total_s


@pytest.mark.parametrize("stage", range(4))
def test_strong_scaling_never_gains_efficiency_and_ends_where_a_lane_is_left(stage: int) -> None:
    points = strong(replace(WORK, zero_stage=stage), H100, num_lanes=256)
    assert [point.gpus for point in points] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [point.gpus * point.lanes_per_gpu for point in points] == [256] * 9
    efficiencies = [point.efficiency for point in points]
    assert efficiencies[0] == 1.0
    assert efficiencies == sorted(efficiencies, reverse=True)
    broken = breaking_point(points)
    assert broken is not None
    assert broken.efficiency < 0.5 <= points[points.index(broken) - 1].efficiency
    assert broken.limited_by in StepTime.__dataclass_fields__


def test_weak_scaling_keeps_the_lanes_of_a_gpu_to_4096_and_beats_strong_scaling() -> None:
    points = weak(WORK, H100)
    assert [point.gpus for point in points] == [2**power for power in range(13)]
    assert {point.lanes_per_gpu for point in points} == {16}
    last = strong(WORK, H100, num_lanes=256)[-1]
    assert points[8].gpus == last.gpus == 256
    assert points[8].efficiency > last.efficiency


def test_a_point_names_what_grew_most() -> None:
    slow = GpuCluster(GPUS["h100"], network_gb_s=0.1)
    assert curve([replace(WORK, world_size=n) for n in (1, 64)], slow)[-1].limited_by == "exchange"
    hosts = [replace(WORK, world_size=n, microbatch_lanes=16 // n) for n in (1, 16)]
    fast_network = GpuCluster(replace(GPUS["h100"], bus_gb_s=1e9, host_ms=20.0), gpus_per_node=16)
    assert curve(hosts, fast_network)[-1].limited_by == "host"


def test_units_of_a_gpu() -> None:
    gpu = Gpu("A100", 41.2, 1000.0, 100.0, 0.5, 1.0)
    assert gpu.usable_bytes == pytest.approx(40 * 0.92 * 2**30)
    assert gpu.flops("fp16") == 312e12
    assert gpu.flops("tf32") == 156e12
    assert all(gpu.flops("bf16") > 0 and gpu.flops("fp32") > 0 for gpu in GPUS.values())
    assert find_gpu("A100_40GB") is GPUS["a100-40gb"]


def test_an_unknown_gpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"--gpu h20O is not known. Did you mean h200\? Choose one of .*v100-16gb"):
        find_gpu("h20O")


def test_largest_divisor() -> None:
    assert [largest_divisor(60, at_most=most) for most in (1, 7, 8, 60, 99)] == [1, 6, 6, 60, 60]


def test_muon_sends_its_matrices_around() -> None:
    """At stage 0 each rank sends its share of the steps to all; else what they are made of too, to one rank each."""
    values = 12 * (5 * 512 * 512 + 2 * 512 * 2048)
    for stage, sent in ((0, 7 / 8 * values), (1, 2 / 8 * 7 / 8 * values), (3, 2 / 8 * 7 / 8 * values)):
        plain = replace(WORK, zero_stage=stage)
        more = exchange_bytes(replace(plain, orthogonalizes=True)) - exchange_bytes(plain)
        assert more == pytest.approx(4 * sent)
    alone = replace(WORK, world_size=1, orthogonalizes=True)
    assert exchange_bytes(alone) == 0
