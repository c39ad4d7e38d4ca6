"""Predicted speed for growing numbers of GPUs.

With strong scaling the global batch is constant. With weak scaling the number of lanes (batch rows) per GPU is
constant. Each point of a curve is `timing.step_time` of one rank. Efficiency is the number of tokens per second and
GPU, divided by the tokens per second of one GPU. Each point names the part of the step that limits it: the part whose
GPU-seconds per token have grown most compared with one GPU. `picture` draws both curves and a line at 50 %, and marks
the first number of GPUs below the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from txl_dist.planning.hardware import GpuCluster
from txl_dist.planning.timing import Work, step_time

MOST_GPUS = 4096
BROKEN = 0.5
"""Efficiency below which scaling is reported as bad. An efficiency of 1 means as many tokens per second and GPU as on
one GPU."""
REASONS = {
    "products": "small products: weights are read for few tokens",
    "attention": "small products in attention",
    "elementwise": "short passes",
    "vocabulary": "passes over the tables of the vocabulary for few tokens",
    "optimizer": "the optimizer's update, whose work per rank does not shrink",
    "host": "the host, which issues work more slowly than the GPU computes it",
    "exchange": "the exchange of gradients and weights",
}


@dataclass(frozen=True)
class Point:
    """Point of a scaling curve: the predicted speed for one number of GPUs."""

    gpus: int
    lanes_per_gpu: int
    tokens_per_s: float
    efficiency: float
    """Tokens per second and GPU, divided by the tokens per second and GPU of the first point."""
    limited_by: str
    """Part of the step that limits the speed, a key of `REASONS`. The text is empty at the first point, and at a point
    where no part takes more GPU time per token than at the first point."""


def strong(work: Work, cluster: GpuCluster, *, num_lanes: int) -> list[Point]:
    """Return the curve of strong scaling: a point for every number of GPUs, up to MOST_GPUS, that divides the global
    batch.

    `num_lanes` is the number of rows of the global batch. Micro-batches have at most as many rows as the micro-batch of
    `work`.
    """
    works = []
    most_gpus = min(num_lanes, MOST_GPUS)
    for gpus in range(1, most_gpus + 1):
        if num_lanes % gpus:
            continue
        lanes = num_lanes // gpus
        microbatch = largest_divisor(lanes, at_most=work.microbatch_lanes)
        point = replace(
            work,
            world_size=gpus,
            microbatch_lanes=microbatch,
            num_microbatches=lanes // microbatch,
        )
        works.append(point)
    return curve(works, cluster)


def weak(work: Work, cluster: GpuCluster) -> list[Point]:
    """Return the curve of weak scaling, where every GPU has the lanes (batch rows) of `work`.

    The global batch grows with the number of GPUs.
    """
    counts = [2**power for power in range(MOST_GPUS.bit_length())]
    return curve([replace(work, world_size=gpus) for gpus in counts], cluster)


def curve(works: Iterable[Work], cluster: GpuCluster) -> list[Point]:
    """Return a scaling point for each item of `works`. Efficiencies are relative to the first item."""
    points: list[Point] = []
    first: dict[str, float] = {}
    for work in works:
        step = step_time(work, cluster)
        per_token = {}
        for name, part in asdict(step).items():
            per_token[name] = part * work.world_size / work.tokens_per_step
        if not first:
            first = per_token
        growth = {name: part - first[name] for name, part in per_token.items()}
        limit = max(growth, key=growth.__getitem__)
        has_grown = growth[limit] > 0
        if not has_grown:
            limit = ""
        points.append(
            Point(
                gpus=work.world_size,
                lanes_per_gpu=work.microbatch_lanes * work.num_microbatches,
                tokens_per_s=work.tokens_per_step / step.total_s,
                efficiency=sum(first.values()) / sum(per_token.values()),
                limited_by=limit,
            )
        )
    return points


def breaking_point(points: Sequence[Point]) -> Point | None:
    """Return the first point with an efficiency below `BROKEN`, or None if there is none."""
    for point in points:
        if point.efficiency < BROKEN:
            return point
    return None


def largest_divisor(number: int, *, at_most: int) -> int:
    """Return the largest divisor of `number` that is not larger than `at_most`."""
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def picture(strong_points: Sequence[Point], weak_points: Sequence[Point], *, title: str) -> bytes:
    """Draw efficiency over the number of GPUs for both curves. Returns the bytes of a PNG."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for name, points in (("strong", strong_points), ("weak", weak_points)):
        gpus = [point.gpus for point in points]
        shares = [100 * point.efficiency for point in points]
        (line,) = axes.plot(gpus, shares, marker="o", markersize=3, label=f"{name} scaling")
        broken = breaking_point(points)
        if broken:
            share = 100 * broken.efficiency
            text = f"{broken.gpus:,} GPUs: {share:.0f} %, {broken.tokens_per_s:,.0f} tokens/s, {broken.limited_by}"
            axes.annotate(
                text,
                (broken.gpus, share),
                xytext=(6, 2),
                textcoords="offset points",
                fontsize=8,
                color=line.get_color(),
            )
    axes.axhline(100 * BROKEN, color="red", linewidth=0.8, label=f"{100 * BROKEN:.0f} %")
    axes.set(xlabel="GPUs", ylabel="tokens per second and GPU, % of one GPU", ylim=(0, 105))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
