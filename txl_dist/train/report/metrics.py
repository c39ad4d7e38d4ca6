"""The measurements of each logging interval. `loggers` show them.

Losses and gradient norms come from the decision of each step, which waits for the device anyway, so a report adds no
wait. Losses are means over ranks. Waiting for data is that of the slowest rank, peak memory that of the fullest one.
MFU (Model FLOPs utilization) is the share of the devices' peak that the model's operations (`model.flops`) take.
"""

from __future__ import annotations

import math
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import txl_dist
from txl_dist.console.formatting import counted
from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.lanes import epochs_read
from txl_dist.distributed.collectives import RankInfo, gather_objects, uses_gpu
from txl_dist.distributed.rank_environment import format_ranks, without_local_rank
from txl_dist.errors import TrainingError, raised_everywhere
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.loggers import Record
from txl_dist.train.report.validation import labelled
from txl_dist.train.state import TrainState


class Interval:
    """Sums since the last report. Loss and gradient norm are those of all ranks, other sums are this rank's."""

    def __init__(self, *, clip_norm: float = 0.0) -> None:
        """`clip_norm` is the gradient norm above which steps are clipped; 0 means no clipping."""
        self._start_s = time.perf_counter()
        self._clip_norm = clip_norm
        self._wait_s = self._loss = self._grad_norm = self._lr = self._local_ms = 0.0
        self._num_steps = self._num_skipped = self._num_scored = self._num_clipped = 0
        self._accuracies: list[float] = []

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
        """Add one step.

        `loss` is its mean loss in nats, `num_scored` the number of scored targets of this rank, and `skipped` says
        whether the step was skipped. `local_ms` is the time of the step's local part on this rank (see `stragglers`).
        `accuracy` is None if it was not measured (see `layer_stats`).
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

    def wait(self, seconds: float) -> None:
        """Add the seconds that this rank waited for data."""
        self._wait_s += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block (saving, evaluating) from the training time."""
        start_s = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - start_s

    def has_valid_steps(self) -> bool:
        """Whether any rank has scored a token. All ranks call it."""
        return any(gather_objects(self._num_scored > 0))

    def report(self, *, step: int, tokens_per_step: int, num_skipped: int = 0) -> Record:
        """Return the means over the interval and all ranks, and the number of skipped documents.

        Loss and gradient norm are NaN if every step was skipped. All ranks call it together. Raises TrainingError on
        all ranks if no token was scored.
        """
        span_s = time.perf_counter() - self._start_s
        steps = max(1, self._num_steps)
        local_ms = round(self._local_ms / steps, 3)
        parts = gather_objects((self._wait_s, num_skipped, self._num_scored, peak_memory_bytes(), local_ms))
        if not any(num_scored for _, _, num_scored, *_ in parts):
            raise raised_everywhere(
                TrainingError(
                    f"no token was scored in the {counted(steps, 'step')} up to step {step}, because all text that "
                    f"was read is damaged. Restore the corpus (`txl verify` lists the damage), or remove it from "
                    f"data.path and data.more_paths."
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
            "tokens_per_s": steps * tokens_per_step / span_s,
            "step_ms": 1000 * span_s / steps,
            "data_wait_pct": 100 * max(wait_s for wait_s, *_ in parts) / span_s,
            "peak_gib": max(peak for *_, peak, _ in parts) / 2**30,
            "skipped_documents": sum(number for _, number, *_ in parts),
            "rank_ms": [part[-1] for part in parts],
        }


class Clipping:
    """Counter of the clipped steps of this process. It is active only if the settings do not set `optim.clip_norm`."""

    MOSTLY_PCT = 95.0
    """Percentage of clipped steps above which the run says so: then the norm, not the gradient, sets the step size."""
    FEWEST_STEPS = 20
    """Smallest number of steps of which a share is reported."""

    def __init__(self, clip_norm: float, *, is_default: bool) -> None:
        """`clip_norm` is the setting. `is_default` says that no file or flag has set it."""
        if is_default:
            self._norm = clip_norm
        else:
            self._norm = 0.0
        self._num_made = 0
        self._num_clipped = 0
        self._sum = 0.0

    def add(self, grad_norm: float) -> None:
        """Add the gradient norm of one step; a skipped step's is not finite, and does not count."""
        if math.isfinite(grad_norm):
            self._num_made += 1
            self._num_clipped += grad_norm > self._norm
            self._sum += grad_norm

    def record(self) -> Record | None:
        """Return `steps`, `clipped_pct`, `clip_norm` and the mean `grad_norm`.

        Returns None if the settings set the norm, if there are too few steps, or if most steps were not clipped.
        """
        if not self._norm or self._num_made < self.FEWEST_STEPS:
            return None
        clipped_pct = 100 * self._num_clipped / self._num_made
        if clipped_pct <= self.MOSTLY_PCT:
            return None
        mean = self._sum / self._num_made
        return {"steps": self._num_made, "clipped_pct": clipped_pct, "clip_norm": self._norm, "grad_norm": mean}


def mfu(tokens_per_s: float, *, flops_per_token: float, peak_flops: float) -> dict[str, float]:
    """Return `mfu_pct`, Model FLOPs utilization: the share of the devices' peak that the model's operations take.

    The speed and `peak_flops`, in operations per second, are those of all ranks together. Nothing is returned if the
    peak is not known, which is 0.
    """
    if peak_flops:
        return {"mfu_pct": 100 * flops_per_token * tokens_per_s / peak_flops}
    return {}


def peak_memory_bytes() -> int:
    """Return the peak memory of this process in bytes: GPU memory in torch's allocator; on a CPU host memory (RSS)."""
    if uses_gpu():
        return torch.cuda.max_memory_allocated()
    # getrusage would not do: a process inherits that peak from the one that started it.
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * int(next((line.split()[1] for line in lines if line.startswith("VmHWM:")), "0"))


def check_finite(values: Sequence[float], *, what: str) -> None:
    """Raise TrainingError on all ranks if a value is not finite. Every rank passes the values of all ranks."""
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
    """Return the seconds to the end of the run at the present speed."""
    return (max_steps - step) * step_ms / 1000


def train_record(
    state: TrainState,
    values: Record,
    *,
    splits: Sequence[Split],
    mask_documents: bool,
    half_loss: bool,
    max_steps: int,
) -> Record:
    """Return the record of an interval that ends at a state: its `values`, and what follows from the state.

    That is the loss in units of the text, how often the splits have been read, and the time to the end of the run.
    """
    streams = state.stream.corpora
    shares = [stream.num_lanes / state.stream.num_lanes for stream in streams]
    units = text_units(splits, shares=shares, mask_documents=mask_documents, half_loss=half_loss)
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
    """Return hardware, versions, command and commit, for the record of a start. All ranks call it together."""
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
        **(_commit() if ranks.is_rank0 else {}),
    }


def _commit() -> Record:
    """Return the commit of the checkout that holds this package, or nothing if there is none.

    `-dirty` is added if files differ from the commit.
    """
    root = Path(txl_dist.__file__).parents[1]
    if not (root / ".git").exists():  # git would report the commit of a project around the installed package
        return {}
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return {"commit": subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()}
    return {}
