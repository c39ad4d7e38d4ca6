"""Compare the time model of `txl plan` with the training speeds that NVIDIA published for its own Transformer-XL.

`python -m tools.checks.plan` prints for every row the published tokens per second, the predicted ones and the error.
The model has one calibrated constant per kind of GPU: the share of the peak that products reach (`Gpu.matmul_share`).
It is calibrated on the marked row. The program computes it again and prints it next to the value in
`planning/hardware.py`. All other rows are predictions. The exit code is 1 if a mixed-precision row is off by more than
30 %. The FP32 and TF32 rows are printed too, but they are not used for calibration or for the exit code. The program
also prints predicted speeds of our own code on the same machines, which were not measured.

Source of the rows: NVIDIA DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL, README.md, "Training
performance results". The sizes are those of configs/nvidia_wt103_base.toml and nvidia_wt103_large.toml.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from txl_dist.config.load import load_config
from txl_dist.config.schema import Precision
from txl_dist.model.flops import count_parameters
from txl_dist.planning.hardware import GPUS, GpuCluster
from txl_dist.planning.timing import OURS, Program, Work, step_time
from txl_dist.vocabulary_clusters import typical_shares

NVIDIA = Program(  # NVIDIA's Transformer-XL for PyTorch
    memory_products=(3, 3),
    skips_masked=False,
    score_passes={"plain": 21},
    dropout_passes=5,
    width_passes=52,
    ff_passes=13,
    inner_passes=41,
    logit_passes=20,
    table_passes=4.25,
    cuts_tables=True,
    state_bytes=(60, 72),
    host_factor=2.0,
    waits=True,
)
BAR = 0.30
VOCAB_SIZE = 267_735
CONFIGS = Path(__file__).parents[2] / "configs"
CLUSTERS = {
    "DGX A100": GpuCluster(GPUS["a100-40gb"], gpus_per_node=8),
    "DGX-1": GpuCluster(GPUS["v100-16gb"], gpus_per_node=8),
    "DGX-2H": GpuCluster(GPUS["v100-32gb-450w"], gpus_per_node=16, network_gb_s=100.0),
}
"""The machines of the table. The DGX-2H has eight network cards of 100 Gb/s."""


class Row(NamedTuple):
    """A row of NVIDIA's tables. Speeds are in tokens per second, and 0 means out of memory."""

    machine: str
    model: str
    lanes: int
    """Lanes (batch rows) per GPU."""
    gpus: int
    wide: int
    """Speed in TF32 on the A100, and in FP32 on the other machines."""
    mixed: int


PUBLISHED = [
    Row("DGX A100", "base", 32, 1, 41_527, 59_961),
    Row("DGX A100", "base", 32, 2, 77_625, 113_238),
    Row("DGX A100", "base", 32, 4, 153_945, 225_609),
    Row("DGX A100", "base", 32, 8, 305_933, 449_890),
    Row("DGX A100", "large", 8, 1, 14_497, 21_554),
    Row("DGX A100", "large", 8, 2, 27_304, 40_222),
    Row("DGX A100", "large", 8, 4, 53_756, 80_226),
    Row("DGX A100", "large", 8, 8, 106_651, 159_185),
    Row("DGX A100", "large", 16, 1, 0, 25_084),
    Row("DGX A100", "large", 16, 2, 0, 48_562),
    Row("DGX A100", "large", 16, 4, 0, 95_997),
    Row("DGX A100", "large", 16, 8, 0, 191_148),
    Row("DGX-1", "base", 16, 1, 13_981, 26_639),
    Row("DGX-1", "base", 16, 2, 23_163, 45_299),
    Row("DGX-1", "base", 16, 4, 48_893, 92_618),
    Row("DGX-1", "base", 16, 8, 97_005, 170_532),
    Row("DGX-1", "base", 32, 1, 0, 36_692),
    Row("DGX-1", "base", 32, 2, 0, 65_889),
    Row("DGX-1", "base", 32, 4, 0, 133_838),
    Row("DGX-1", "base", 32, 8, 0, 258_648),
    Row("DGX-1", "large", 2, 1, 3_558, 6_907),
    Row("DGX-1", "large", 2, 2, 6_153, 11_272),
    Row("DGX-1", "large", 2, 4, 12_492, 22_530),
    Row("DGX-1", "large", 2, 8, 24_595, 40_920),
    Row("DGX-1", "large", 4, 1, 0, 10_210),
    Row("DGX-1", "large", 4, 2, 0, 17_984),
    Row("DGX-1", "large", 4, 4, 0, 36_340),
    Row("DGX-1", "large", 4, 8, 0, 66_716),
    Row("DGX-2H", "base", 16, 1, 16_150, 32_875),
    Row("DGX-2H", "base", 16, 2, 29_712, 59_058),
    Row("DGX-2H", "base", 16, 4, 58_011, 113_985),
    Row("DGX-2H", "base", 16, 8, 114_655, 223_907),
    Row("DGX-2H", "base", 16, 16, 222_920, 414_994),
    Row("DGX-2H", "large", 8, 1, 5_169, 14_787),
    Row("DGX-2H", "large", 8, 2, 9_977, 27_710),
    Row("DGX-2H", "large", 8, 4, 19_691, 54_207),
    Row("DGX-2H", "large", 8, 8, 39_157, 107_073),
    Row("DGX-2H", "large", 8, 16, 77_568, 211_387),
    Row("DGX-2H", "large", 4, 16, 69_070, 154_950),
    Row("DGX-2H", "large", 4, 32, 136_960, 307_520),
    Row("DGX-2H", "large", 4, 64, 270_120, 605_530),
    Row("DGX-2H", "large", 4, 128, 514_500, 1_189_700),
]
CALIBRATION = {
    "DGX A100": Row("DGX A100", "large", 16, 1, 0, 25_084),
    "DGX-1": Row("DGX-1", "base", 32, 1, 0, 36_692),
    "DGX-2H": Row("DGX-2H", "large", 8, 1, 5_169, 14_787),
}
"""Calibration row of each machine: the row on one GPU with most work, in which the least known parts (host and
optimizer) are smallest."""


@dataclass(frozen=True)
class Recipe:
    """A configuration in the form that the time model needs."""

    work: Work
    """Work of one GPU."""

    @staticmethod
    def read(name: str) -> Recipe:
        """Return NVIDIA's configuration `base` or `large`."""
        config = load_config(CONFIGS / f"nvidia_wt103_{name}.toml")
        return Recipe(
            Work(
                model=config.model,
                vocab_size=VOCAB_SIZE,
                shares=typical_shares((0, *config.model.cutoffs, VOCAB_SIZE)),
                parameters=count_parameters(config.model, vocab_size=VOCAB_SIZE),
                segment_len=config.train.segment_len,
                memory_lens=config.train.memory_per_layer(config.model.num_layers),
                microbatch_lanes=1,
                num_microbatches=1,
                world_size=1,
                zero_stage=0,
                precision="fp16",
                needs_whole_tensors=True,
            )
        )


RECIPES = {name: Recipe.read(name) for name in ("base", "large")}


def predicted(row: Row, *, precision: Precision, cluster: GpuCluster, program: Program = NVIDIA) -> float:
    """Return the predicted tokens per second of all GPUs together."""
    has_kernels = program is OURS and cluster.gpu.has_bf16
    work = replace(
        RECIPES[row.model].work,
        microbatch_lanes=row.lanes,
        world_size=row.gpus,
        precision=precision,
        attention="kernels" if has_kernels else "fused" if program is OURS else "plain",
    )
    return work.tokens_per_step / step_time(work, cluster, program).total_s


def errors(rows: Sequence[Row] = PUBLISHED) -> list[float]:
    """Return predicted / published - 1 for the mixed-precision speed of each row."""
    return [predicted(row, precision="fp16", cluster=CLUSTERS[row.machine]) / row.mixed - 1 for row in rows]


def calibrated(row: Row) -> float:
    """Return the share of the peak with which the prediction of a row equals the published speed."""
    cluster, low, high = CLUSTERS[row.machine], 0.05, 5.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        trial = replace(cluster, gpu=replace(cluster.gpu, matmul_share=middle))
        is_too_fast = predicted(row, precision="fp16", cluster=trial) > row.mixed
        low, high = (low, middle) if is_too_fast else (middle, high)
    return (low + high) / 2


def main(words: Sequence[str] | None = None) -> int:
    """Print all rows. Return 0 if the mixed-precision rows are within the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(words)
    print("| machine | model | lanes/GPU | GPUs | published | predicted | error | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row, error in zip(PUBLISHED, errors(), strict=True):
        mark = "calibration" if row == CALIBRATION[row.machine] else ""
        rate = row.mixed * (1 + error)
        print(f"{_start(row)} {row.mixed:,} | {rate:,.0f} | {100 * error:+.1f} % | {mark} |")
    found = [error for row, error in zip(PUBLISHED, errors(), strict=True) if row not in CALIBRATION.values()]
    worst, mean = max(map(abs, found)), math.sqrt(sum(error**2 for error in found) / len(found))
    print(f"\n{len(found)} predicted rows: largest error {100 * worst:.1f} %, root mean square {100 * mean:.1f} %")
    for machine, row in CALIBRATION.items():
        share = CLUSTERS[machine].gpu.matmul_share
        print(f"{machine}: share of the peak {calibrated(row):.3f} on its calibration row; {share:.2f} in hardware.py")
    print("\n".join(["", *_elsewhere(), "", *_ours()]))
    return 0 if worst <= BAR else 1


def _start(row: Row) -> str:
    return f"| {row.machine} | {row.model} | {row.lanes} | {row.gpus} |"


def _elsewhere() -> Iterator[str]:
    """Yield the TF32 and FP32 rows, which were not used for calibration."""
    yield "Outside the bar, TF32 (A100) and FP32 (V100):"
    for row in PUBLISHED:
        if row.wide:
            precision: Precision = "tf32" if row.machine == "DGX A100" else "fp32"
            rate = predicted(row, precision=precision, cluster=CLUSTERS[row.machine])
            yield f"{_start(row)} {row.wide:,} | {rate:,.0f} | {100 * (rate / row.wide - 1):+.1f} % | |"


def _ours() -> Iterator[str]:
    """Yield rows with the predicted speed of our code on the same machines."""
    yield "Our code with the same batches, fp16 and lamb: predicted speed (not measured), ratio to NVIDIA's:"
    for row in PUBLISHED:
        if row.gpus in (1, 8, 16, 128):
            rate = predicted(row, precision="fp16", cluster=CLUSTERS[row.machine], program=OURS)
            yield f"{_start(row)} {rate:,.0f} | {rate / row.mixed:.2f} x |"


if __name__ == "__main__":
    sys.exit(main())
