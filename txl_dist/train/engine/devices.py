"""The number of devices that DeepSpeed sees on this machine. DeepSpeed's launcher can start one rank on each
device."""

from __future__ import annotations


def count_devices() -> int:
    """Return the number of GPUs of this machine. Without GPUs, return the number of NUMA nodes of its CPUs."""
    from deepspeed.accelerator import get_accelerator

    return int(get_accelerator().device_count())
