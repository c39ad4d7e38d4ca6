"""Measurements over each logging interval, such as loss, throughput and memory. The module `loggers` writes these
measurements.

Losses and gradient norms come from the result of each step, for which the host waits anyway. So a report adds no wait
for the device. Losses are means over all ranks. The wait for data is taken from the slowest rank, and the peak memory
from the rank with the highest peak. MFU (model FLOPs utilization) is the share of the devices' peak rate that the
operations of the model (`model.flops`) use.
"""

from __future__ import annotations

import math
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import txl_dist
from txl_dist.console.formatting import counted
from txl_dist.console.logging import warn_for_all
from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.corpora import labelled
from txl_dist.data.loader.lanes import epochs_read
from txl_dist.data.loader.shards import Split
from txl_dist.distributed.collectives import RankInfo, gather_objects, uses_gpu
from txl_dist.distributed.processes import process_age_s
from txl_dist.distributed.rank_environment import format_ranks, without_local_rank
from txl_dist.errors import TrainingError, raised_everywhere
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.loggers import Record
from txl_dist.train.state import TrainState

_SUMS = ("_loss", "_grad_norm", "_local_ms", "_num_steps", "_num_skipped", "_num_scored", "_num_clipped", "_accuracies")
"""Attributes of an interval that hold sums over steps."""


class Interval:
    """Sums over the steps since the last training record. `report` computes the record from them.

    Loss and gradient norm are values of all ranks together. All other sums are values of this rank.
    """

    def __init__(self, *, clip_norm: float = 0.0) -> None:
        """Begin an interval. `clip_norm` is the gradient norm above which steps are clipped, and 0 means no
        clipping."""
        self._start_s = time.perf_counter()
        self._clip_norm = clip_norm
        self._wait_s = self._loss = self._grad_norm = self._lr = self._local_ms = 0.0
        self._num_steps = self._num_skipped = self._num_scored = self._num_clipped = 0
        self._accuracies: list[float] = []
        self._num_untimed = 0
        """Number of steps that another process has made before this interval's clock started."""

    def add(
        self,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        num_scored: int,
        skipped: bool,
        local_ms: float = 0.0,
        accuracy: float | None = None,
    ) -> None:
        """Add the measurements of one step.

        `loss` is the mean loss of the step in nats per token, and `grad_norm` is the global norm before clipping.
        `num_scored` is the number of scored targets of this rank. `skipped` says whether the step was skipped.
        `local_ms` is the time of the step's local part on this rank in milliseconds (see `stragglers`). `accuracy` is
        None if it was not measured (see `layer_stats`).
        """
        if accuracy is not None:
            self._accuracies.append(accuracy)
        self._num_steps = self._num_steps + 1
        self._num_scored = self._num_scored + num_scored
        self._lr = lr
        self._local_ms += local_ms
        if skipped:
            self._num_skipped += 1
        else:
            self._loss = self._loss + loss
            self._grad_norm = self._grad_norm + grad_norm
            self._num_clipped += grad_norm > self._clip_norm

    def sums(self) -> dict[str, Any]:
        """Return the sums that do not depend on the clock, as values for JSON. `continue_from` takes them."""
        return {name: getattr(self, name) for name in _SUMS}

    def continue_from(self, sums: Mapping[str, Any]) -> None:
        """Continue an interval that another process began, after the loss of a rank."""
        for name in _SUMS:
            setattr(self, name, sums[name])
        self._num_untimed = self._num_steps

    def wait(self, seconds: float) -> None:
        """Add the seconds that this rank has waited for the data of a step."""
        self._wait_s += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager that excludes the time of its block from the interval's training time. The loop uses
        it for saving and evaluating."""
        start_s = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - start_s

    def has_valid_steps(self) -> bool:
        """Return whether any rank has scored a token in this interval. All ranks call this method together."""
        return any(gather_objects(self._num_scored > 0))

    def report(self, *, step: int, tokens_per_step: int, num_skipped: int = 0) -> Record:
        """Return the training record of the interval: means over its steps and all ranks, and the number of skipped
        documents.

        `step` is the last step of the interval. `tokens_per_step` counts the tokens of all ranks. `num_skipped` is the
        number of damaged documents that this rank has skipped. Loss and gradient norm are NaN if every step was
        skipped. All ranks call this method together. Raises TrainingError on all ranks if no token was scored.
        """
        span_s = time.perf_counter() - self._start_s
        steps = max(1, self._num_steps)
        timed_steps = max(1, self._num_steps - self._num_untimed)
        local_ms = round(self._local_ms / steps, 3)
        parts = gather_objects((self._wait_s, num_skipped, self._num_scored, peak_memory_bytes(), local_ms))
        if not any(num_scored for _, _, num_scored, *_ in parts):
            raise raised_everywhere(
                TrainingError(
                    f"no token was scored in the {counted(steps, 'step')} up to step {step}, because all text that "
                    f"was read is damaged. Restore the corpus (`txl verify` lists the damage), or remove the damaged "
                    f"corpus from data.path and data.more_paths."
                )
            )
        made = self._num_steps - self._num_skipped
        loss, grad_norm = (total / made if made else math.nan for total in (self._loss, self._grad_norm))
        if self._clip_norm and made:
            clipped = {"clipped_pct": 100 * self._num_clipped / made}
        else:
            clipped = {}
        accuracies = self._accuracies
        return {
            "loss": loss,
            "ppl": math.exp(min(loss, 700.0)),
            **({"accuracy_pct": 100 * sum(accuracies) / len(accuracies)} if accuracies else {}),
            "lr": self._lr,
            "grad_norm": grad_norm,
            **clipped,
            "tokens_per_s": timed_steps * tokens_per_step / span_s,
            "step_ms": 1000 * span_s / timed_steps,
            "data_wait_pct": 100 * max(wait_s for wait_s, *_ in parts) / span_s,
            "peak_gib": max(peak for *_, peak, _ in parts) / 2**30,
            "skipped_documents": sum(number for _, number, *_ in parts),
            "rank_ms": [part[-1] for part in parts],
        }


class Clipping:
    """Counter of the clipped steps of this process, for a warning about the default value of `optim.clip_norm`.

    If a file or flag sets `optim.clip_norm`, nothing is counted.
    """

    MOSTLY_PCT = 95.0
    """Percentage of clipped steps above which the run warns. Above this percentage, nearly all gradients are scaled to
    the same norm."""
    FEWEST_STEPS = 20
    """Smallest number of steps for which a percentage is reported."""

    def __init__(self, clip_norm: float, *, is_default: bool) -> None:
        """Begin to count. `clip_norm` is the value of `optim.clip_norm`. `is_default` says that no file or flag sets
        this value."""
        if is_default:
            self._norm = clip_norm
        else:
            self._norm = 0.0
        self._num_made = 0
        self._num_clipped = 0
        self._sum = 0.0

    def add(self, grad_norm: float) -> None:
        """Count one step by its gradient norm. A skipped step has a norm that is not finite, and does not count."""
        if math.isfinite(grad_norm):
            self._num_made += 1
            self._num_clipped += grad_norm > self._norm
            self._sum += grad_norm

    def counts(self) -> list[float]:
        """Return the counts as values for JSON. `continue_from` takes them."""
        return [self._num_made, self._num_clipped, self._sum]

    def continue_from(self, counts: Sequence[float]) -> None:
        """Continue the counts of another process, after the loss of a rank."""
        num_made, num_clipped, self._sum = counts
        self._num_made, self._num_clipped = int(num_made), int(num_clipped)

    def record(self) -> Record | None:
        """Return the fields of the `clipped` event: `steps`, `clipped_pct`, `clip_norm` and the mean `grad_norm`.

        Returns None if a file or flag sets `optim.clip_norm`, if there were too few steps, or if too few steps
        were clipped.
        """
        if not self._norm or self._num_made < self.FEWEST_STEPS:
            return None
        clipped_pct = 100 * self._num_clipped / self._num_made
        if clipped_pct <= self.MOSTLY_PCT:
            return None
        mean = self._sum / self._num_made
        return {"steps": self._num_made, "clipped_pct": clipped_pct, "clip_norm": self._norm, "grad_norm": mean}


def warn_of_clipping(clipped: Record) -> None:
    """Log on rank 0 that nearly all steps were clipped. `clipped` are the fields of `Clipping.record`."""
    warn_for_all(
        "gradients: %.0f %% of %d steps were clipped by the default optim.clip_norm=%g. The mean gradient norm "
        "was %.3g. Clipped gradients all have the same norm. Set optim.clip_norm: 1.0 suits most models, and 0 "
        "means no clipping. To keep the default without this warning, set it to %g",
        clipped["clipped_pct"],
        clipped["steps"],
        clipped["clip_norm"],
        clipped["grad_norm"],
        clipped["clip_norm"],
    )


def mfu(tokens_per_s: float, *, flops_per_token: float, peak_flops: float) -> dict[str, float]:
    """Return {"mfu_pct": MFU}, or an empty dictionary if the peak rate of the devices is not known.

    MFU (model FLOPs utilization) is the share of the devices' peak rate that the operations of the model use, in per
    cent. `tokens_per_s` and `peak_flops`, in operations per second, are totals over all ranks. `peak_flops` is 0 if the
    peak is not known.
    """
    if peak_flops:
        return {"mfu_pct": 100 * flops_per_token * tokens_per_s / peak_flops}
    return {}


def peak_memory_bytes() -> int:
    """Return the peak memory of this process in bytes. On a GPU it is the memory of torch's allocator, on a CPU the
    resident host memory."""
    if uses_gpu():
        return torch.cuda.max_memory_allocated()
    # getrusage would not do: a process inherits that peak from the one that started it.
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * int(next((line.split()[1] for line in lines if line.startswith("VmHWM:")), "0"))


def check_finite(values: Sequence[float], *, what: str) -> None:
    """Raise TrainingError on all ranks if a value is not finite. Every rank passes the values of all ranks.

    `values` has one value per rank. `what` names the value in the message.
    """
    bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
    if bad:
        raise raised_everywhere(
            TrainingError(
                f"{what} is {values[bad[0]]} on {format_ranks(bad)}. The run stops before a checkpoint stores this "
                f"value. Continue from the last checkpoint with a lower optim.lr, more optim.warmup_steps, or bf16 "
                f"instead of fp16."
            )
        )


def eta_s(step: int, *, max_steps: int, step_ms: float) -> float:
    """Return the seconds until the run reaches `max_steps`, if each step takes `step_ms` milliseconds."""
    return (max_steps - step) * step_ms / 1000


def train_record(
    state: TrainState,
    values: Record,
    *,
    splits: Sequence[Split],
    mask_documents: bool,
    unscored: str,
    max_steps: int,
) -> Record:
    """Return the training record of an interval: its `values`, and numbers that follow from the state at its end.

    These numbers are bits per byte, the epochs read of each split, the tokens seen, and the skipped steps. The seconds
    to the end of the run are included too.
    """
    streams = state.stream.corpora
    shares = [stream.num_lanes / state.stream.num_lanes for stream in streams]
    units = text_units(splits, shares=shares, mask_documents=mask_documents, unscored=unscored)
    epochs = {}
    for stream, split in zip(streams, splits, strict=True):
        name = labelled("epoch", split, splits)
        epochs[name] = epochs_read(stream.cut(), stream.position, num_tokens=split.tokens)
    return {
        "step": state.step,
        **values,
        **units.bits(values["loss"]),
        "tokens_seen": state.tokens_seen,
        "skipped_steps": state.health.skipped_steps,
        **epochs,
        "eta_s": eta_s(state.step, max_steps=max_steps, step_ms=values["step_ms"]),
    }


def start_facts(engine: Engine, ranks: RankInfo) -> Record:
    """Return hardware, versions, command and commit, for the record of a run's start. All ranks call it together."""
    hosts = gather_objects(socket.gethostname())
    if ranks.device.type == "cuda":
        name = torch.cuda.get_device_name(ranks.device)
    else:
        name = platform.machine()
    return {
        "ranks": ranks.world_size,
        "threads_per_rank": ranks.num_threads,
        "hosts": len(set(hosts)),
        "device": name,
        "parameters": sum(math.prod(shape) for shape in engine.shapes.values()),
        "txl_dist": txl_dist.__version__,
        "torch": torch.__version__,
        "command": ["txl", *without_local_rank(sys.argv[1:])],
        "startup_s": round(process_age_s(), 1),
        **(_commit() if ranks.is_rank0 else {}),
    }


def _commit() -> Record:
    """Return {"commit": NAME} for the git checkout that contains this package, or an empty dictionary without a
    checkout.

    The name ends in `-dirty` if files differ from the commit.
    """
    root = Path(txl_dist.__file__).parents[1]
    if not (root / ".git").exists():  # git would report the commit of a project around the installed package
        return {}
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return {"commit": subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()}
    return {}
