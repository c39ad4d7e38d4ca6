"""Predicted cost and gain of recovery inside the job, by arithmetic. Nothing here was measured on a GPU.

With P bytes of weights and optimizer state, M bytes of memories, W GPUs, g GPUs per node, steps of s seconds, a version
every n steps, of which each k-th one is for the next node too, F seconds between two failures of any GPU, w seconds
that training waits for a checkpoint, and r seconds of a restart:

    version of a rank    v = P / W + M / W. At ZeRO stage 0 the ranks of a node divide the state: v = P / g + M / W
    host memory per node g v (own slots + 2), where own slots are 2, or 3 if k > 1. On one node g v 2
    hash of a version    h = v / HASH_GB_S
    copy to the host     c = v / bandwidth of the PCIe link that each GPU has, + h
    copy to the partner  p = g v / network bandwidth that a node reaches, or v / STREAM_GB_S if that is longer, + h: the
                         receiver hashes the version before it acknowledges it
    share of a step      (c + p / k) / (n s), most of which overlaps with the next forward and backward pass
    a version waits      max(0, c - b), and each k-th one max(0, c + p - b), where b is the time of these passes
    steps made again     the one in flight, half of it on average. With a lost node, (n k - 1) / 2 finished ones more
    time lost without    w / i + (i / 2 + r) / F, with i = sqrt(2 w F) seconds between two checkpoints (Young 1974)
    time lost with       w / i + q / s + (RECOVER_S + s / 2 + s (n k - 1) / 2) / F, where q is the mean wait of a step
                         for versions
    goodput              1 - time lost

The gain assumes that every failure is survived, and takes a node. Failures of two neighbours at once are not counted,
and neither is the bandwidth that the copies take from the rest of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from txl_dist.train.footprint.copies import num_versions, version_bytes

FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""Number of failures per GPU and hour, computed from the unexpected interruptions of Llama 3's pre-training on H100
(Dubey et al. 2024, table 5)."""
RECOVER_S = 20.0
"""Seconds from a failure to the repeated step: the silence limit of 6 s, new process groups, engine and state. The
value is a guess, because recovery has not run on GPUs."""
HASH_GB_S = 20.0
"""Rate in GB/s at which a thread hashes a version in host memory, while other ranks use the memory too. A guess."""
STREAM_GB_S = 2.6
"""Rate in GB/s of one TCP stream, which carries the copies of a rank. Measured within one machine, with
acknowledgements."""
SPARE_BYTES = 400e6
"""Host memory in bytes of a spare, which is one process per node with all modules that a rank imports."""
REFERENCE_GPUS = 1000
"""Number of GPUs for which a plan shows the goodput too."""


@dataclass(frozen=True)
class PredictedGoodput:
    """Percentage of the time that new steps take. The rest goes to saving, copies, repeated steps and restarts."""

    gpus: int
    between_failures_s: float
    """Expected seconds between two failures of any GPU."""
    without_pct: float
    """Goodput if each failure restarts the job from a checkpoint."""
    with_pct: float
    """Goodput if each failure is survived inside the job."""


@dataclass(frozen=True)
class RecoveryCost:
    """Cost and gain of recovery inside the job (`recover.spares`), with partner copies if there are several nodes."""

    has_partner: bool
    """Whether the job has another node for copies."""
    copy_every: int
    """Steps between two versions."""
    partner_steps: int
    """Steps between two versions for the next node."""
    version_gib: float
    """Size of one version of a rank's state in GiB."""
    host_gib: float
    """Host memory per node in GiB for all versions that its agents hold."""
    copy_s: float
    """Seconds of the copy of a version from the GPU into host memory, and of its hash."""
    partner_s: float
    """Seconds of the copies of all ranks of a node to the next node, with their hash there. 0 without partner
    copies."""
    step_pct: float
    """Time of the copies in percent of a step. Most of it overlaps with the step."""
    wait_pct: float
    """Percentage of a step that training waits for the copies."""
    most_repeated_steps: int
    """Largest number of finished steps that a lost node repeats, in addition to the step in flight. On one node: that a
    lost rank repeats."""
    goodput: PredictedGoodput
    reference: PredictedGoodput
    """Goodput of REFERENCE_GPUS GPUs with the same steps and the same size of versions."""


def recovery_cost(
    *,
    state_bytes: float,
    memory_bytes: float,
    gpus: int,
    gpus_per_node: int,
    is_sharded: bool,
    step_s: float,
    overlap_s: float,
    copy_gb_s: float,
    network_gb_s: float,
    copy_every: int,
    partner_every: int,
    wait_s: float,
    restart_s: float,
) -> RecoveryCost:
    """Return the predicted cost and gain of recovery. The module's docstring has the formulas.

    `state_bytes` are the bytes of all weights with their optimizer state, and `memory_bytes` those of all memories.
    `is_sharded` is false at ZeRO stage 0. `overlap_s` is the part of a step before its reduction, in seconds.
    `copy_gb_s` is the bandwidth in GB/s from a GPU to host memory, and `network_gb_s` that between nodes, for all GPUs
    of a node together. `wait_s` is the time that training waits for a checkpoint, and `restart_s` that of a restart.
    """
    local_gpus = min(gpus, gpus_per_node)
    has_partner = gpus > gpus_per_node
    size = version_bytes(
        state_bytes=state_bytes,
        memory_bytes=memory_bytes,
        ranks=gpus,
        ranks_per_node=gpus_per_node,
        is_sharded=is_sharded,
    )
    hash_s = size / (HASH_GB_S * 1e9)
    copy_s = size / (copy_gb_s * 1e9) + hash_s
    partner_s = 0.0
    if has_partner:
        partner_s = max(local_gpus * size / (network_gb_s * 1e9), size / (STREAM_GB_S * 1e9)) + hash_s
    long_waits = max(0.0, copy_s + partner_s - overlap_s)
    short_waits = max(0.0, copy_s - overlap_s) * (partner_every - 1)
    partner_steps = copy_every * partner_every
    wait_share = (long_waits + short_waits) / partner_steps / step_s
    most_repeated = (partner_steps if has_partner else copy_every) - 1
    repeated_s = step_s * (1 + most_repeated) / 2

    def goodput(count: int) -> PredictedGoodput:
        return _goodput(count, wait_share=wait_share, wait_s=wait_s, restart_s=restart_s, repeated_s=repeated_s)

    return RecoveryCost(
        has_partner=has_partner,
        copy_every=copy_every,
        partner_steps=partner_steps,
        version_gib=size / 2**30,
        host_gib=local_gpus * size * num_versions(has_partner=has_partner, partner_every=partner_every) / 2**30,
        copy_s=copy_s,
        partner_s=partner_s,
        step_pct=100 * (copy_s + partner_s / partner_every) / copy_every / step_s,
        wait_pct=100 * wait_share,
        most_repeated_steps=most_repeated,
        goodput=goodput(gpus),
        reference=goodput(REFERENCE_GPUS),
    )


def _goodput(gpus: int, *, wait_share: float, wait_s: float, restart_s: float, repeated_s: float) -> PredictedGoodput:
    """Return the goodput of a number of GPUs.

    `wait_share` is the part of a step that waits for copies. `repeated_s` are the seconds of the steps that a recovery
    repeats.
    """
    between_s = 3600 / (FAILURES_PER_GPU_HOUR * gpus)
    interval_s = math.sqrt(2 * wait_s * between_s)
    saving = wait_s / interval_s
    without = saving + (interval_s / 2 + restart_s) / between_s
    with_recovery = saving + wait_share + (RECOVER_S + repeated_s) / between_s
    return PredictedGoodput(
        gpus=gpus,
        between_failures_s=between_s,
        without_pct=100 * max(0.0, 1 - without),
        with_pct=100 * max(0.0, 1 - with_recovery),
    )
