"""The precision of a run with engine.precision = "auto": bf16 if every rank is fast in bf16, otherwise fp32.

    each rank: support of its device -> rank 0: one word for all ranks -> plan of the run

A GPU has bf16 from compute capability 8.0 (Ampere) on. A CPU has bf16 if it has instructions for products of bf16
matrices (AMX or AVX-512 BF16), and if a product is at least `MIN_SPEEDUP` times as fast as in fp32. Other CPUs emulate
bf16, which is many times slower than fp32.

A run keeps the precision with which it began, also on another processor. The run directory and the checkpoints contain
the precision that was chosen, and never "auto".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from txl_dist.config.schema import Precision, PrecisionSetting
from txl_dist.console.formatting import counted
from txl_dist.console.logging import warn_for_all
from txl_dist.distributed.collectives import broadcast_object, gather_objects, run_on_all_ranks
from txl_dist.io.files import read_text

MIN_SPEEDUP = 1.3
"""Smallest speed of a product in bf16 next to the same product in fp32 for which "auto" chooses bf16 on a CPU. The
other work of a step (casts, update of fp32 weights) costs more in bf16 than in fp32."""
INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16"}
"""Instructions for products of bf16 matrices: their flags in /proc/cpuinfo and their names, fastest first."""
_SLOW_INFERENCE = "inference in bf16 is slower than in fp32 here: {}. Choose precision fp32 (--precision fp32)"
_ROUNDS = 6
"""Number of timed products of each type. The first one also prepares the libraries, so it is hardly the best."""
_ROWS = 256
_WIDTH = 512


class Bf16Support(NamedTuple):
    """Whether bf16 is fast on the device of one rank."""

    is_fast: bool
    """True if training in bf16 is expected to be faster than in fp32."""
    reason: str
    """Instructions and speed, or the reason why bf16 is slow. It is part of a sentence."""


class ChosenPrecision(NamedTuple):
    """Precision of a run, after "auto" was replaced."""

    word: Precision
    """Value of engine.precision for the run. It is never "auto"."""
    reason: str = ""
    """Reason for the choice, part of a sentence. Empty if the user has named the precision."""
    warnings: tuple[str, ...] = ()
    """A sentence if the precision is slow on a rank."""


def agree_on_precision(given: PrecisionSetting, *, kept: Precision | None, device: torch.device) -> ChosenPrecision:
    """Choose the precision of a run on rank 0, from the answers of all ranks. All ranks call this function together.

    `given` is engine.precision. `kept` is the precision of the run that continues, or None for a new run. Both must be
    the same on all ranks. `device` is the device of this rank.
    """
    answers: list[Bf16Support] = []
    if needs_support(given, kept=kept):
        answers = gather_objects(run_on_all_ranks(lambda: bf16_support(device)))
    return broadcast_object(choose_precision(given, kept=kept, answers=answers))


def needs_support(given: PrecisionSetting, *, kept: Precision | None) -> bool:
    """Return whether the choice depends on the devices, or needs a warning if they are slow in bf16."""
    if given == "auto":
        return kept in (None, "bf16")
    return given == "bf16"


def choose_precision(
    given: PrecisionSetting, *, kept: Precision | None, answers: Sequence[Bf16Support]
) -> ChosenPrecision:
    """Choose the precision of a run. `answers` are those of all ranks, in rank order.

    A precision that the user has named is used. "auto" means `kept` if the run continues. For a new run it means bf16
    if every rank is fast in bf16, otherwise fp32.
    """
    slow = _slow_ranks(answers)
    if given != "auto":
        word = given
        reason = ""
    elif kept is not None:
        word = kept
        reason = "the run's precision so far"
    elif slow:
        return ChosenPrecision("fp32", slow)
    else:
        return ChosenPrecision("bf16", answers[0].reason)
    warnings: tuple[str, ...] = ()
    if slow:
        warnings = (f"engine.precision={word} is slower than fp32 here: {slow}. Use --engine.precision fp32",)
    return ChosenPrecision(word, reason, warnings)


def _slow_ranks(answers: Sequence[Bf16Support]) -> str:
    """Return which ranks are slow in bf16 and the reason of the first one, or an empty string if none is slow."""
    slow = [rank for rank, answer in enumerate(answers) if not answer.is_fast]
    if not slow:
        return ""
    reason = answers[slow[0]].reason
    if len(answers) == 1:
        return reason
    return f"{len(slow)} of {counted(len(answers), 'rank')} without fast bf16, the first is rank {slow[0]} ({reason})"


def bf16_support(device: torch.device) -> Bf16Support:
    """Return whether bf16 is fast on this device. On a CPU with instructions for bf16, products are timed for less than
    a second."""
    if device.type == "cuda":
        return gpu_support(torch.cuda.get_device_capability(device))
    return cpu_support(bf16_instructions(), measure_speedup=product_speedup)


def slow_bf16_warning(dtype: str, device: torch.device) -> str:
    """Return a warning if inference in the number type `dtype` is slow on a device, otherwise an empty string."""
    if dtype != "bf16":
        return ""
    support = bf16_support(device)
    if support.is_fast:
        return ""
    return _SLOW_INFERENCE.format(support.reason)


def warn_of_slow_inference(dtype: str, device: torch.device) -> None:
    """Log a warning on rank 0 if inference in the number type `dtype` is slow on a rank. All ranks call it together."""
    if dtype == "bf16":
        slow = _slow_ranks(gather_objects(run_on_all_ranks(lambda: bf16_support(device))))
        if slow:
            warn_for_all("%s", _SLOW_INFERENCE.format(slow))


def gpu_support(capability: tuple[int, int]) -> Bf16Support:
    """Return whether a GPU of this compute capability has bf16."""
    major, minor = capability
    if major >= 8:
        return Bf16Support(True, f"a GPU of compute capability {major}.{minor}")
    return Bf16Support(False, f"a GPU of compute capability {major}.{minor} emulates bf16")


def cpu_support(instructions: str, *, measure_speedup: Callable[[], float]) -> Bf16Support:
    """Return whether bf16 is fast on a CPU with these instructions.

    `instructions` is a name of `INSTRUCTIONS`, or empty. `measure_speedup` times products, and is called only if there
    are instructions.
    """
    if not instructions:
        names = " nor ".join(INSTRUCTIONS.values())
        return Bf16Support(False, f"the processor has neither {names}")
    speedup = measure_speedup()
    if speedup < MIN_SPEEDUP:
        return Bf16Support(
            False,
            f"the processor has {instructions}, but products in bf16 are only {speedup:.1f} times as fast as in fp32",
        )
    return Bf16Support(True, f"{instructions}, products {speedup:.1f} times as fast as in fp32")


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor's instructions for bf16 products, or an empty string if it has none.

    The result is also empty if the file `cpuinfo` cannot be read.
    """
    try:
        text = read_text(cpuinfo)
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, flags = line.partition(":")
        if key.strip() == "flags":
            present = set(flags.split())
            return next((name for flag, name in INSTRUCTIONS.items() if flag in present), "")
    return ""


def product_speedup() -> float:
    """Return how many times as fast a product of bf16 matrices is as the same product in fp32.

    Both times are the best of some rounds, in turn. They are processor time of this thread, because other programs on
    the machine change the ratio of elapsed times, and with it the precision of a run. With more threads this thread
    would spend its time waiting for the others, so one thread computes.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _product_speedup()
    finally:
        torch.set_num_threads(num_threads)


def _product_speedup() -> float:
    """Return the result of `product_speedup`, with the present number of threads."""
    best_s = []
    products = []
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.ones(_ROWS, _WIDTH, dtype=dtype)
        weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
        products.append((rows, weight.t()))
        best_s.append(float("inf"))
    for _ in range(_ROUNDS):
        for index, (rows, weight) in enumerate(products):
            start = time.thread_time()
            torch.mm(rows, weight)
            best_s[index] = min(best_s[index], time.thread_time() - start)
    return best_s[0] / best_s[1]
